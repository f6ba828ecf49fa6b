"""A step whose plan is known runs while it is recorded, and nothing is taken for granted of what comes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import smp_lite as smp
from smp_lite.steps import step_context
from tests.harness import run_distributed
from tests.models import CASES
from tests.sampling import one_in
from tests.transparency.comparison import compare, too_large
from tests.transparency.conftest import OpenSession
from tests.transparency.schedules.ahead import (
    BY_HAND,
    CHECKED,
    EarlierValue,
    OneMask,
    OnOneRank,
    differ,
    noted_ends,
    order_of_events,
    train,
    with_and_without,
)
from tests.transparency.schedules.ahead_scripts import change_after_a_cut
from tests.transparency.schedules.differing import MICROBATCHES, STEPS

ON_RANKS = {"partitions": 2, "microbatches": MICROBATCHES}
NAMES = [name for name, case in CASES.items() if case.available and not case.random_in_blocks]
SINCE = {"third": 2, "last": 3, "second": 1, "all": 0}


def test_the_first_microbatch_runs_before_the_last_is_recorded(open_session: OpenSession) -> None:
    open_session(2, **BY_HAND, pipeline="interleaved")
    events = order_of_events()
    assert events[:2] == ["R0", "0F0"]
    assert events.index("R1") < events.index("1F0") < events.index("R2")
    assert events.index("R3") == events.index("R2") + 1  # two in a row, by then
    assert sorted(events) == sorted(f"{what}{m}" for what in ("R", "0F", "1F") for m in range(MICROBATCHES))


@pytest.mark.ci
def test_on_ranks_each_records_where_it_would_wait() -> None:
    first, second = run_distributed(
        "tests.transparency.schedules.ahead:order_on_rank", 2, parameters={**ON_RANKS, **BY_HAND}
    )
    assert first[:2] == ["R0", "0F0"]
    assert second.index("1F3") > second.index("R3")
    for events, stage in ((first, 0), (second, 1)):
        assert [e for e in events if e[0] == "R"] == [f"R{m}" for m in range(MICROBATCHES)]
        assert [e for e in events if e[0] != "R"] == [f"{stage}F{m}" for m in range(MICROBATCHES)]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", one_in(3, NAMES))
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_models(name: str, pipeline: str, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_context, "FIRST_CHECKED_STEPS", 0)
    open_session(2, "auto", pipeline=pipeline)
    case = CASES[name]
    with noted_ends() as ends:
        assert too_large(case, compare(case, "auto", num_steps=4)) == []
    if name.startswith("gpt"):
        assert ends == [None, None, None]


@pytest.mark.slow(keep=len(STEPS))
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("first", SINCE)
def test_what_differs_is_planned_anew(name: str, first: str, open_session: OpenSession) -> None:
    open_session(2, **BY_HAND, pipeline="interleaved")
    ends = differ(name, SINCE[first])
    assert ends[:2] == [None, None] or ends == [], "where steps are all alike, they run ahead"


def test_where_the_cuts_are(open_session: OpenSession) -> None:
    open_session(2, **BY_HAND, pipeline="zero_bubble")
    assert differ("keyword", 2) == [None, None, 2, None, 2]
    open_session(2, **BY_HAND)
    assert differ("looked_at", 1) == [None, None, 1, None, 1]
    open_session(2, **BY_HAND)
    assert differ("keyword", 0) == [None] * 6, "another first microbatch is another step, known in time"


@pytest.mark.parametrize(("name", "first"), [("keyword", 2), ("looked_at", 1), ("order_of_arguments", 3)])
def test_cuts_on_ranks(name: str, first: int) -> None:
    found = run_distributed(
        "tests.transparency.schedules.ahead:differ_on_rank",
        2,
        kwargs={"name": name, "first": first},
        parameters={**ON_RANKS, **BY_HAND, "pipeline": "zero_bubble"},
    )
    assert found[0] == found[1]
    assert first in found[0]


@pytest.mark.host
@pytest.mark.parametrize("how", ["copy_", "data"])
@pytest.mark.parametrize("since", [0, CHECKED + 1])
def test_memory_that_is_written_anew(since: int, how: str, open_session: OpenSession) -> None:
    open_session(2)
    with noted_ends() as ends:
        assert train(OneMask(since, how), CHECKED + 4) == [[], True]
    assert ends == ([] if since == 0 else [None, 1]), "what has run may still read it in its backward"


@pytest.mark.host
@pytest.mark.parametrize("since", [0, CHECKED + 1])
def test_memory_that_is_exchanged_unheard(since: int, open_session: OpenSession) -> None:
    open_session(2)
    texts, is_equal = train(OneMask(since, "set_"), CHECKED + 3)
    assert is_equal
    assert len(texts) == CHECKED + 3 - since
    assert all("was given other memory (set_) after a call had read it" in text for text in texts)


def test_a_value_of_an_earlier_microbatch(open_session: OpenSession) -> None:
    open_session(2)
    with noted_ends() as ends:
        assert train(EarlierValue(CHECKED + 1), CHECKED + 3) == [[], True]
    assert ends[:2] == [None, 2]


@pytest.mark.parametrize("kind", ["draws", "reuses"])
def test_the_same_without(kind: str) -> None:
    """Random numbers of the function and of modules; sums over visits, in steps that were cut too."""
    (ours, theirs), ends = with_and_without(kind)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ends == ([None] * 4 if kind == "draws" else [None, 2, None])


@pytest.mark.ci
def test_replicas_of_which_one_differs() -> None:
    found = run_distributed("tests.transparency.schedules.ahead:replicas_on_rank", 4)
    assert all(is_equal for is_equal, _ in found)
    assert (
        sorted(map(str, (ends for _, ends in found)))
        == ["[None, 2, None]"] * 2 + ["[None, None, None, None]"] * 2
    )


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_step_function_that_fails(first: int, open_session: OpenSession) -> None:
    open_session(2)
    function = OnOneRank("raises", -1, first, CHECKED + 1)
    texts, is_equal = train(function, CHECKED + 4, ValueError)
    assert texts == ["ValueError: the user's own"]
    assert is_equal


def test_that_gradients_are_gone_is_said(open_session: OpenSession) -> None:
    open_session(2)
    said: list[list[str]] = []

    class Noting(ValueError):
        def add_note(self, note: str) -> None:
            said.append([note])

    def function(model: object, number: int, x: Tensor, target: Tensor) -> Tensor:
        if number == (CHECKED + 1) * MICROBATCHES + 2:
            raise Noting
        return model(x)  # type: ignore[operator]

    assert train(function, CHECKED + 3, Noting)[1]
    assert ["gradients are None, those of earlier steps too" in note for (note,) in said] == [True]


def test_what_calls_read_is_looked_at_after_a_cut(open_session: OpenSession) -> None:
    open_session(2, **BY_HAND)
    with noted_ends() as ends, pytest.raises(smp.SMPError, match="after a call was recorded that reads it"):
        change_after_a_cut()
    assert ends == [None, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_collects_earlier(rank: int) -> None:
    found = run_distributed(
        "tests.transparency.schedules.ahead_scripts:train_with_cycles",
        2,
        kwargs={"rank": rank},
        parameters=ON_RANKS,
    )
    for texts, is_equal, ends in found:
        assert texts == [] and is_equal
        assert ends == [None] * 3


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("rank", [0, 1, -1])
@pytest.mark.parametrize("wire", ["mpi", "c10d"])
def test_a_step_function_that_fails_on_ranks(rank: int, wire: str) -> None:
    found = run_distributed(
        "tests.transparency.schedules.ahead:train_on_rank",
        2,
        kwargs={"what": "raises", "rank": rank, "first": 2, "wire": wire},
        parameters={**ON_RANKS, "ddp": wire == "c10d"},
    )
    for own, (texts, is_equal, ends) in enumerate(found):
        assert is_equal
        assert len(texts) == 1 and "the user's own" in texts[0]
        if rank in (own, -1):
            assert texts[0].startswith("ValueError")
            assert 0 in ends, "transfers were made before the others were told"
        else:
            assert f"rank {rank} failed while it recorded a step" in texts[0]


def test_a_step_function_that_fails_while_a_stage_waits() -> None:
    found = run_distributed(
        "tests.transparency.schedules.ahead:give_up_while_waiting", 2, parameters={**ON_RANKS, **BY_HAND}
    )
    assert found == [["the user's own"]] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["looks", "calls"])
def test_ranks_that_do_not_do_the_same(what: str, rank: int) -> None:
    found = run_distributed(
        "tests.transparency.schedules.ahead:train_on_rank",
        2,
        kwargs={"what": what, "rank": rank, "first": 2},
        parameters=ON_RANKS,
    )
    for texts, is_equal, _ in found:
        assert is_equal
        assert len(texts) == 1 and texts[0].startswith("SMPMismatch: what a step does differs")
        assert "does in microbatch 2 what it did not do in those before" in texts[0]
    assert 2 in found[rank][2] and 2 not in found[1 - rank][2]


def test_a_rank_that_knows_less() -> None:
    found = run_distributed(
        "tests.transparency.schedules.ahead:train_where_one_rank_knows_less", 2, parameters=ON_RANKS
    )
    for texts, is_equal, ends, _ in found:
        assert texts == [] and is_equal
        assert ends == [None] * 3, "in one step of four the ranks did not know the same"
    assert [forgotten for *_, forgotten in found] == [[], [1]]


@pytest.mark.host  # a number out of range is the end of all that a process does on a GPU
def test_an_action_that_fails(open_session: OpenSession) -> None:
    """In the midst of recording, and recording goes on."""
    open_session(2)
    numbers: list[int] = []

    def function(model: object, number: int, x: Tensor, target: Tensor) -> Tensor:
        numbers.append(number)
        index = torch.tensor([WIDE if number == (CHECKED + 1) * MICROBATCHES else 0])
        return model(x) + model(x).index_select(1, index)  # type: ignore[operator]

    with noted_ends() as ends:
        texts, is_equal = train(function, CHECKED + 3)
    assert is_equal and len(texts) == 1 and "the step failed on stage" in texts[0]
    assert (CHECKED + 2) * MICROBATCHES - 1 in numbers and ends == [None] * 3


WIDE = 10_000


def test_nothing_runs_ahead_under_a_check(open_session: OpenSession) -> None:
    """The steps in which the batch is compared are recorded to their ends first."""
    open_session(2, **BY_HAND)
    with noted_ends() as ends:
        model = smp.DistributedModel(torch.nn.Linear(2, 2))

        @smp.step
        def step(model: object, x: Tensor) -> Tensor:
            output = model(x)  # type: ignore[operator]
            model.backward(output.mean())  # type: ignore[attr-defined]
            return output

        for _ in range(CHECKED):
            step(model, torch.ones(8, 2))
        assert ends == []
        step(model, torch.ones(8, 2))
        assert ends == [None]
