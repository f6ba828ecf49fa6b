"""Progress on a terminal and in a log; time is given, so speeds are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smp_lite.views.progress import Progress


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(
    total: int | None,
    num_steps: int,
    losses: Iterator[float] | None = None,
    *,
    enabled: bool = True,
    console_is_terminal: bool = False,
    step_s: float = 0.5,
    samples: int = 4,
) -> None:
    clock = Clock()
    with Progress(
        total, "train", enabled=enabled, console_is_terminal=console_is_terminal, clock=clock
    ) as progress:
        for _ in range(num_steps):
            clock.now_s += step_s
            progress.update(next(losses) if losses else None, samples)


def test_lines_every_tenth_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    run(120, 120, iter([3.0] * 120))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train  12/120  loss 3  8 samples/s"
    counts = [line.split()[1] for line in lines]
    assert counts == [f"{step}/120" for step in range(12, 121, 12)]


def test_short_run_has_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    run(3, 3, samples=0)
    assert capsys.readouterr().out == "train  1/3\ntrain  2/3\ntrain  3/3\n"


def test_run_that_ends_early_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    run(100, 15, samples=0)
    assert capsys.readouterr().out == "train  10/100\ntrain  15/100\n"


def test_error_in_the_loop_passes_through(capsys: pytest.CaptureFixture[str]) -> None:
    def loop() -> None:
        with Progress(10, "train", enabled=True, console_is_terminal=False) as progress:
            progress.update()
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert capsys.readouterr().out == "train  1/10\n"


def test_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    run(None, 205, samples=0)
    assert capsys.readouterr().out == ("train  100 steps\ntrain  200 steps\ntrain  205 steps\n")


@pytest.mark.parametrize("total", [0, -5, None])
@pytest.mark.parametrize("console_is_terminal", [False, True])
def test_odd_totals_count_as_unknown(
    total: int | None, console_is_terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run(total, 2, console_is_terminal=console_is_terminal)
    shown = capsys.readouterr().out
    assert ("2/?" if console_is_terminal else "2 steps") in shown


@pytest.mark.parametrize("console_is_terminal", [False, True])
def test_more_steps_than_announced(console_is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run(2, 4, console_is_terminal=console_is_terminal)
    assert "4/2" in capsys.readouterr().out


def test_no_steps_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    run(10, 0)
    assert capsys.readouterr().out == ""


def test_loss_is_the_mean_of_the_last_ten(capsys: pytest.CaptureFixture[str]) -> None:
    run(20, 20, iter([100.0] * 10 + [1.0, 2.0, 3.0, 4.0, 5.0] * 2), samples=0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[4] == "train  10/20  loss 100"
    assert lines[-1] == "train  20/20  loss 3"


def test_loss_that_is_no_number_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    run(2, 2, iter([1.0, float("nan")]), samples=0)
    assert capsys.readouterr().out.splitlines()[-1] == "train  2/2  loss nan"


def test_speed_forgets_the_slow_start(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(30, "train", enabled=True, console_is_terminal=False, clock=clock) as progress:
        for step in range(30):
            clock.now_s += 100.0 if step == 0 else 0.01
            progress.update(samples=16)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train  3/30  0.48 samples/s"
    assert lines[-1] == "train  30/30  1,600 samples/s"


def test_steps_that_take_no_time_have_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    run(1, 1, step_s=0.0)
    assert capsys.readouterr().out == "train  1/1\n"


@pytest.mark.parametrize("console_is_terminal", [False, True])
def test_other_ranks_show_nothing(console_is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run(10, 10, enabled=False, console_is_terminal=console_is_terminal)
    assert capsys.readouterr() == ("", "")


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    run(20, 20, iter([2.5] * 20), console_is_terminal=True)
    *_, last, restored_cursor = capsys.readouterr().out.splitlines()
    assert restored_cursor == "\x1b[?25h"
    for text in ("train", "━━━━", "20/20", "loss 2.5", "8 samples/s", "0:00:0"):
        assert text in last


def test_output_that_is_no_terminal_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1, "train", enabled=True) as progress:
        progress.update()
    assert capsys.readouterr().out == "train  1/1\n"


def test_terminal_that_cannot_move_its_cursor_gets_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    run(1, 1, samples=0, console_is_terminal=True)
    assert capsys.readouterr().out == "train  1/1\n"


def test_colour_is_not_taken_for_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(1, "train", enabled=True) as progress:
        progress.update()
    assert capsys.readouterr().out == "train  1/1\n"
