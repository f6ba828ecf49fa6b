"""Evaluation with split layers: what reads their weights by itself is refused, or not taken."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.ci
@pytest.mark.parametrize("how", ["training", "step", "plain call"])
def test_an_encoder_that_would_take_padding_out_is_refused_beside_split_layers(how: str) -> None:
    for error, _, _ in _padded(how, nested=True, splits=True):
        assert "torch takes the padding out of what this nn.TransformerEncoder gets" in error
        assert "enable_nested_tensor=False" in error
    for nested, splits in ((False, True), (True, False)):
        for error, found, plain in _padded(how, nested, splits):
            assert error == ""
            torch.testing.assert_close(found, plain)


def _padded(how: str, nested: bool, splits: bool) -> list[Any]:
    return run_distributed(f"{CASES}:padded", 2, kwargs={"how": how, "nested": nested, "splits": splits})
