"""Ranks that do what only one of them knows: an error on all, or what one process would do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed

OWN = "tests.launch.api.alike_cases"


def run(function: str, num_ranks: int, **kwargs: Any) -> list[Any]:
    return run_distributed(f"{OWN}:{function}", num_ranks, kwargs=kwargs, timeout_s=100.0)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("skips", r"called optimizer.step() 1 times"),
        ("fails", "rank 0 has called an optimizer.step() that failed 1 times"),
        (
            "all fail after",
            "rank 1 has called an optimizer.step() that failed when it had changed parameters of",
        ),
        ("all fail before", ""),
        ("scheduler", "setting lr of parameter group 0 at 0.05"),
        ("weight decay", "setting weight_decay of parameter group 0 at 0.1"),
        ("clears", "called optimizer.zero_grad() "),
        ("all", ""),
    ],
)
def test_a_rank_of_a_replica_steps_otherwise(what: str, text: str) -> None:
    for error in run("at_a_rate", 2, what=what):
        assert text in error
        assert error.startswith("SMPMismatch: what a script does between steps differs") == bool(text)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("skips", "rank 0 has called optimizer.step() 2 times, rank 1 has called optimizer.step() 1 times"),
        ("fails", "rank 1 has called an optimizer.step() that failed 1 times"),
        ("all fail after", ""),  # each has the whole model, as one process has
        ("rate", "setting lr of parameter group 0 at 0.01"),
        ("mode", "rank 0 has the model in training mode, rank 1 has the model in evaluation mode"),
        ("weights", "the parameter '2.bias' is not the same"),
        ("nothing", ""),
    ],
)
def test_a_replica_steps_otherwise(what: str, text: str) -> None:
    found = run("replicas", 2, what=what)
    for error in found:
        assert error.startswith("SMPMismatch: replicas have drifted apart") == bool(text)
    if what != "weights":
        assert all(text in error for error in found)
    else:
        assert all("is not the same on ranks 0 and 1" in error for error in found)


@pytest.mark.parametrize(
    ("what", "ranks", "text"),
    [
        ("stages", 2, "rank 1 has optimizer 1's setting lr of parameter group 0 at 0.01"),
        ("replicas", 2, "rank 1 has optimizer 1's setting lr of parameter group 0 at 0.01"),
        ("own", 4, "rank 3 has the optimizer's setting lr of parameter group 0 at 0.01"),
    ],
)
def test_an_optimizer_of_a_part_has_another_rate(what: str, ranks: int, text: str) -> None:
    assert any(text in error for error in run("parts_at_a_rate", ranks, what=what))


def test_ranks_begin_with_the_weights_of_the_first() -> None:
    (first, heard), (second, _) = run("pretrained", 2)
    assert first and second
    assert any("those of rank 0 are taken" in text for text in heard)


@pytest.mark.parametrize(("partitions", "num_ranks"), [(1, 2), (2, 4)])
def test_a_sum_over_replicas_that_is_not_waited_for(partitions: int, num_ranks: int) -> None:
    for pairs in run("async_sum", num_ranks, partitions=partitions):
        assert len(pairs) == 4
        assert all(found == pytest.approx(wanted, abs=1e-6) for found, wanted in pairs)


def test_a_collective_that_others_would_have_to_join() -> None:
    for of_world, sent in run("world_sum", 2):
        assert "all_reduce() over the ranks [0, 1] inside an smp.step, on a value of stage 1" in of_world
        assert "send() inside an smp.step" in sent


@pytest.mark.parametrize(("partitions", "ddp"), [(2, False), (1, True)])
@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_rank_fails_before_its_model_call(partitions: int, ddp: bool, fails_in: int) -> None:
    for steps in run("first_step_fails", 2, partitions=partitions, ddp=ddp, fails_in=fails_in):
        assert [bool(text) for text, _ in steps] == [number == fails_in for number in range(3)]
        text, is_memory = steps[fails_in]
        assert "transient" in text
        assert is_memory


def test_what_nobody_waits_for_keeps_its_memory() -> None:
    assert run("memory_of_failures", 2) == [True, True]


def test_what_else_is_refused_or_works() -> None:
    for found in run("odd_uses", 2):
        assert "model.state_dict()" in found["pickle"]
        assert found["copy"] == "Sequential"
        assert found["empty"] == "2"
        assert "compile modules that lie on one stage" in found["compiled"]
