"""A step that fails is the same error on all ranks, leaves nothing behind, and the next one works."""

from __future__ import annotations

import pytest
import torch

import smp_lite as smp
from tests.harness import run_distributed
from tests.transparency.conftest import OpenSession
from tests.transparency.failing import FAILING_STEPS, FailingReuse, plain_states, train


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("where", ["forward", "backward", "everywhere"])
def test_in_memory(where: str, pipeline: str, open_session: OpenSession) -> None:
    open_session(2, pipeline=pipeline)
    state, texts = train(where, 0)
    plain = plain_states(FAILING_STEPS)
    assert [key for key, value in state.items() if not torch.equal(value, plain[key])] == []
    assert len(texts) == len(FAILING_STEPS)


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_sums_of_a_reused_block(fail_at: int, open_session: OpenSession) -> None:
    """Nothing that was put aside for its sum is there in the next step."""
    open_session(2, auto_partition=False, default_partition=0)
    state, texts = train("backward", 0, build_reuse, fail_at)
    plain = plain_states(FAILING_STEPS, FailingReuse)
    assert [key for key, value in state.items() if not torch.equal(value, plain[key])] == []
    assert len(texts) == len(FAILING_STEPS)


def build_reuse() -> FailingReuse:
    model = FailingReuse()
    for block in model.blocks[1:]:
        smp.set_partition(block, 1)
    return model


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward", "recording", "everywhere"])
def test_on_ranks(where: str, failing_rank: int) -> None:
    found = run_distributed(
        "tests.transparency.failing:train_on_rank",
        2,
        kwargs={"where": where, "failing_rank": failing_rank},
        parameters={"partitions": 2, "microbatches": 4},
    )
    assert [equal for equal, _ in found] == [True, True]
    texts = [texts for _, texts in found]
    if where in ("forward", "backward"):
        assert texts[0] == texts[1]
        letter = where[0].upper()
        for text in texts[0]:
            assert f"the step failed on rank {failing_rank} (stage {failing_rank}) in action" in text
            assert f"{failing_rank}{letter}" in text and "OutOfMemoryError: out of memory, as if" in text
            assert "failing.py" in text
            assert "what it held:\n  parameters  " in text
    elif where == "recording":
        assert all("the user's own" in text for text in texts[failing_rank])
        assert all(
            f"rank {failing_rank} failed while it recorded a step" in text and "the user's own" in text
            for text in texts[1 - failing_rank]
        )
    assert [len(own) for own in texts] == [len(FAILING_STEPS)] * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_over_gloo(where: str) -> None:
    found = run_distributed(
        "tests.transparency.failing:train_on_rank",
        2,
        kwargs={"where": where, "failing_rank": 1, "wire": "c10d"},
        parameters={"partitions": 2, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True, True]


@pytest.mark.parametrize("where", ["forward", "backward", "recording"])
def test_another_replica_hears_of_it(where: str) -> None:
    """Two replicas of two stages see the same batches; one rank of one replica fails."""
    found = run_distributed(
        "tests.transparency.failing:train_on_one_replica",
        4,
        kwargs={"where": where},
        parameters={"partitions": 2, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True] * 4
    assert [len(texts) for _, texts in found] == [len(FAILING_STEPS)] * 4
    healthy = found[3][1]
    assert all("another replica failed" in text for text in healthy)


def test_a_replica_fails_in_the_last_backward() -> None:
    """When parameters are listened to, since their gradients are about to be whole."""
    found = run_distributed(
        "tests.transparency.failing:train_on_one_replica",
        4,
        kwargs={"where": "backward", "fail_at": 7},
        parameters={"partitions": 2, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True] * 4
    assert [len(texts) for _, texts in found] == [len(FAILING_STEPS)] * 4
