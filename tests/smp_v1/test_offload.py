"""Activation offloading: the same to the bit, and memory is really given back."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.runtime.offloading.file_store import FOLDER_VARIABLE, FileStore
from smp_lite.runtime.offloading.kept_input import KeptInput
from smp_lite.runtime.offloading.offload import ActivationOffload
from tests.harness import run_distributed
from tests.sampling import one_in
from tests.smp_v1.test_checkpointed_groups import Block, same, trained, unmarked

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")


def marked(strategy: str) -> Callable[[Any], None]:
    return lambda net: smp.set_activation_checkpointing(net.row, strategy=strategy)


def left_bytes() -> int:
    """What has left memory so far, on the stages here."""
    executors = smp.state.model.runtime.executors.values()
    return sum(e.offload.bytes_left for e in executors if e.offload is not None)


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.row = nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.row(self.stem(x)))


def in_memory(mark: Callable[[Any], None], build: Any = Row, **parameters: Any) -> dict[str, Any]:
    smp.reset()
    smp.init_in_memory({"microbatches": 4, **parameters})
    return {**trained(mark, build), "left": left_bytes()}


PARAMETERS: list[dict[str, Any]] = [
    {"partitions": 1, "pipeline": "simple"},
    {"partitions": 2},
    {"partitions": 2, "pipeline": "simple"},
    {"partitions": 3, "pipeline": "simple", "active_microbatches": 2},
    {"partitions": 2, "pipeline": "simple", "static_mode": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("parameters", one_in(3, PARAMETERS), ids=str)
def test_equal_to_the_bit(parameters: dict[str, Any]) -> None:
    expected = in_memory(unmarked, **parameters)
    left = []
    for horizon in (1, 2, 100):
        for strategy in ("each", "group_2"):
            found = in_memory(
                marked(strategy),
                offload_activations=True,
                activation_loading_horizon=horizon,
                **parameters,
            )
            assert same(found, expected)
            left.append(found["left"])
    assert left[0] > left[1] > 0  # fewer inputs are kept of groups
    assert left[0] >= left[2] >= left[4] == 0  # what would be back at once stays
    assert left[2] > 0 or parameters.get("pipeline") != "simple"


def on_ranks(horizon: int | None, folder: str | None = None, file_bytes: int | None = None) -> dict[str, Any]:
    """Trains four stages' blocks; ``file_bytes``: no file may be longer on the last rank."""
    if folder is not None:
        os.environ[FOLDER_VARIABLE] = folder
    smp.init()
    if file_bytes is not None and smp.rank() == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    found = trained(unmarked if horizon is None else marked("each"), Row)
    return {**found, "left": left_bytes(), "files": os.listdir(folder) if folder is not None else []}


def parameters(horizon: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"partitions": 2, "microbatches": 4, "pipeline": "simple"}
    if horizon is not None:
        found |= {"offload_activations": True, "activation_loading_horizon": horizon}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("horizon", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_on_real_ranks(horizon: int, tmp_path: Path) -> None:
    expected = run_distributed(
        f"{__name__}:on_ranks", 2, kwargs={"horizon": None}, parameters=parameters(None)
    )
    found = run_distributed(
        f"{__name__}:on_ranks",
        2,
        kwargs={"horizon": horizon, "folder": str(tmp_path)},
        parameters=parameters(horizon),
        fresh=True,
    )
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert all(rank["left"] > 0 for rank in found)
    assert all(rank["files"] == [] for rank in found)  # the store has no name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"folder": "/nowhere/at/all"}, "no file can be made in '/nowhere/at/all'"),
        ({"file_bytes": 10}, "could not be written in"),
    ],
)
def test_a_store_that_fails_is_an_error_on_all_ranks(kwargs: dict[str, Any], says: str) -> None:
    found = run_distributed(
        f"{__name__}:failing", 2, kwargs={"horizon": 1, **kwargs}, parameters=parameters(1), fresh=True
    )
    for text in found:
        assert says in text
        assert FOLDER_VARIABLE in text


def failing(**kwargs: Any) -> str:
    with pytest.raises(smp.SMPError) as caught:
        on_ranks(**kwargs)
    return str(caught.value)


class Held(Row):
    """What a checkpointed block is given is used elsewhere, by a residual, a view, and in another block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.row:
            y = block(x)
            x = torch.tanh(y * torch.sin(x) + x[:, :1].exp() + block(x * 1.0))
        return self.head(x)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("partitions", [1, 2])
def test_what_others_hold_stays(partitions: int) -> None:
    given = {"partitions": partitions, "pipeline": "simple"}
    expected = in_memory(unmarked, Held, **given)
    offloading = {"offload_activations": True, "activation_loading_horizon": 1}
    found = in_memory(
        lambda net: [*map(smp.set_activation_checkpointing, net.row)], Held, **given, **offloading
    )
    assert same(found, expected)
    assert found["left"] > 0


def test_layouts_come_back_as_they_were() -> None:
    """Strides, gaps and half precision."""
    offload = ActivationOffload(1)
    base = torch.arange(240.0).reshape(4, 6, 10)
    for tensor in (
        base[:, ::2, 3:7],
        base.transpose(0, 2),
        base[1].to(torch.bfloat16),
        base[:1, :1].expand(4, 5, 10),
    ):
        expected, strides = tensor.clone(), tensor.stride()
        kept = KeptInput(tensor, offload.store)
        kept.leave()
        assert kept.writing is not None
        kept.writing.wait(60)
        assert kept.has_left()
        assert kept.tensor is None
        found = kept.get()
        assert torch.equal(found, expected)
        assert found.stride() == strides


def test_a_change_in_place_of_what_is_kept_is_an_error() -> None:
    """As without offloading, where autograd sees it."""

    class Changing(Row):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = self.row[0](x)
            x.mul_(2.0)
            return self.head(y + x)

    def mark(net: Any) -> None:
        smp.set_activation_checkpointing(net.row[0])

    for offload in (False, True):
        with pytest.raises((smp.SMPError, RuntimeError), match=r"has changed between|modified by an inplace"):
            in_memory(mark, Changing, partitions=1, pipeline="simple", offload_activations=offload)


def test_a_thread_that_has_ended_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "_work", lambda self: None)
    with pytest.raises(smp.SMPError, match="its thread has ended"):
        in_memory(
            marked("each"), partitions=1, pipeline="simple", offload_activations=True,
            activation_loading_horizon=1,
        )  # fmt: skip


def test_without_a_checkpointed_module_a_line_says_so() -> None:
    with pytest.warns(UserWarning, match="offload_activations: no module is checkpointed"):
        in_memory(unmarked, partitions=1, offload_activations=True)


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "horizon"), [("interleaved", 4), ("zero_bubble", 5)])  # one line each
def test_where_everything_would_be_back_at_once_a_line_says_so(
    recwarn: pytest.WarningsRecorder, pipeline: str, horizon: int
) -> None:
    """Two stages, 1F1B: a backward is three actions at most after its forward; a ``W`` between is none."""
    says = "so nothing leaves memory|nothing leaves memory: what would be back"
    with pytest.warns(
        UserWarning, match=rf"within {horizon} actions .* at most 3 .*: set activation_loading_horizon: 1,"
    ):
        found = in_memory(
            marked("each"),
            partitions=2,
            offload_activations=True,
            activation_loading_horizon=horizon,
            pipeline=pipeline,
        )
    assert found["left"] == 0
    recwarn.clear()
    found = in_memory(
        marked("each"),
        partitions=2,
        offload_activations=True,
        activation_loading_horizon=1,
        pipeline=pipeline,
    )
    assert found["left"] > 0
    assert not [each for each in recwarn if re.search(says, str(each.message))]


def test_each_wait_for_the_store_gives_another_text() -> None:
    """One process that plays all stages takes two equal ones for a deadlock; waits can be equally long."""
    offload = ActivationOffload(1)

    def text() -> str:
        looks = iter([False, True])
        (found,) = offload._until(lambda: next(looks), "read it")
        return found

    texts = [text() for _ in range(100)]
    assert len(set(texts)) == len(texts)


def test_a_plain_loop_keeps_everything_and_says_so() -> None:
    smp.init_in_memory({"partitions": 1, "offload_activations": True})
    net = Row()
    model = smp.DistributedModel(net)
    marked("each")(net)
    with pytest.warns(
        UserWarning, match=r"outside a function decorated with @smp\.step nothing leaves memory"
    ):
        model(torch.ones(2, 6)).sum().backward()
