"""The picture of a schedule, looked at pixel by pixel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smp_lite.plan.step.memory import StageMemory
from smp_lite.views.schedule_picture import draw_schedule
from tests.planning import chain, plan

image = pytest.importorskip("matplotlib.image")


def pixels(path: Path) -> np.ndarray:
    """Red, green, blue of each pixel, 0 to 1, as (height, width, 3)."""
    return np.asarray(image.imread(path))[..., :3]


def is_forward(picture: np.ndarray) -> np.ndarray:
    return picture[..., 2] > picture[..., 0] + 0.15


def is_backward(picture: np.ndarray) -> np.ndarray:
    return picture[..., 0] > picture[..., 2] + 0.15


def test_blocks_have_their_share_of_the_picture(tmp_path: Path) -> None:
    """Backwards take twice the time of forwards, so about twice the coloured area."""
    path = draw_schedule(plan(chain([0, 1]), 8).simulate(), tmp_path / "schedule.png")
    picture = pixels(path)
    ratio = is_backward(picture).sum() / is_forward(picture).sum()
    assert 1.8 < ratio < 2.4


def test_idle_is_white_and_work_is_where_it_was_simulated(tmp_path: Path) -> None:
    """One microbatch on two stages: F on 0, F and B on 1, B on 0, in sixths of the time."""
    picture = pixels(draw_schedule(plan(chain([0, 1]), 1).simulate(), tmp_path / "schedule.png"))
    coloured = is_forward(picture) | is_backward(picture)
    # The legend lies below the rows, which are told apart by the blank lines between them.
    lines = np.flatnonzero(coloured.any(axis=1))
    rows = np.split(lines, np.flatnonzero(np.diff(lines) > 2) + 1)[:2]
    begin, end = np.flatnonzero(coloured[rows[0]].any(axis=0))[[0, -1]]
    sixth = (end - begin) / 6

    def kinds(row: np.ndarray) -> list[str]:
        # A pixel at a fifth of the block's height is above the number in it.
        line = row[0] + len(row) // 5
        columns = [int(begin + sixth * (i + 0.5)) for i in range(6)]
        return [
            "F" if is_forward(picture[line, c]) else "B" if is_backward(picture[line, c]) else "."
            for c in columns
        ]

    assert kinds(rows[0]) == ["F", ".", ".", ".", "B", "B"]
    assert kinds(rows[1]) == [".", "F", "B", "B", ".", "."]


def test_text_says_what_a_person_wants_to_know(tmp_path: Path) -> None:
    """In an SVG file each text stands as a comment beside its outlines."""
    path = draw_schedule(
        plan(chain([0, 1, 0]), 2).simulate(),
        tmp_path / "schedule.svg",
        title="tied embeddings",
        time_unit="ms",
        memory=[
            StageMemory(0, "B0", 2**30, 2**30, 0, 0, 2**30, 0),
            StageMemory(1, "F1", 0, 0, 2**30, 0, 0, 2**30, ("blocks.1",)),
        ],
    )
    text = path.read_text()
    for expected in [
        "tied embeddings",
        "makespan of one step: 12 ms",
        "work of all stages: 18 ms; idle: 25.0% of their time",
        "time since the step began (ms)",
        "stage 1",
        "50%",
        "3.0 GiB",
        "&gt; 2.0 GiB",
        "1.1",
        "forward, microbatches 0 to 1",
    ]:
        assert f"<!-- {expected} -->" in text


def test_numbers_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    graph = chain([0, 1], costs=[1, 0.001])
    path = draw_schedule(plan(graph, 12).simulate(), tmp_path / "schedule.svg")
    # Forward and backward of stage 0; no tick of the time axis is at 11.
    assert path.read_text().count("<!-- 11 -->") == 2


@pytest.mark.parametrize("num_microbatches", [1, 4, 8])
def test_the_legend_is_within_the_picture(num_microbatches: int, tmp_path: Path) -> None:
    """A narrow picture has it in two lines."""
    graph = chain([0], weight_share=1.0)
    found = plan(graph, num_microbatches, pipeline="zero_bubble").simulate()
    picture = pixels(draw_schedule(found, tmp_path / "schedule.png"))
    ink = np.flatnonzero((picture.min(axis=2) < 0.9).any(axis=0))
    assert ink[-1] < picture.shape[1] - 15  # a tenth of an inch


@pytest.mark.slow
def test_large_schedule_stays_readable(tmp_path: Path) -> None:
    found = plan(chain(range(16)), 64, active_microbatches=16).simulate()
    path = draw_schedule(found, tmp_path / "schedule.svg")
    # Both the forward and the backward of each stage carry the number.
    assert path.read_text().count("<!-- 63 -->") == 32


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from smp_lite.views.schedule_picture import draw_schedule\n"
        "from smp_lite.plan.step.simulate import Simulation\n"
        f"draw_schedule(Simulation((), 0.0, ()), {str(tmp_path / 'a.png')!r})\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'ImportError: drawing a schedule needs matplotlib: pip install "smp-lite[plot]"' in (result.stderr)


def test_views_leave_pyplot_and_torch_alone(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "import smp_lite.views.progress, smp_lite.views.timeline\n"
        "from smp_lite.views.schedule_picture import draw_schedule\n"
        "from smp_lite.plan.step.simulate import Simulation\n"
        f"draw_schedule(Simulation((), 0.0, ()), {str(tmp_path / 'a.png')!r})\n"
        "assert 'matplotlib.figure' in sys.modules\n"
        "assert not {'matplotlib.pyplot', 'torch'} & set(sys.modules), 'imported'\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.png").stat().st_size > 0
