"""A step that fails is the same error on all ranks, leaves nothing behind, and the next one works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from tests.harness import run_distributed
from tests.models.layers import WIDTH
from tests.transparency.conftest import OpenSession
from tests.transparency.failing.failing import (
    FAILING_STEPS,
    FailingReuse,
    counted_without_the_failure,
    losses_of_draws,
    plain_states,
    train,
)


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
        "tests.transparency.failing.failing:train_on_rank",
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


def test_what_one_rank_alone_is_refused_when_all_is_recorded() -> None:
    """The others do not wait for it until their limit."""
    found = run_distributed(
        "tests.transparency.failing.failing:train_on_rank",
        2,
        kwargs={"where": "exchanging", "failing_rank": 1},
        parameters={"partitions": 2, "microbatches": 4},
    )
    assert [equal for equal, _ in found] == [True, True]
    assert all("parameters of head were exchanged" in text for _, texts in found for text in texts)
    assert all(text.startswith("SMPError: rank 1 failed while it recorded") for text in found[0][1])


def test_random_numbers_go_on_from_the_rank_that_failed() -> None:
    """The others have drawn for other microbatches by then; one process would go on from where it failed."""
    found = run_distributed(
        "tests.transparency.failing.failing:draw_on_after_a_failure",
        2,
        parameters={"partitions": 2, "microbatches": 4},
    )
    assert found[0] == found[1] == losses_of_draws()


def test_a_step_fails_that_has_opened_a_module() -> None:
    """Until then only the owner knew its buffers; from then on all ranks change them."""
    found = run_distributed(
        "tests.transparency.failing.failing:fail_in_the_step_that_opens_a_block",
        2,
        parameters={"partitions": 2, "microbatches": 4},
    )
    assert found == [counted_without_the_failure()] * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_over_gloo(where: str) -> None:
    found = run_distributed(
        "tests.transparency.failing.failing:train_on_rank",
        2,
        kwargs={"where": where, "failing_rank": 1, "wire": "c10d"},
        parameters={"partitions": 2, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True, True]


@pytest.mark.ci
@pytest.mark.parametrize("where", ["forward", "backward", "recording"])
def test_another_replica_hears_of_it(where: str) -> None:
    """Two replicas of two stages see the same batches; one rank of one replica fails."""
    found = run_distributed(
        "tests.transparency.failing.failing:train_on_one_replica",
        4,
        kwargs={"where": where},
        parameters={"partitions": 2, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True] * 4
    assert [len(texts) for _, texts in found] == [len(FAILING_STEPS)] * 4
    failing, healthy = found[0][1], found[3][1]
    if where == "forward":  # dropped with those of the others, though no backward had begun here
        assert all("gradients are None" in text for text in failing)
    assert all("another replica failed" in text for text in healthy)


@pytest.mark.parametrize("where", ["forward", "recording"])
def test_buffers_of_other_replicas_are_as_before_the_step_too(where: str) -> None:
    """All begin the next step with those of the first replica, which has not failed itself."""
    found = run_distributed(
        "tests.transparency.failing.failing:train_on_one_replica",
        2,
        kwargs={"where": where, "replica": 1},
        parameters={"partitions": 1, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True] * 2
    assert all("another replica failed" in text for text in found[0][1])


def test_replicas_begin_accumulation_anew_together() -> None:
    """All hear of a failure in the pass that fails, not only in that whose gradients are averaged."""
    found = run_distributed(
        "tests.transparency.failing.failing:accumulate_after_failures",
        2,
        parameters={"partitions": 1, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True] * 2
    assert [len(texts) for _, texts in found] == [2, 2]


def test_a_step_without_a_backward_fails_on_one_replica() -> None:
    """The others hear nothing of it: they do not average anything in such a step."""
    found = run_distributed(
        "tests.transparency.failing.failing:evaluate_and_fail_on_one_replica",
        2,
        parameters={"partitions": 1, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True] * 2
    assert [len(texts) for _, texts in found] == [0, 2]


@pytest.mark.ci
def test_a_replica_fails_in_the_last_backward() -> None:
    """When parameters are listened to, since their gradients are about to be whole."""
    found = run_distributed(
        "tests.transparency.failing.failing:train_on_one_replica",
        4,
        kwargs={"where": "backward", "fail_at": 7},
        parameters={"partitions": 2, "microbatches": 4, "ddp": True},
    )
    assert [equal for equal, _ in found] == [True] * 4
    assert [len(texts) for _, texts in found] == [len(FAILING_STEPS)] * 4


class Choosy(nn.Module):
    """Refuses what is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if (x < 0).all():
            raise FloatingPointError("all is negative")
        return self.layer(x)


@pytest.mark.parametrize("is_evaluation", [True, False])
def test_gradients_stay_where_no_backward_has_begun(is_evaluation: bool, open_session: OpenSession) -> None:
    """As one process keeps what earlier steps have accumulated; the error says which of the two it is."""
    open_session(2, microbatches=2, auto_partition=False, default_partition=0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Choosy())
    smp.set_partition(net[1], 1)
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(WIDTH))
        net[0].bias.zero_()
    model = smp.DistributedModel(net)

    @smp.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    train(model, torch.ones(4, WIDTH))
    kept = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    with pytest.raises(FloatingPointError, match=r"gradients are .* and buffers are as before it") as caught:
        (evaluate if is_evaluation else train)(
            model, torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).expand(4, WIDTH)
        )
    stays = is_evaluation
    assert ("gradients are as before it" in str(caught.value)) == stays
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.grad, kept[name]) if stays else parameter.grad is None, name


@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize("root_first", [True, False])
def test_a_buffer_that_its_block_changes_and_others_too(root_first: bool, fail_at: int) -> None:
    found = run_distributed(
        "tests.transparency.failing.failing:counts_after_a_failure",
        2,
        kwargs={"root_first": root_first, "fail_at": fail_at},
        parameters={"partitions": 2, "microbatches": 2},
    )
    done = [sum(number != fail_at for number in range(end + 1)) for end in range(3)]
    assert found == [[[22.0 * count, 2.0 * count] for count in done]] * 2


def test_a_rank_fails_before_it_has_met_a_block_that_changes_buffers() -> None:
    found = run_distributed(
        "tests.transparency.failing.failing:meet_blocks_after_a_failure",
        2,
        parameters={"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0},
    )
    for first, *others in found:
        assert "the user's own" in first
        assert others == ["", ""]
