"""Random numbers: the root's are plain torch's; the blocks' are the same whoever runs them, and
whenever.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from tests.harness import run_distributed
from tests.models import CASES, Case
from tests.models.layers import Chain, regression_batch
from tests.transparency.comparison import NUM_MICROBATCHES, compare, plain_run, smp_run
from tests.transparency.conftest import OpenSession


class DropoutAndLayerDrop(Chain):
    """Draws in its blocks and in its root: neither may disturb the other."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8)
        self.blocks = nn.ModuleList(nn.Sequential(b, nn.Dropout(0.25)) for b in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = x + block(x)
        return self.head(x)


DRAWING = {
    "dropout": CASES["dropout"],
    "both": Case("both", DropoutAndLayerDrop, regression_batch, "draws in blocks and in the root"),
}


def drawn_losses(name: str, num_stages: int) -> list[list[float]]:
    """Losses of three training steps in the open session, by step and microbatch."""
    case = DRAWING[name]
    snapshots = smp_run(case, num_steps=3, stages=case.manual_stages(num_stages))
    return [[loss.item() for loss in snapshot.outputs[0]] for snapshot in snapshots]


def drawn_losses_on_ranks(name: str) -> list[list[float]]:
    smp.init()
    return drawn_losses(name, smp.state.num_stages)


@pytest.fixture(params=DRAWING)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def first_run(name: str, open_session: OpenSession) -> list[list[float]]:
    open_session(2, "zigzag", pipeline="interleaved")
    return drawn_losses(name, 2)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("num_stages", "parameters"),
    [
        (2, {}),
        (2, {"pipeline": "simple"}),
        (2, {"optimize": "speed"}),
        (3, {}),
        (4, {"pipeline": "simple"}),
    ],
)
def test_draws_depend_on_the_seed_alone(
    name: str,
    num_stages: int,
    parameters: dict[str, Any],
    first_run: list[list[float]],
    open_session: OpenSession,
) -> None:
    open_session(num_stages, "zigzag", **parameters)
    assert drawn_losses(name, num_stages) == first_run


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("num_ranks", "pipeline"), [(2, "simple"), (2, "interleaved"), (3, "simple")])
def test_draws_over_mpi(name: str, num_ranks: int, pipeline: str, first_run: list[list[float]]) -> None:
    found = run_distributed(
        "tests.transparency.values.test_random_numbers:drawn_losses_on_ranks",
        num_ranks,
        kwargs={"name": name},
        parameters={
            "partitions": num_ranks,
            "microbatches": NUM_MICROBATCHES,
            "pipeline": pipeline,
            "auto_partition": False,
            "default_partition": 0,
        },
    )
    assert found == [first_run] * num_ranks


def test_dropout_drops(open_session: OpenSession) -> None:
    """Another mask for each microbatch, each module and each step."""
    open_session(2)
    model = smp.DistributedModel(nn.Sequential(*(Masked() for _ in range(3))))

    @smp.step
    def run(model: Any, x: Tensor) -> Tensor:
        return model(x)

    masks = [mask for _ in range(2) for mask in run(model, torch.ones(8, 64)).outputs]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 2 * NUM_MICROBATCHES
    dropped = torch.stack(masks).eq(0).float().mean().item()
    assert 0.8 < dropped < 0.95  # 1 - 0.5 ** 3, if the modules draw independently


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x * self.weight)


@pytest.mark.parametrize(("num_stages", "placement"), [(2, "auto"), (3, "zigzag")])
def test_the_root_draws_what_plain_torch_draws(
    num_stages: int, placement: str, open_session: OpenSession
) -> None:
    open_session(num_stages, placement)
    case = CASES["layer_drop"]
    plain_run.cache_clear()
    assert compare(case, placement, num_steps=5) == []
    ours = torch.rand(4)
    plain_run.cache_clear()
    plain_run(case, 5)
    assert torch.equal(torch.rand(4), ours)
