"""Layers on grids of ranks, on real ranks: each against its dense form on the whole batch, gradients too.

In one file, so that its tests share the processes of each number of ranks.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tests.harness import run_distributed

pytestmark = pytest.mark.sampled(3)

CASES_2D = "tests.tensor.grid.cases_2d"
CASES_3D = "tests.tensor.grid.cases_3d"
DTENSOR = "tests.tensor.grid.cases_dtensor"

MESHES_2D = [
    pytest.param(4, 0, id="2x2"),
    pytest.param(8, 2, id="2x2x2"),
    pytest.param(2, 2, id="depth2-1x1"),
    pytest.param(4, 1, id="depth1-2x2", marks=pytest.mark.thorough),
    pytest.param(1, 0, id="1x1", marks=pytest.mark.thorough),
]
DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "depth"), MESHES_2D)
@pytest.mark.parametrize("layer", ["linear", "norms", "embeddings", "attention"])
def test_2d_layer_equals_the_dense_one(layer: str, ranks: int, depth: int, dtype: torch.dtype) -> None:
    run_distributed(f"{CASES_2D}:{layer}", ranks, kwargs={"depth": depth, "dtype": dtype})


@pytest.mark.parametrize("classes", [9, pytest.param(12, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "depth"), MESHES_2D)
def test_2d_loss(ranks: int, depth: int, dtype: torch.dtype, classes: int) -> None:
    run_distributed(f"{CASES_2D}:loss", ranks, kwargs={"depth": depth, "dtype": dtype, "classes": classes})


WIDE_2D = [pytest.param(9, 0, id="3x3", marks=pytest.mark.thorough)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "recompute", ["nothing", "blocks", pytest.param("reentrant", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("ranks", "depth"), MESHES_2D + WIDE_2D)
def test_2d_transformer(ranks: int, depth: int, dtype: torch.dtype, recompute: str) -> None:
    kwargs = {"depth": depth, "dtype": dtype, "recompute": recompute}
    run_distributed(f"{CASES_2D}:transformer", ranks, kwargs=kwargs)


@pytest.mark.parametrize(("ranks", "depth"), [(4, 0), pytest.param(8, 2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "case",
    [
        "torch_attention",
        "low_precision",
        "linear_starts_as_the_dense_one",
        "padding_never_matters",
        "parts_of_parameters",
    ],
)
def test_2d_on_one_mesh(case: str, ranks: int, depth: int) -> None:
    run_distributed(f"{CASES_2D}:{case}", ranks, kwargs={"depth": depth})


@pytest.mark.parametrize(("ranks", "depth"), [(4, 0), (8, 2), (2, 2), *WIDE_2D])
@pytest.mark.parametrize(("m", "k", "n"), [(24, 6, 12), (12, 18, 6)])
def test_2d_what_is_received_is_what_the_papers_say(ranks: int, depth: int, m: int, k: int, n: int) -> None:
    """Xu et al. 2021, table 1, and Wang et al. 2021: (q - 1) / q^2 of two of the three matrices each time."""
    layers = max(depth, 1)
    q = round((ranks / layers) ** 0.5)
    share = Fraction(q - 1, q * q)
    x, w = Fraction(m * k, layers), Fraction(k * n)
    expected = {
        "forward": share * (x + w),
        "input": share * (w + x),  # W is broadcast, dX summed
        "weight": share * (x + w),  # X is broadcast, dW summed
        "depth": Fraction(2 * (layers - 1), layers) * w / q**2,
    }
    for received in run_distributed(
        f"{CASES_2D}:volumes", ranks, kwargs={"depth": depth, "m": m, "k": k, "n": n}
    ):
        assert received == expected


@pytest.mark.parametrize(("ranks", "depth"), [(4, 0), (8, 2)])
def test_2d_where_ranks_stand(ranks: int, depth: int) -> None:
    found = run_distributed(f"{CASES_2D}:coordinates", ranks, kwargs={"depth": depth})
    for rank, where in enumerate(found):
        col, row, layer = rank % 2, rank // 2 % 2, rank // 4
        first = 4 * layer
        axes = ((first + col, first + 2 + col), (first + 2 * row, first + 2 * row + 1))
        if depth:
            assert where == (layer, row, col, (rank % 4, rank % 4 + 4), *axes)
        else:
            assert where == (row, col, *axes)


RANKS_3D = [8, pytest.param(1, marks=pytest.mark.thorough)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS_3D)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", ["linear", "norms", "embeddings", "attention", "pairs"])
def test_3d_layer_equals_the_dense_one(layer: str, dtype: torch.dtype, ranks: int) -> None:
    run_distributed(f"{CASES_3D}:{layer}", ranks, kwargs={"dtype": dtype})


@pytest.mark.ci
@pytest.mark.parametrize("ranks", RANKS_3D)
@pytest.mark.parametrize("classes", [9, 5, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_3d_loss(dtype: torch.dtype, classes: int, ranks: int) -> None:
    run_distributed(f"{CASES_3D}:loss", ranks, kwargs={"dtype": dtype, "classes": classes})


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("ranks", RANKS_3D)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "recompute", ["nothing", "blocks", pytest.param("reentrant", marks=pytest.mark.thorough)]
)
def test_3d_transformer(dtype: torch.dtype, recompute: str, ranks: int) -> None:
    run_distributed(f"{CASES_3D}:transformer", ranks, kwargs={"dtype": dtype, "recompute": recompute})


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(8, 4, 6), (4, 8, 2)])
def test_3d_what_is_received_is_what_the_paper_says(m: int, k: int, n: int, regather: bool) -> None:
    """Bian et al. 2021: (d - 1) / d^3 of all three matrices, forward and backward."""
    d = 2
    share = Fraction(d - 1, d**3)
    x, w, y = m * k, k * n, m * n
    kwargs = {"m": m, "k": k, "n": n, "regather": regather}
    again_x, again_w = (x, w) if regather else (0, 0)
    for found in run_distributed(f"{CASES_3D}:volumes", d**3, kwargs=kwargs):
        assert found["forward"] == share * (x + w + y)
        assert found["both"] == share * (x + w + y + again_x + again_w)
        assert found["input"] == share * (y + x + again_w)
        assert found["weight"] == share * (y + w + again_x)


def test_3d_where_ranks_stand() -> None:
    found = run_distributed(f"{CASES_3D}:coordinates", 8)
    assert [rank for rank, *_ in found] == list(range(8))
    assert all(rank == i + 2 * (j + 2 * k) for rank, i, j, k in found)


def test_3d_where_parts_lie() -> None:
    run_distributed(f"{CASES_3D}:parts", 8)


@pytest.mark.parametrize(("ranks", "depth"), [(4, 0), (2, 2), pytest.param(8, 2, marks=pytest.mark.thorough)])
def test_2d_products_and_layouts_are_those_of_dtensor(ranks: int, depth: int) -> None:
    run_distributed(f"{DTENSOR}:two_d", ranks, kwargs={"depth": depth})


@pytest.mark.thorough
def test_3d_products_and_layouts_are_those_of_dtensor() -> None:
    run_distributed(f"{DTENSOR}:three_d", 8)
