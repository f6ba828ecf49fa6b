"""A bias of attention scores that is trained: its gradient is that of one process."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.smp_api.test_modules import WAYS, check, parameters_of


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize(("prescaled", "optimize"), WAYS)
@pytest.mark.parametrize("model", ["learned bias", "learned bias of heads"])
def test_as_in_one_process(model: str, prescaled: bool, optimize: str) -> None:
    for rank in check(model, 2, parameters_of(2, prescaled, optimize)):
        assert rank["gradients"]["bias"].abs().max() > 0


@pytest.mark.ci
def test_ranks_that_give_none_or_a_constant() -> None:
    """Zeros are what none means, so each replica that learns adds what it does where all learn."""
    ways = [["learned", "learned"], ["learned", "none"], ["constant", "learned"], ["none", "constant"]]
    case = "tests.tensor.smp_api.cases:some_bias"
    both, first, second, neither = (run_distributed(case, 2, kwargs={"ways": each})[0] for each in ways)
    assert both.abs().max() > 0 and not neither.any()
    torch.testing.assert_close(first + second, both)
