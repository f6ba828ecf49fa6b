"""Tensors arrive with the strides that they were sent with: kernels round differently for others."""

from __future__ import annotations

import pytest
import torch

from smp_lite.comm.layout import travel_layout
from tests.harness import run_distributed
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.values.strides import MODELS, layouts

CHANGED = {
    "a part of each": (288, 48, 8, 1),  # gaps after which alignments are the same
    "overlapping with gaps": (60, 15, 5, 1),
    "negated": (60, 15, 5, 1),  # by a copy, which the sign bit needs
}


@pytest.mark.parametrize("wire", ["mpi", pytest.param("c10d", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pipeline", ["interleaved", pytest.param("zero_bubble", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_one_process(name: str, pipeline: str, wire: str) -> None:
    parameters = {"partitions": 2, "microbatches": NUM_MICROBATCHES, "pipeline": pipeline, "ddp": True}
    parameters |= {"auto_partition": False, "default_partition": 0}
    run_distributed(
        "tests.transparency.values.strides:train",
        2,
        kwargs={"name": name, "wire": wire},
        parameters=parameters,
    )


def test_gradients_that_begin_at_edges_are_laid_out_too() -> None:
    """Activations that may leave memory have no tensor to begin at."""
    parameters = {"partitions": 2, "microbatches": NUM_MICROBATCHES, "offload_activations": True}
    run_distributed(
        "tests.transparency.values.strides:train",
        2,
        kwargs={"name": "squeezed", "wire": "mpi"},
        parameters={**parameters, "auto_partition": False, "default_partition": 0},
    )


@pytest.mark.parametrize("wire", ["mpi", "c10d"])
def test_every_layout_arrives(wire: str) -> None:
    _, found = run_distributed(
        "tests.transparency.values.strides:send_all",
        2,
        kwargs={"wire": wire},
        parameters={"partitions": 2, "ddp": True},
    )
    for name, tensor in layouts().items():
        arrived, stride = found[name]
        assert torch.equal(arrived, tensor), name
        assert stride == CHANGED.get(name, tensor.stride()), name


@pytest.mark.parametrize(
    ("shape", "stride", "arrives"),
    [
        ((8, 768), (768 * 1024, 1), (768 + 64, 1)),  # first tokens: no memory for the others
        ((8, 10, 16), (16 * 20, 16, 1), (16 * 10 + 64 + 160 % 64, 16, 1)),  # rows still follow each other
        ((4, 6), (6 + 10, 1), (6 + 10, 1)),
        ((4, 6), (12, 2), (12, 2)),
        ((4, 1, 6), (7, 99, 1), (7, 99, 1)),
        ((4, 0), (9, 9), (9, 9)),
        ((3, 100, 6), (0, 10_000, 1), (0, 6 + 64 + 9_994 % 64, 1)),
    ],
)
def test_gaps_are_shortened(
    shape: tuple[int, ...], stride: tuple[int, ...], arrives: tuple[int, ...]
) -> None:
    assert travel_layout(shape, stride).stride == arrives
