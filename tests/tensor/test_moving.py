"""A checkpoint that one layout has written goes on in every other one, and in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.api_support import same
from tests.tensor.moving_cases import adamw, build, plain_step
from tests.tensor.moving_layouts import MORE, PLAIN_FORMS, SOME, Checkpoints, Layout


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("moving"))


def mean_losses(found: list[dict[str, Any]]) -> list[float]:
    """Over replicas, which have equal shares of each batch."""
    return torch.tensor([rank["losses"] for rank in found], dtype=torch.float64).mean(0).tolist()


def check_all(
    checkpoints: Checkpoints,
    sources: list[Layout],
    target: Layout,
    *,
    steps_before: int = 0,
    forms: tuple[str, ...] = PLAIN_FORMS,
) -> None:
    """From each of the layouts, and from what plain PyTorch saves in each of its forms, to one."""
    dense = checkpoints.dense
    for source in sources:
        assert mean_losses(checkpoints.gone_on(source)) == pytest.approx(dense.losses[2:], rel=1e-6)
    tags = [*map(str, sources), *forms]
    found = checkpoints.load_in(target, tags, steps_before=steps_before)
    for tag, ranks in zip(tags, found, strict=True):
        whole = tag != "model alone"
        first = mean_losses(ranks)[0]
        assert first == pytest.approx(dense.losses[2], rel=1e-6), (tag, target)
        assert ranks[0]["content"] == ({"step": 2} if tag not in PLAIN_FORMS else None)
        if not whole:
            continue
        assert mean_losses(ranks) == pytest.approx(dense.losses[2:], rel=1e-6), (tag, target)
        model, optimizer = dense.states[4]
        for rank in ranks:
            assert_close(rank["state"], model)
            assert_close(rank["optimizer"], optimizer)
    for source, ranks in zip(sources, found, strict=False):
        if (source.tp, source.dp) == (target.tp, target.dp):
            going_on = checkpoints.gone_on(source)[0]
            for rank in ranks:
                if target.dp == 1:
                    assert rank["losses"] == going_on["losses"], (source, target)
                assert same(rank["state"], going_on["state"]), (source, target)


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    else:
        assert found == expected


def check_plain(checkpoints: Checkpoints, source: Layout, form: str, file: Path) -> None:
    """One ordinary process reads it, as a user of PyTorch does."""
    folder = checkpoints.of(source)
    net = build(9)
    optim = adamw(net)
    if form == "one file":
        dcp_to_torch_save(folder, file)
        whole = torch.load(file, weights_only=True)
        model, optimizer = whole["model"], whole["optimizer"]
        assert list(model) == list(net.state_dict())
        optim.load_state_dict({key: optimizer[key] for key in ("state", "param_groups")})
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        model, optimizer = net.state_dict(), get_optimizer_state_dict(net, optim, options=options)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
        set_optimizer_state_dict(net, optim, optimizer, options=options)
    net.load_state_dict(model)
    assert_close(net.state_dict(), checkpoints.dense.states[2][0])
    losses = [plain_step(net, optim, index) for index in range(2, 4)]
    assert losses == pytest.approx(checkpoints.dense.losses[2:], rel=1e-6)
    if (source.tp, source.dp) == (1, 1):
        assert losses == checkpoints.dense.losses[2:] == checkpoints.gone_on(source)[0]["losses"]


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_other_layouts_and_in_plain_pytorch(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """25 changes of layout, and from and to plain PyTorch; one test, since one process saves for all."""
    for target in SOME:
        check_all(checkpoints, SOME, target, forms=PLAIN_FORMS if target == Layout(1, 2, 1) else ())
    check_all(checkpoints, SOME[:1], Layout(2, 2, 1), steps_before=1, forms=())
    for source in SOME:
        for form in ("listed", "flat", "one file"):
            check_plain(checkpoints, source, form, tmp_path / "one.pt")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("target", [*SOME, *MORE], ids=str)
def test_all_changes_of_layout(checkpoints: Checkpoints, target: Layout, steps_before: int) -> None:
    check_all(checkpoints, [*SOME, *MORE], target, steps_before=steps_before)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", MORE, ids=str)
def test_plain_pytorch_goes_on_from_all(checkpoints: Checkpoints, source: Layout, tmp_path: Path) -> None:
    for form in ("listed", "flat", "one file"):
        check_plain(checkpoints, source, form, tmp_path / "one.pt")
