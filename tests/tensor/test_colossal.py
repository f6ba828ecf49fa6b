"""Colossal-AI's tensor modes with pipelines and replicas: training equals that of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.colossal_cases import train_dense

pytestmark = pytest.mark.sampled(3)

CASES = "tests.tensor.colossal_cases"


def config(size: int, mode: str, pipeline: int = 1, **more: Any) -> dict[str, Any]:
    tensor = {"size": size, "mode": mode, **more}
    return {"parallel": {"pipeline": pipeline, "tensor": tensor}, "num_microbatches": 2}


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1d, pipeline, data": (8, config(2, "1d", 2)),
    "2d, pipeline": (8, config(4, "2d", 2)),
    "2d, data": (8, config(4, "2d")),
    "2.5d, pipeline, data": (8, config(2, "2.5d", 2, depth=2)),
    "2.5d of 2x2x2": (8, config(8, "2.5d", depth=2)),
    "3d": (8, config(8, "3d")),
    "sequence, pipeline, data": (8, config(2, "sequence", 2)),
    "sequence of 4, pipeline": (8, config(4, "sequence", 2)),
    "2d, pipeline, data": (16, config(4, "2d", 2)),
    "2.5d of 2x2x2, pipeline": (16, config(8, "2.5d", 2, depth=2)),
    "3d, pipeline": (16, config(8, "3d", 2)),
}
_SAMPLED = {name for name, (ranks, _) in MESHES.items() if ranks == 8} - {
    "2d, data",
    "sequence of 4, pipeline",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=[] if name in _SAMPLED and dtype is torch.float64 else pytest.mark.thorough,
            id=f"{name}, {str(dtype).removeprefix('torch.')}",
        )
        for name in MESHES
        for dtype in (torch.float64, torch.float32)
    ],
)
def test_training_equals_that_of_one_process(name: str, dtype: torch.dtype) -> None:
    world_size, given = MESHES[name]
    kwargs = {"config": given, "dtype": dtype}
    found = run_distributed(f"{CASES}:train", world_size, kwargs=kwargs, timeout_s=100)
    expected = train_dense(len({rank["replica"] for rank in found}), dtype)
    limit = 1e-10 if dtype is torch.float64 else 1e-5
    held = set()
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"][rank["replica"]], rel=limit)
        assert rank["split"] > 5
        for parameter, value in rank["parameters"].items():
            held.add(parameter)
            assert value.dtype == dtype
            assert (value - expected["parameters"][parameter]).abs().max() < limit, parameter
    assert held == set(expected["parameters"])
    assert expected["losses"][0][-1] < expected["losses"][0][0]  # it trains


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (
            "plain",
            config(4, "2d"),
            r"parallel\.tensor\.mode: no layer of Sequential is split.*nn\.two_d",
        ),
        ("plain", config(4, "sequence"), r"parallel\.tensor\.mode: no layer.*smp_lite\.nn\.sequence"),
        (
            "dropout",
            config(4, "2d"),
            r"net\.blocks\.0\.drop is torch's Dropout, and in mode '2d'.*PartDropout",
        ),
        (
            "random activation",
            config(4, "sequence"),
            r"net\.blocks\.0\.drop is torch's RReLU, and in mode 'sequence'.*use another activation",
        ),
        (
            "other axes",
            config(4, "2d"),
            r"lies over an axis '(row|col)', and the axes of this job are dp, pp, ",
        ),
        ("other wholes", config(4, "2d"), r"what a step reads beside its batch differs"),
        ("changed parts", config(4, "2d"), r"what a step reads beside its batch differs"),
        *(
            ("loss of parts", config(4, mode), r"a loss that model\.backward\(\) was given is \d")
            for mode in ("1d", "2d", "sequence")
        ),
    ],
)
def test_what_would_give_other_results_is_an_error(kind: str, given: dict[str, Any], text: str) -> None:
    for told in run_distributed(f"{CASES}:told", 4, kwargs={"config": given, "kind": kind}):
        assert re.search(text, told), told


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (4, config(4, "2d")),
        (8, config(8, "2.5d", depth=2)),
        (8, config(8, "3d")),
        (4, config(4, "sequence")),
    ],
)
def test_parts_drop_what_one_process_drops(ranks: int, given: dict[str, Any]) -> None:
    assert all(run_distributed(f"{CASES}:dropout", ranks, kwargs={"config": given}))
