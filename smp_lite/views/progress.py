"""How far a run is: a bar on a terminal, now and then a plain line elsewhere.

A bar redraws its line, which in a log file or behind a launcher that prefixes lines is noise; there
a line is printed about every tenth of the run, or every hundred steps where its length is unknown.

Speed is that of the last steps, so that the slow first ones (recording, first touches of memory)
are soon forgotten; the loss is the mean of the last steps, so one that is not a number stays in
sight for as many.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

__all__ = ["Progress"]

_SPEED_STEPS = 20
_LOSS_STEPS = 10
_NUM_LINES = 10
_STEPS_PER_LINE = 100


class Progress:
    """A context manager around the loop; call :meth:`update` after each step.

    Args:
        total: number of steps; None, or a number below 1, if unknown. More steps may come.
        description: the first word.
        enabled: whether to show anything: True on one rank only.
        console_is_terminal: None looks at standard output.
        clock: seconds, for the speed.
    """

    def __init__(
        self,
        total: int | None,
        description: str,
        *,
        enabled: bool,
        console_is_terminal: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total = total if total is not None and total >= 1 else None
        self._description = description
        self._enabled = enabled
        self._clock = clock
        self._num_steps = 0
        self._num_steps_shown = 0
        self._losses: deque[float] = deque(maxlen=_LOSS_STEPS)
        # (time, samples of the step that ended then)
        self._ends: deque[tuple[float, int]] = deque(maxlen=_SPEED_STEPS + 1)
        self._bar = self._make_bar(console_is_terminal) if enabled else None

    def __enter__(self) -> Progress:
        self._ends.append((self._clock(), 0))
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._description, total=self._total, figures="")
        return self

    def update(self, loss: float | None = None, samples: int = 0) -> None:
        """A step has ended; ``samples`` is how many examples it saw."""
        if not self._enabled:
            return
        self._num_steps += 1
        self._ends.append((self._clock(), samples))
        if loss is not None:
            self._losses.append(float(loss))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, figures="  ".join(self._figures()))
        elif self._is_line_due():
            self._print_line()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._num_steps > self._num_steps_shown:
            self._print_line()

    def _make_bar(self, console_is_terminal: bool | None) -> RichProgress | None:
        if console_is_terminal is None:
            # Not left to rich, which believes FORCE_COLOR; Jupyter's kernels set that for all they start.
            console_is_terminal = sys.stdout.isatty()
        console = Console(force_terminal=console_is_terminal)
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        return RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
        )

    def _figures(self) -> list[str]:
        figures = []
        if self._losses:
            figures.append(f"loss {sum(self._losses) / len(self._losses):.4g}")
        elapsed_s = self._ends[-1][0] - self._ends[0][0]
        # The window opens when the step before its first one ended.
        num_samples = sum(samples for _, samples in list(self._ends)[1:])
        if num_samples and elapsed_s > 0:
            rate = num_samples / elapsed_s
            figures.append(f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s")
        return figures

    def _is_line_due(self) -> bool:
        if self._total is None:
            return self._num_steps % _STEPS_PER_LINE == 0
        now = self._num_steps * _NUM_LINES // self._total
        return now > (self._num_steps - 1) * _NUM_LINES // self._total

    def _print_line(self) -> None:
        self._num_steps_shown = self._num_steps
        count = f"{self._num_steps}/{self._total}" if self._total else f"{self._num_steps} steps"
        words = filter(None, [self._description, count, *self._figures()])
        print("  ".join(words), flush=True)
