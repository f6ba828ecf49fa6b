"""Decisions on data warn once for each line, naming it; hooks fire as often as in plain torch."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import smp_lite as smp
from tests.harness import run_distributed
from tests.models import CASES
from tests.models.layers import Chain, regression_batch
from tests.transparency.comparison import NUM_MICROBATCHES, plain_run, smp_run
from tests.transparency.conftest import OpenSession

BATCH = regression_batch(8)


def test_warns_once_for_each_line_of_the_user(open_session: OpenSession) -> None:
    open_session(2)
    model = smp.DistributedModel(Chain())

    @smp.step
    def run(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        output.detach().sum().item()
        if output.detach().mean() > 0:
            output = output * 2
        return output

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model, BATCH["x"])
        run(model, BATCH["x"])
    found = [warning for warning in caught if "needs the data" in str(warning.message)]
    source, start = inspect.getsourcelines(run.function)
    lines = [
        start + number
        for number, line in enumerate(source)
        if ".item()" in line or line.lstrip().startswith("if ")
    ]
    assert [warning.lineno for warning in found] == lines
    for warning, line in zip(found, lines, strict=True):
        assert warning.filename == __file__
        assert f"{__file__}:{line}" in str(warning.message)


def test_no_warning_without_a_decision(open_session: OpenSession) -> None:
    open_session(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*needs the data")
        smp_run(CASES["unet"])


def hook_counts() -> dict[str, tuple[int, int]]:
    smp.init()
    case = CASES["hooks"]
    return smp_run(case, stages=case.manual_stages(smp.state.num_stages))[-1].hooks


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_where_hooks_fire(num_ranks: int) -> None:
    """Forward hooks are code around calls: on every rank. Backward hooks fire where the gradient is."""
    parameters = {
        "partitions": num_ranks,
        "microbatches": NUM_MICROBATCHES,
        "auto_partition": False,
        "default_partition": 0,
    }
    found = run_distributed(
        "tests.transparency.users_code.test_forced_values:hook_counts", num_ranks, parameters=parameters
    )
    plain = plain_run(CASES["hooks"])[-1].hooks
    for name, (forward, backward) in plain.items():
        assert [counts[name][0] for counts in found] == [forward] * num_ranks
        assert sorted(counts[name][1] for counts in found) == [0] * (num_ranks - 1) + [backward]


def test_backward_hook_on_a_split_module_is_refused(open_session: OpenSession) -> None:
    open_session(2)
    module = Chain()
    module.register_full_backward_hook(lambda *_: None)
    model = smp.DistributedModel(module)

    @smp.step
    def run(model: Any, x: Tensor) -> Tensor:
        return model(x)

    with pytest.raises(smp.SMPError, match=re.escape("has backward hooks and is split over stages")):
        run(model, BATCH["x"])


def test_forward_hooks_of_a_split_module(open_session: OpenSession) -> None:
    """The root's own hooks see placed values and may change them."""
    open_session(2)
    torch.manual_seed(0)
    module = Chain()
    plain = module(BATCH["x"] * 2) + 1
    calls: list[str] = []
    module.register_forward_pre_hook(lambda _, args: (calls.append("before"), (args[0] * 2,))[1])
    module.register_forward_hook(lambda _, args, output: (calls.append("after"), output + 1)[1])
    model = smp.DistributedModel(module)

    @smp.step
    def run(model: Any, x: Tensor) -> Tensor:
        return model(x)

    found = run(model, BATCH["x"]).concat()
    assert calls == ["before", "after"] * NUM_MICROBATCHES
    assert torch.allclose(found, plain, atol=1e-6)
