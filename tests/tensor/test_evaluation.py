"""Evaluation with split layers: what reads their weights by itself is refused, or not taken."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_distributed

CASES = "tests.tensor.evaluation_cases"


@pytest.mark.parametrize("trains_first", [False, True])
def test_torchs_own_kernels_are_not_given_parts(trains_first: bool) -> None:
    for found, plain in run_distributed(f"{CASES}:encoder", 2, kwargs={"trains_first": trains_first}):
        for ours in found:
            torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("how", ["step", "plain call", "inference mode"])
def test_a_forward_that_reads_a_part_is_refused(how: str) -> None:
    for error in run_distributed(f"{CASES}:reading", 2, kwargs={"how": how}):
        assert "shape of the parameter 'up.weight'" in error
        assert "the part that this one has would pass for the whole" in error
