"""Parameters of layers made by hand that are exchanged before the first step are an error by name, and what a
script changes in place is what one process has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.smp_api import exchanged_cases as cases
from tests.tensor.smp_api.beginning_cases import SEED, seeded
from tests.tensor.smp_api.test_beginning import dense
from tests.tensor.smp_api.test_modules import parameters_of

CASES = "tests.tensor.smp_api.exchanged_cases"
COMPUTING = ("weight_norm", "an old weight_norm", "spectral_norm", "an old spectral_norm", "prune")
"""What computes with the parameter at once, and is told so where it is a part by then."""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("partitions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_parameter_that_is_exchanged(partitions: int, late: bool) -> None:
    kwargs: dict[str, Any] = {"parameters": parameters_of(2, True, "memory", partitions), "late": late}
    for told in run_distributed(f"{CASES}:exchange", 2 * partitions, kwargs=kwargs):
        assert told.keys() == cases.EXCHANGES.keys()
        for name, text in told.items():
            assert text.startswith("SMPError: "), (name, text)
            if name in ("anew", "of another shape"):
                assert "up.weight is another parameter, of shape" in text and "up.weight.mul_(0.5)" in text
            elif late and "a parameter of a split layer" in text:
                assert name in COMPUTING, (name, text)
            else:
                assert "up.weight is split over ranks, and is not a parameter of its " in text, (name, text)
                assert "let up be one of torch's, which is whole" in text


@pytest.mark.ci
def test_what_is_changed_in_place() -> None:
    kwargs: dict[str, Any] = {"parameters": parameters_of(2, True, "memory")}
    ranks = run_distributed(f"{CASES}:change", 2, kwargs=kwargs)
    for name, change in cases.RIGHT.items():
        net = seeded(SEED)
        change(net)
        losses, state = dense(net)
        for found in (rank[name] for rank in ranks):
            assert found["losses"] == pytest.approx(losses[0], rel=1e-4, abs=1e-5), name
            assert found["state"].keys() == state.keys()
            for key, value in state.items():
                torch.testing.assert_close(
                    found["state"][key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}"
                )
