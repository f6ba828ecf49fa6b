"""Ranks with parts of a model begin with one, which is the first rank's, or an error says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_distributed
from tests.tensor.smp_api import beginning_cases as cases
from tests.tensor.smp_api.cases import batches, loss_of
from tests.tensor.smp_api.test_modules import parameters_of

CASES = "tests.tensor.smp_api.beginning_cases"

BEGINS_WITH: dict[str, tuple[int, int | None]] = {
    "rank 0 loads": (cases.LOADED, 0),
    "seeds by rank": (cases.SEED, 0),
    "other numbers drawn": (cases.SEED, 0),
    "nothing is split": (cases.LOADED, 0),
    "all load": (cases.LOADED, None),
    "by hand": (cases.SEED, None),
    "by hand, moved": (cases.SEED, None),
    "by hand, all load parts": (cases.LOADED, None),
    "by hand, all scale": (cases.SEED, None),
    "by hand, all load": (cases.LOADED, None),
    "a plan": (cases.SEED, None),
    "a plan, all load": (cases.LOADED, None),
    "delayed": (cases.SEED, None),
    "delayed, by hand": (cases.SEED, None),
}
"""The seed of the model that one process would train, and the rank that warns of others."""

_CUT = "'up.weight' was split before smp.DistributedModel, and rank 1 has cut its part from other numbers"
_CHANGED = "'up.weight' is split over ranks, and its numbers were changed (loaded, or written in place) since"
_DELAYED = "the parameter 'embed.weight', whose initialization is delayed, would begin with other numbers on"
REFUSED = {
    "by hand, seeds by rank": _CUT,
    "by hand, other numbers drawn": _CUT,
    "by hand, rank 0 loads parts": f"{_CHANGED}, on rank 0 and not on rank 1",
    "by hand, rank 1 scales": f"{_CHANGED}, on rank 1 and not on rank 0",
    "by hand, all draw": "'up.weight' is split over ranks, and was given the same numbers on rank 0",
    "by hand, others load": _CUT,
    "a plan, rank 0 loads": _CUT,
    "a plan, seeds by rank": _CUT,
    "delayed, seeds by rank": _DELAYED,
    "delayed, rank 0 loads": _DELAYED,
    "delayed, all load others": _DELAYED,
    "delayed, by hand, seeds by rank": _CUT,
}


def model_of(name: str) -> nn.Module:
    """What one process would train."""
    seed, _ = BEGINS_WITH[name]
    net = cases.seeded(seed)
    if name in ("rank 0 loads", "nothing is split", "all load", "a plan, all load"):
        net.load_state_dict(cases.trained(seed))
    if name == "by hand, all scale":
        with torch.no_grad():
            net.up.weight.mul_(0.5)
    if name == "by hand, all load":
        state = {key: value for key, value in cases.trained(seed).items() if key.startswith(("up", "down"))}
        net = cases.seeded(cases.SEED)
        net.load_state_dict(state, strict=False)
    return net


def dense(
    net: nn.Module, replicas: int = 1, microbatches: int = 2
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses of each replica, and the weights after them, in one process."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses: list[list[float]] = [[] for _ in range(replicas)]
    for step in range(cases.STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            parts = batches(cases.STEPS, replica)[step].chunk(microbatches)
            found = [loss_of(net(ids), ids) for ids in parts]
            (sum(found) / microbatches / replicas).backward()
            losses[replica].append(sum(loss.item() for loss in found) / microbatches)
        optimizer.step()
    return losses, net.state_dict()


def check(found: list[dict[str, dict[str, Any]]], name: str, *, prescaled: bool = True) -> None:
    ranks = [rank[name] for rank in found]
    losses, state = dense(model_of(name), 1 if prescaled else len(ranks))
    warns = BEGINS_WITH[name][1]
    for number, rank in enumerate(ranks):
        assert "error" not in rank, (name, rank)
        expected = losses[0 if prescaled else number]
        assert rank["losses"] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        for key, value in state.items():
            torch.testing.assert_close(rank["state"][key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
        assert len(rank["told"]) == (number == warns), (name, rank["told"])


@pytest.mark.ci
@pytest.mark.parametrize("prescaled", [True, False])
def test_ranks_begin_with_the_model_of_the_first(prescaled: bool) -> None:
    names = [name for name in BEGINS_WITH if prescaled or "plan" not in name]
    kwargs: dict[str, Any] = {"parameters": parameters_of(2, prescaled, "memory"), "names": names}
    found = run_distributed(f"{CASES}:begin", 2, kwargs=kwargs)
    for name in names:
        check(found, name, prescaled=prescaled)


@pytest.mark.ci
def test_of_what_was_split_before_it_is_an_error() -> None:
    kwargs: dict[str, Any] = {"parameters": parameters_of(2, True, "memory"), "names": list(REFUSED)}
    for rank in run_distributed(f"{CASES}:begin", 2, kwargs=kwargs):
        for name, text in REFUSED.items():
            assert rank[name].get("error", "").startswith(f"SMPMismatch: {text}"), (name, rank[name])


@pytest.mark.slow
def test_over_stages_as_well() -> None:
    names = ["rank 0 loads", "seeds by rank", "by hand", "a plan"]
    refused = ["by hand, seeds by rank", "a plan, rank 0 loads", "delayed, seeds by rank"]
    kwargs: dict[str, Any] = {"parameters": parameters_of(2, True, "memory", 2), "names": names + refused}
    found = run_distributed(f"{CASES}:begin", 4, kwargs=kwargs)
    for name in names:
        check(found, name)
    for rank in found:
        for name in refused:
            assert REFUSED[name] in rank[name].get("error", ""), (name, rank[name])


def test_parts_without_data_are_loaded_and_not_drawn() -> None:
    kwargs = {"parameters": parameters_of(2, True, "memory")}
    losses, state = dense(model_of("all load"))
    for refused, found in run_distributed(f"{CASES}:begin_on_meta", 2, kwargs=kwargs):
        assert "up.weight, up.bias, down.weight of a model that was built on the meta device" in refused
        assert found["losses"] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
        for key, value in state.items():
            torch.testing.assert_close(found["state"][key], value, rtol=1e-5, atol=1e-6)


def test_before_a_plan_of_another_system_splits() -> None:
    configuration = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    losses, state = dense(cases.chain(cases.SEED), microbatches=1)
    for found in run_distributed(f"{CASES}:begin_with_system", 2, kwargs={"configuration": configuration}):
        assert found["losses"] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
        for key, value in state.items():
            torch.testing.assert_close(found["state"][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_one_rank_alone_changes_before_the_first_step_is_refused(partitions: int) -> None:
    kwargs = {"parameters": parameters_of(2, True, "memory", partitions)}
    for everywhere in (False, True):
        for told in run_distributed(
            f"{CASES}:changed_after_wrapping",
            2 * partitions,
            kwargs={**kwargs, "change": "scale", "everywhere": everywhere},
        ):
            assert (
                told == "ran" if everywhere else told.startswith(f"{_CHANGED}, on rank 0 and not on rank 1")
            )


@pytest.mark.parametrize("partitions", [1, 2])
def test_so_is_what_all_draw_as_if_their_parts_were_all(partitions: int) -> None:
    kwargs = {"parameters": parameters_of(2, True, "memory", partitions)}
    for change, said in (("draw", "normal_ of a parameter of a split layer"), ("zero", "ran")):
        for told in run_distributed(
            f"{CASES}:changed_after_wrapping", 2 * partitions, kwargs={**kwargs, "change": change}
        ):
            assert told.startswith(said)
