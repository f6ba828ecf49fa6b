"""The drawing of a schedule as text: scale, names, continuation, figures."""

from __future__ import annotations

import pytest

from smp_lite.plan.step.schedule_text import compute_lists, schedule_text
from smp_lite.plan.step.simulate import simulate
from smp_lite.plan.units import human_bytes
from tests.planning import chain, plan


def test_whole_text() -> None:
    text = schedule_text(plan(chain([0, 1]), 2).simulate())
    assert text.splitlines() == [
        "stage 0  F0 F1 ......B0    ...B1",
        "stage 1  ...F0 B0    F1 B1    ......",
        "",
        "makespan of one step  9 cost units   from the start of its first action to the end of its last one",
        "work of all stages    12 cost units  their forwards and backwards together",
        "idle                  33.3%          of the stages' time within the makespan",
    ]


def test_cell_holds_the_longest_name() -> None:
    """Microbatches from 10 on widen every cell; columns stay aligned over the rows."""
    rows = plan(chain([0, 1]), 11).staircase().splitlines()
    assert rows[0].startswith("stage 0  F0  F1  ........B0      F2  B1      F3  ")
    assert rows[1].endswith("F10 B10     ........")


def test_time_unit() -> None:
    text = schedule_text(plan(chain([0], costs=[0.5]), 1).simulate(), time_unit="s")
    assert text.splitlines()[-3].startswith("makespan of one step  1.5 s  ")
    assert text.splitlines()[-2].startswith("work of all stages    1.5 s  ")


def test_short_action_keeps_its_letter_and_does_not_stretch_the_rest() -> None:
    text = schedule_text(plan(chain([0, 1], costs=[1, 0.001]), 1).simulate())
    assert text.splitlines()[:3] == [
        "stage 0  F0          B0",
        "stage 1  ............B.......................",
        "",
    ]
    assert text.splitlines()[-1] == "too short for their name: 2 actions, drawn as F or B"


def test_wide_drawing_continues_below() -> None:
    found = plan(chain([0, 1, 2, 3]), 12).simulate()
    whole = schedule_text(found).split("\n\n")[0].splitlines()
    *systems, figures = schedule_text(found, width=60).split("\n\n")
    assert len(systems) == 4
    assert figures.startswith("makespan of one step  45 cost units ")
    rows = ["".join(parts) for parts in zip(*(s.splitlines() for s in systems), strict=True)]
    for index, (row, whole_row) in enumerate(zip(rows, whole, strict=True)):
        names = row.replace(f"stage {index}", "").replace(".", " ").split()
        assert names == whole_row.replace(".", " ").split()[2:]
    lines = [line for system in systems for line in system.splitlines()]
    assert max(map(len, lines)) <= 60
    assert len(lines) == 16


def test_width_that_holds_everything_changes_nothing() -> None:
    found = plan(chain([0, 1]), 2).simulate()
    assert schedule_text(found, width=40) == schedule_text(found)


def test_too_narrow_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 39: give a schedule 40 columns or more"):
        schedule_text(plan(chain([0]), 1).simulate(), width=39)


def test_stages_line_up_from_ten_on() -> None:
    rows = plan(chain(range(11)), 1).staircase().splitlines()
    assert rows[0].startswith(" stage 0  F0")
    assert rows[10].startswith("stage 10  ...")


def test_nothing_to_draw() -> None:
    for nothing in (simulate((), []), plan(chain([0, 1], costs=[0, 0]), 1).simulate()):
        text = schedule_text(nothing)
        assert "makespan of one step  0 cost units  " in text
        assert "work of all stages    0 cost units  " in text
        assert "idle                  0.0%  " in text


def test_compute_lists_leave_transfers_out() -> None:
    assert compute_lists(plan(chain([0, 1, 0]), 1).schedule) == "0F0 0F0.1 0B0.1 0B0\n1F0 1B0"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_human_bytes(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text
