"""The peak of a stage as a sum along its list, and the table of it."""

from __future__ import annotations

import re

import pytest

from smp_lite.plan.step.actions import Action
from smp_lite.plan.step.memory import ActionMemory, StageMemory, StagePeak, format_memory_table, step_peak
from tests.planning import chain, plan


def peak(actions: str, memory: dict[str, ActionMemory], kept: int = 0) -> StagePeak:
    return step_peak(
        [Action.parse(text) for text in actions.split()],
        lambda action: memory.get(str(action), ActionMemory()),
        kept=kept,
    )


def test_forwards_that_wait_for_their_backwards() -> None:
    assert plan(chain([0, 1, 2, 3]), 8).most_kept() == (4, 3, 2, 1)
    assert plan(chain([0, 1, 2, 3]), 8, pipeline="simple").most_kept() == (8, 8, 8, 8)


def test_the_peak_is_in_an_action_and_not_between_actions() -> None:
    memory = {"0F0": ActionMemory(10, 0, 30), "0B0": ActionMemory(-10, 5, 15)}
    found = peak("0F0 0B0", memory)
    assert (str(found.action), found.kept, found.running) == ("0F0", 0, 30)
    assert (found.kept_at_end, found.gradients_at_end) == (0, 5)


def test_gradients_come_with_the_first_backward() -> None:
    memory = {
        "0F0": ActionMemory(10, 0, 10),
        "0B0": ActionMemory(-10, 100, 105),
        "0F1": ActionMemory(10, 0, 10),
        "0B1": ActionMemory(-10, 0, 40),
    }
    late = peak("0F0 0B0 0F1 0B1", memory)
    assert (str(late.action), late.kept, late.gradients, late.running) == ("0B1", 10, 100, 40)
    # With all forwards first the gradients are not there yet when most is kept.
    early = peak("0F0 0F1 0B0 0B1", memory)
    assert (str(early.action), early.kept, early.gradients, early.running) == ("0B1", 10, 100, 40)
    assert peak("0F0 0F1 0B0", memory).kept == 20


@pytest.mark.parametrize(
    ("actions", "most"),
    [
        ("0F0 0SEND_F0:v0>1 0F1", 7 + 7),  # still there: nobody has looked whether it has left
        ("0F0 0SEND_F0:v0>1 0F1 0SEND_F1:v0>1 0F2", 14),  # the first is gone, the second is there
        ("0F0 0SEND_F0:v0>1 0SEND_F0:v1>1 0F1", 14),  # one after another: neither has had the time
    ],
)
def test_what_is_sent_stays_until_the_next_send_after_computing(actions: str, most: int) -> None:
    memory = {f"0F{m}": ActionMemory(7, 0, 7) for m in range(3)}
    memory |= {"0SEND_F0:v0>1": ActionMemory(-7), "0SEND_F1:v0>1": ActionMemory(-7)}
    if "v1" in actions:
        memory["0SEND_F0:v0>1"], memory["0SEND_F0:v1>1"] = ActionMemory(-3), ActionMemory(-4)
    found = peak(actions, memory)
    assert found.kept + found.gradients + found.running == most


def test_what_is_held_from_the_start_counts() -> None:
    found = peak("0B0", {"0B0": ActionMemory(-10, 0, 5)}, kept=10)
    assert (found.kept, found.running, found.kept_at_end) == (10, 5, 0)


def test_an_empty_list_has_no_peak() -> None:
    assert peak("", {}, kept=3) == StagePeak(None, 3, 0, 0, 3, 0)


def test_the_table_adds_up() -> None:
    stages = [
        StageMemory(0, "B1", 1024, 1024, 2048, 10, 2**20, 0),
        StageMemory(1, "optimizer.step()", 2**20, 2**20, 2**21, 10, 0, 2**20, ("blocks.1",)),
    ]
    header, rule, *rows = format_memory_table(stages).splitlines()
    assert header.split()[:3] == ["stage", "peak", "when"]
    assert header.split()[3:] == ["parameters", "gradients", "optimizer", "batch", "kept", "running"]
    assert set(rule) == {"-", " "}
    figures = ["0", "1.0 MiB", "B1", "1.0 KiB", "1.0 KiB", "2.0 KiB", "10 B", "1.0 MiB", "0 B"]
    assert re.split(r"  +", rows[0].strip()) == figures
    assert rows[1].startswith("    1  > 5.0 MiB  optimizer.step()  ")
    assert stages[1].total == 5 * 2**20 + 10
