"""Under autocast split layers give the dtypes of plain torch's, and its numbers but for 16-bit rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.smp_api.test_modules import WAYS

CASES = "tests.tensor.autocast_cases"


def alike(found: dict[str, Any], tolerance: float) -> None:
    assert found
    for name, (split, dense) in found.items():
        for what, expected in dense.items():
            assert split[what].dtype is expected.dtype, (name, what, split[what].dtype, expected.dtype)
            difference = float((split[what].float() - expected.float()).abs().max())
            assert difference <= tolerance * float(expected.float().abs().max()), (name, what, difference)


@pytest.mark.parametrize(("prescaled", "optimize"), WAYS)
def test_layers(prescaled: bool, optimize: str) -> None:
    kwargs = {"prescaled": prescaled, "optimize": optimize}
    for found in run_distributed(f"{CASES}:layers", 2, kwargs=kwargs):
        alike(found, 0.03)


def test_losses() -> None:
    for found in run_distributed(f"{CASES}:losses", 2):
        of_32_bits = {name: pair for name, pair in found.items() if name.endswith(str(torch.float32))}
        alike(of_32_bits, 1e-6)
        for name, (split, dense) in found.items():
            assert split["output"].dtype is dense["output"].dtype is torch.float32, name
            torch.testing.assert_close(split["output"], dense["output"], rtol=1e-6, atol=1e-6)
        alike(found, 0.01)
