"""The list of actions of a step that runs while the step is recorded; see :mod:`..stage.ahead`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ...comm.groups.peers import Peers
from ...record.commands.recording import Recording
from ..stage.ahead import NOT_RESUMED, Ahead
from ..stage.executor import StageExecutor
from ..stage.gradients import GradientBooks
from .batches import Batch

__all__ = ["RunningList"]

_LONGEST_SPELL_S = 0.003


class RunningList:
    """What all stages played here do of one step, from its first recorded microbatch on.

    Args:
        batch: the plan of the whole step.
        first: the recording of its first microbatch.
        peers: the mp group.
        executors: for each stage played here.
        books: for each stage played here.

    Attributes:
        ahead: how far the recording has come.
        draws: whether calls of it draw random numbers.
        is_intact: whether it can go on; not if a wait has failed.
    """

    def __init__(
        self,
        batch: Batch,
        first: Recording,
        peers: Peers,
        executors: Mapping[int, StageExecutor],
        books: Mapping[int, GradientBooks],
    ) -> None:
        self.batch = batch
        self._peers = peers
        self._executors = executors
        self._books = books
        self.ahead = Ahead(first, len(batch.works))
        self.draws = any(command.is_seeded() for command in first.commands)
        self.is_intact = True
        self._spell = 1  # how many microbatches are recorded before the next burst
        self._spell_from, self._spell_since_s = 0, 0.0  # the last burst: recorded by then, and when it ended
        self._prepare(first)
        alike = {work.microbatch_index: first for work in batch.works}
        for stage, own in books.items():
            own.plan(batch.works, alike, batch.schedule[stage], stage, last_batch=True)
        self._generators = {
            stage: executor.run(batch.schedule[stage], self.ahead) for stage, executor in executors.items()
        }

    def _prepare(self, recording: Recording) -> None:
        m = recording.microbatch_index
        for stage, executor in self._executors.items():
            executor.states[m].update(self.batch.part(self.batch.works[m].graph, stage), stage)

    def accepts(self, recording: Recording) -> bool:
        """The next microbatch has been recorded: whether it is like the first, and may run."""
        if not self.ahead.is_repeated_by(recording):
            return False
        self._prepare(recording)
        self.ahead.num_recorded += 1
        return True

    def is_due(self) -> bool:
        """Whether enough has been recorded in a row to look whether something could run.

        What comes after large kernels finds the processor's caches full of their data: the first microbatch
        that is recorded then takes two to three times as long as the next. So after each burst twice as many
        are recorded as before, for some milliseconds at most; the first ones, for which other ranks wait,
        start as early as they can.
        """
        is_enough = self.ahead.num_recorded - self._spell_from >= self._spell
        return is_enough or time.perf_counter() - self._spell_since_s > _LONGEST_SPELL_S

    def could_compute(self) -> bool:
        """Goes on without computing; returns whether an action could run now, without waiting."""
        return NOT_RESUMED in self._advance()

    def burst(self) -> None:
        """Goes on until actions would have to wait, or have not been recorded."""
        self.ahead.is_resumed = True
        self._advance()
        self.ahead.is_resumed = False
        if self._spell_from:
            self._spell *= 2
        self._spell_from, self._spell_since_s = self.ahead.num_recorded, time.perf_counter()

    def _advance(self) -> set[str]:
        self.is_intact = False
        waits = self._peers.advance(self._generators)
        self.is_intact = True
        return waits

    def end(self, cut: int | None = None) -> None:
        """Runs to its end: all of it, or what there is before a microbatch, and transfers of the rest."""
        if cut is not None:
            self.ahead.cut = cut
            for books in self._books.values():
                books.cut(cut)
        self.ahead.is_resumed = True
        self._peers.drive(self._generators)
