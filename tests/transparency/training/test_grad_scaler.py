"""Whether a step is skipped, and the scale after it, are the same on all ranks and in plain torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from tests.harness import run_distributed
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.conftest import OpenSession
from tests.transparency.training import scaling
from tests.transparency.training.norms import MANUAL


def on_ranks(function: str, ranks: int = 2, *, config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    parameters = {"partitions": 2, "microbatches": NUM_MICROBATCHES, **MANUAL, **(config or {})}
    if ranks > 2:
        parameters["ddp"] = True
    return run_distributed(
        f"tests.transparency.training.scaling:{function}", ranks, kwargs=kwargs, parameters=parameters
    )


@pytest.mark.parametrize("variant", scaling.VARIANTS)
def test_in_memory(variant: str, open_session: OpenSession) -> None:
    open_session(2, **MANUAL)
    assert scaling.compare(**scaling.VARIANTS[variant]) == []


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("variant", scaling.VARIANTS)
def test_on_two_ranks(variant: str) -> None:
    assert on_ranks("compare_on_ranks", **scaling.VARIANTS[variant]) == [[], []]


@pytest.mark.ci
def test_in_static_mode() -> None:
    assert on_ranks("compare_on_ranks", config={"static_mode": True}, reload=False) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["torch's scaler", "unscaled and clipped first", "fused"])
def test_with_replicas(variant: str) -> None:
    assert on_ranks("compare_on_ranks", 4, replicas=2, **scaling.VARIANTS[variant]) == [[]] * 4


@pytest.mark.ci
def test_replicas_agree_before_their_gradients_are_averaged() -> None:
    found = on_ranks("between_reductions", 4)
    assert found == [found[0]] * 4
    assert found[0] == [(1024.0, True), (1024.0, True), (512.0, False), (512.0, True)]


def test_without_any_gradient_all_ranks_get_torchs_error() -> None:
    for found in on_ranks("no_gradients"):
        assert found["none"] == "No inf checks were recorded for this optimizer."
        assert "inside a function decorated with @smp.step" in found["inside"]


@pytest.mark.ci
def test_a_rank_that_does_not_call_is_named() -> None:
    error, _ = on_ranks("absent_rank")
    assert "GradScaler" in error
    assert "rank(s) 1 did not call it" in error


def test_an_optimizer_that_takes_the_scaler_itself_is_refused() -> None:
    for found in on_ranks("own_logic"):
        assert "Taking takes the GradScaler itself" in found


def test_other_models_are_torchs_own_affair(open_session: OpenSession) -> None:
    original = torch.amp.GradScaler._unscale_grads_
    open_session(2)
    smp.DistributedModel(nn.Linear(2, 2))
    assert torch.amp.GradScaler._unscale_grads_ is not original
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(other.weight.grad, torch.ones(2, 2))
    smp.reset()
    assert torch.amp.GradScaler._unscale_grads_ is original


def test_a_scaler_that_is_given_both_optimizers_is_refused(open_session: OpenSession) -> None:
    """It would not know that it has divided by the scale already."""
    open_session(1)
    model = smp.DistributedModel(nn.Linear(2, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for first, second in ((optimizer, optimizer.optimizer), (optimizer.optimizer, optimizer)):
        optimizer.zero_grad()
        model.backward(scaler.scale(model(torch.ones(1, 2)).sum()))
        scaler.unscale_(first)
        with pytest.raises(smp.SMPError, match="would be divided by the scale twice"):
            scaler.step(second)
        scaler.step(first)
        scaler.update()


def test_amp_is_loaded_when_first_used() -> None:
    program = (
        "import sys, smp_lite as smp\n"
        "assert 'torch' not in sys.modules and 'amp' in dir(smp)\n"
        "import torch\n"
        "assert issubclass(smp.amp.GradScaler, torch.amp.GradScaler)\n"
        "from smp_lite.amp import GradScaler\n"
        "assert GradScaler is smp.amp.GradScaler"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
