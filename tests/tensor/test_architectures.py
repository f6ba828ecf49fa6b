"""Unmodified models of transformers, tensor-parallel by the plan that comes with them, in a pipeline."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_distributed
from tests.sampling import one_in
from tests.tensor.architecture_cases import batch_of, loss_of
from tests.tensor.plans.architectures import ARCHITECTURES, build

_EAGER_ONLY = {"gemma2"}
"""Transformers refuses to build these with another attention (5.23: none has their soft caps)."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", one_in(2, ARCHITECTURES))
def test_three_steps_equal_the_dense_model(name: str, attention: str) -> None:
    if attention != "eager" and name in _EAGER_ONLY:
        with pytest.raises(ValueError, match="does not support an attention implementation"):
            build(name, attention)
        return
    dense = build(name, attention)
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(dense, batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kwargs = {"name": name, "attention": attention}
    held = set()
    case = "tests.tensor.architecture_cases:train"
    for found in run_distributed(case, 4, kwargs=kwargs, timeout_s=240):  # four imports of transformers
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["num_split"] > 2
        for parameter, value in found["parameters"].items():
            held.add(parameter)
            expected = dict(dense.named_parameters())[parameter]
            assert (value - expected).abs().max() <= 1e-5 * max(1, expected.abs().max().item()), parameter
    assert held == {parameter for parameter, _ in dense.named_parameters()}
