"""Optimizers that look at all parameters at once are refused; the others train as in one process."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import smp_lite as smp
from smp_lite.optim import optimizer_check
from tests.harness import run_distributed
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.conftest import OpenSession
from tests.transparency.training import norms, optimizers

pytestmark = pytest.mark.sampled(3)


def on_ranks(function: str, ranks: int = 2, *, partitions: int = 2, **kwargs: Any) -> list[Any]:
    config: dict[str, Any] = {"partitions": partitions, "microbatches": NUM_MICROBATCHES, **norms.MANUAL}
    if ranks > partitions:
        config["ddp"] = True
    return run_distributed(
        f"tests.transparency.training.optimizers:{function}", ranks, kwargs=kwargs, parameters=config
    )


def parameters() -> list[nn.Parameter]:
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3, dtype=torch.bfloat16))
    return list(net.parameters())


@pytest.mark.parametrize("name", optimizers.ACROSS)
def test_one_that_looks_across_parameters_is_refused(name: str) -> None:
    optimizer = optimizers.ACROSS[name](parameters())
    with pytest.raises(smp.SMPError, match="looks at all parameters at once") as caught:
        optimizer_check.check_optimizer(optimizer)
    assert str(caught.value).startswith(f"{type(optimizer).__name__} over several partitions")


@pytest.mark.parametrize("name", optimizers.SINGLE)
def test_one_that_treats_each_parameter_by_itself_is_not(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_check.check_optimizer(optimizers.SINGLE[name](parameters()))


@pytest.mark.parametrize("name", optimizers.WITHIN_LARGE)
def test_one_that_looks_at_whole_parameters_where_they_are_large_is_not_given_pieces(name: str) -> None:
    make = optimizers.WITHIN_LARGE[name]
    large = [nn.Parameter(torch.zeros(300, 700)), nn.Parameter(torch.zeros(40_000))]
    with pytest.raises(smp.SMPError, match="it steps them otherwise in halves than whole"):
        optimizer_check.check_pieces(make(large))
    optimizer_check.check_pieces(make([nn.Parameter(torch.zeros(20, 30))]))
    optimizer_check.check_pieces(optimizers.MyAdam(large))


def test_torchs_own_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_check, "_looks_across", None)
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.ASGD):
        optimizer_check.check_optimizer(kind(parameters()))


def test_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_check.check_optimizer(transformers.Adafactor(parameters()))


@pytest.mark.parametrize("name", optimizers.UNKNOWN)
def test_where_it_cannot_be_told_there_is_one_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_check, "_warned", set())
    make, reason = optimizers.UNKNOWN[name]
    with pytest.warns(UserWarning, match=f"whether {name} treats each parameter by itself.*{reason}"):
        optimizer_check.check_optimizer(make(parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_check.check_optimizer(make(parameters()))


@pytest.mark.parametrize("name", ["Noisy", "MyAdam", "Ahead", "Estimating"])
def test_a_trial_leaves_no_trace(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make = {**optimizers.ACROSS, **optimizers.SINGLE, "Noisy": optimizers.Noisy}[name]
    mine, others = parameters(), parameters()
    optimizer = make(mine)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps this optimizer's step
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("its own"))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("everyone's"))
    before = [p.detach().clone() for p in mine]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                optimizer_check.check_optimizer(optimizer)
            except smp.SMPError:
                pass
        assert calls == []
        torch.optim.SGD(others).step()
        assert calls == ["everyone's"]
    finally:
        handle.remove()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    assert all(torch.equal(a, b) for a, b in zip(before, mine, strict=True))
    assert not optimizer.state
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert capsys.readouterr().out == ""


def test_a_large_model_is_not_copied() -> None:
    large = [nn.Parameter(torch.empty(1 << 28, 1 << 6, device="meta")) for _ in range(300)]
    optimizer_check.check_optimizer(optimizers.Kept(large))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_session_decides_whether_it_matters(num_stages: int, open_session: OpenSession) -> None:
    open_session(num_stages)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = smp.DistributedModel(net)
    make = lambda: smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))  # noqa: E731
    if num_stages == 1:
        make()
    else:
        with pytest.raises(smp.SMPError, match=r"LBFGS over several partitions.* or partitions=1"):
            make()
        loose = torch.optim.LBFGS(net.parameters())
        with pytest.raises(smp.SMPError, match="LBFGS over several partitions"):
            loose.step(lambda: torch.zeros(()))
    other = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    other.step(lambda: torch.zeros(()))


def test_refusals_on_ranks() -> None:
    for found in on_ranks("refusals"):
        assert len(found) == len(optimizers.ACROSS) + 1
        assert all("looks at all parameters at once" in error for error in found.values())


@pytest.mark.parametrize(
    ("name", "with_closure"),
    [("MyAdam", True), ("MyAdam", False), ("Extragradient", True), ("Ahead", False)],
)
def test_training(name: str, with_closure: bool, open_session: OpenSession) -> None:
    assert on_ranks("training_on_ranks", name=name, with_closure=with_closure) == [[], []]
    open_session(2, **norms.MANUAL)
    assert optimizers.training(name, with_closure) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MyAdam", "Extragradient"])
def test_a_rank_without_parameters_evaluates_as_often(name: str) -> None:
    assert on_ranks("training_on_ranks", 3, partitions=3, name=name, with_closure=True) == [[]] * 3


@pytest.mark.ci
@pytest.mark.parametrize("name", ["MyAdam", "Extragradient"])
def test_closures_with_replicas(name: str) -> None:
    assert on_ranks("training_on_ranks", 4, name=name, with_closure=True) == [[]] * 4


def test_closures_that_ranks_evaluate_unequally_often_are_refused() -> None:
    for found in on_ranks("unequal_closures"):
        assert "Unequal on rank 0 has finished its step after evaluating the closure 1 times" in found
        assert "rank 1 wants to evaluate it again" in found


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("name", ["Adam", "MyAdam"])
def test_hooks_on_steps_run_where_the_optimizer_has_no_parameters(name: str, with_closure: bool) -> None:
    of_one = ["before", *(["closure"] if with_closure else []), "after"]
    assert on_ranks("hooks_on_steps", name=name, with_closure=with_closure) == [2 * of_one] * 2
