"""What was tried, below each other: one time axis, the one that was taken marked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smp_lite.plan.choosing.choice import Alternative, Choice, choose
from smp_lite.plan.order.schedules import Policy
from smp_lite.views.alternatives_picture import draw_alternatives
from tests.planning import chain

image = pytest.importorskip("matplotlib.image")


def tried(num_stages: int = 2) -> Choice:
    once = chain(range(num_stages), [2.0] * num_stages, weight_share=1.0)
    v = chain([*range(num_stages), *reversed(range(num_stages))], weight_share=1.0)
    return choose(
        [
            Alternative("1F1B", once, Policy("interleaved")),
            Alternative("GPipe", once, Policy("simple")),
            Alternative("ZB-V", v, Policy("zero_bubble_v")),
        ],
        4,
    )


def bands(lines: np.ndarray) -> list[np.ndarray]:
    return [band for band in np.split(lines, np.flatnonzero(np.diff(lines) > 1) + 1) if len(band)]


def test_rows_end_where_the_steps_do_on_one_axis(tmp_path: Path) -> None:
    choice = tried()
    picture = np.asarray(image.imread(draw_alternatives(choice, tmp_path / "tried.png")))[..., :3]
    coloured = picture.max(axis=2) - picture.min(axis=2) > 0.1
    rows = [band for band in bands(np.flatnonzero(coloured.sum(axis=1) > 100)) if len(band) > 8][:6]
    assert len(rows) == 6  # two stages of each, the legend not counted
    ends = [int(np.flatnonzero(coloured[row].any(axis=0))[-1]) for row in rows]
    begins = [int(np.flatnonzero(coloured[row].any(axis=0))[0]) for row in rows]
    first = min(begins)
    found = [max(ends[2 * i : 2 * i + 2]) - first for i in range(3)]
    makespans = [outcome.makespan for outcome in choice.outcomes]
    assert [name.alternative.name for name in choice.outcomes] == ["ZB-V", "1F1B", "GPipe"]
    for width, makespan in zip(found, makespans, strict=True):
        assert width / found[1] == pytest.approx(makespan / makespans[1], abs=0.01)


def test_the_one_that_was_taken_has_a_dark_frame(tmp_path: Path) -> None:
    choice = tried()
    picture = np.asarray(image.imread(draw_alternatives(choice, tmp_path / "tried.png")))[..., :3]
    dark = picture.max(axis=2) < 0.3
    frames = bands(np.flatnonzero(dark.sum(axis=1) > 0.8 * picture.shape[1]))
    assert len(frames) == 2  # its upper and its lower edge
    assert frames[1][-1] < picture.shape[0] / 2  # around the first of three


def test_reasons_and_the_legend_are_within_the_picture(tmp_path: Path) -> None:
    once = chain([0, 1], [2.0] * 2, weight_share=1.0)
    v = chain([0, 1, 1, 0], weight_share=1.0)
    choice = choose(
        [
            Alternative("interleaved, 1 piece", once, Policy("interleaved")),
            Alternative("zero_bubble_v, 2 pieces, v", v, Policy("zero_bubble_v")),
        ],
        1,
        peaks_of=lambda alternative, _: [1006.8 if alternative.graph is v else 980.8] * 2,
        peak_text="{:.1f} KiB".format,
    )
    path = draw_alternatives(choice, tmp_path / "tried.png", time_unit="GFLOP", peak="{:.1f} KiB".format)
    assert choice.outcomes[1].excluded == "stage 0 needs 1006.8 KiB, 980.8 KiB allowed"
    ink = np.flatnonzero((np.asarray(image.imread(path))[..., :3].min(axis=2) < 0.9).any(axis=0))
    assert ink[-1] < image.imread(path).shape[1] - 15


@pytest.mark.ci
def test_of_many_stages_some_are_shown_and_1f1b(tmp_path: Path) -> None:
    few, many = (
        np.asarray(image.imread(draw_alternatives(tried(n), tmp_path / f"{n}.png"))) for n in (2, 20)
    )
    assert many.shape[0] < 10 * few.shape[0]
