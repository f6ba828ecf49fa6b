"""One step, twice from the same state: the process forks, and the two compare."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from ..errors import SMPError
from ..record.commands.recording import Command, Recording
from ..record.state.random_state import python_state
from ..session import Session
from .observe import Call, Key, StepNotes, notes_of_state, prints, state_of
from .plain_run import PlainStep, notes_of_random_state, notes_of_result, run_plainly
from .report import StepReport, compare

__all__ = ["CheckEnded", "NeedsRanks", "Observer", "StepChecker"]

CHILD_LIMIT_S = 600.0


class CheckEnded(BaseException):
    """Enough steps have been compared; no error, so no Exception."""


class NeedsRanks(BaseException):
    """The job's stages are shared by several ranks, which one process cannot play; no error.

    Attributes:
        num_ranks: of the job.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks


class StepChecker:
    """Checks the first steps of a script.

    Args:
        num_steps: how many.
        num_ranks: of the job, if that is said.

    Attributes:
        reports: one for each step that has been compared.
    """

    def __init__(self, num_steps: int, num_ranks: int = 1) -> None:
        self.num_steps, self.num_ranks = num_steps, num_ranks
        self.reports: list[StepReport] = []

    def begin(self, session: Session) -> None:
        """
        Raises:
            NeedsRanks: the session is of a job whose ranks share stages, or has replicas.
        """
        num_ranks = max(self.num_ranks, session.topology.world_size)
        if num_ranks > session.num_stages:
            raise NeedsRanks(num_ranks)

    def run(
        self,
        session: Session,
        function: Callable[..., Any],
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
        run_recorded: Callable[[], Any],
    ) -> Any:
        """Runs the step both ways; returns the recorded run's result.

        Raises:
            CheckEnded: this was the last one, or it differs.
        """
        model = session.model
        if model is None:
            return run_recorded()
        child = _Child(session, function, inputs)
        observer = Observer()
        error: BaseException | None = None
        try:
            result = observer.run(session, run_recorded)
        except Exception as raised:
            error = raised
        plain = child.result(observer, session)
        recorded = observer.notes
        if error is None:
            recorded.outcome = {
                **notes_of_result(result),
                **notes_of_state(model.module),
                **notes_of_random_state(),
            }
        else:
            recorded.error = f"{type(error).__name__}: {error}"
        report = compare(len(self.reports), recorded, plain, num_stages=session.num_stages)
        self.reports.append(report)
        if report.differs or len(self.reports) == self.num_steps:
            raise CheckEnded
        return result


class Observer:
    """Notes what the executors run."""

    def __init__(self) -> None:
        self.notes = StepNotes()
        self.seeded: set[Key] = set()
        self.labels: set[str] = set()  # of modules that are seeded and not noted
        self._counts: Counter[tuple[int, str]] = Counter()
        self._keys: dict[tuple[int, int], Key] = {}

    def run(self, session: Session, run_recorded: Callable[[], Any]) -> Any:
        session.observer = self
        try:
            return run_recorded()
        finally:
            session.observer = None

    def recorded(self, recordings: dict[int, Recording]) -> None:
        """Numbers the calls of modules in recorded order; a plan is about to be executed."""
        for m, recording in recordings.items():
            for command in recording.commands:
                place = (m, command.index)
                if command.module is None or place in self._keys or _was_undone(command):
                    continue
                if command.seeds:  # several modules in one go, which the plain run calls one by one
                    self.seeded.update((m, *key) for key in command.seeds)
                    self.labels.update(label for label, _ in command.seeds)
                    continue
                key = (m, command.label, self._counts[m, command.label])
                self._counts[m, command.label] += 1
                self._keys[place] = key
                if command.seed_key is not None and (command.meta is None or command.meta.draws):
                    self.seeded.add(key)

    def ran(
        self, microbatch_index: int, command: Command, given: Any, state: dict[str, str], result: Any
    ) -> None:
        key = self._keys.get((microbatch_index, command.index))
        if key is not None:
            self.notes.calls[key] = Call(given, prints(result), state)

    @staticmethod
    def before(command: Command, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, str]]:
        """Prints of what a module is given, and the state in which it runs."""
        assert command.module is not None
        return prints((args, kwargs)), state_of(command.module)


def _was_undone(command: Command) -> bool:
    """A run for real that showed that its module has to be opened."""
    return command.meta is not None and not command.outputs and command.meta.spec == ("tuple",)


class _Child:
    """The process that runs the step plainly; it waits to be told which calls to seed."""

    def __init__(
        self,
        session: Session,
        function: Callable[..., Any],
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> None:
        orders_out, orders_in = os.pipe()
        notes_out, notes_in = os.pipe()
        python_random = random.getstate()
        python_state()  # numpy's stream begins somewhere when it is loaded: not once in each process
        self.pid = os.fork()
        if self.pid == 0:
            random.setstate(python_random)  # Python seeds it anew in a child
            os.close(orders_in)
            os.close(notes_out)
            code = 1
            try:
                with os.fdopen(orders_out, "rb") as orders:
                    recorded, seeded = pickle.load(orders)
                notes = _run_in_child(session, function, inputs, recorded, seeded)
                with os.fdopen(notes_in, "wb") as out:
                    pickle.dump(notes, out)
                code = 0
            finally:
                os._exit(code)  # nothing of the parent's must end with this process
        os.close(orders_out)
        os.close(notes_in)
        self._orders: BinaryIO = os.fdopen(orders_in, "wb")
        self._notes: BinaryIO = os.fdopen(notes_out, "rb")

    def result(self, observer: Observer, session: Session) -> StepNotes:
        """Tells the child to go, and waits for its notes.

        Raises:
            SMPError: it ended without any, or took too long.
        """
        labels = frozenset({label for _, label, _ in observer._keys.values()} | observer.labels)
        with self._orders:
            pickle.dump((labels, frozenset(observer.seeded)), self._orders)
        timer = threading.Timer(CHILD_LIMIT_S, os.kill, (self.pid, 9))
        timer.start()
        try:
            with self._notes:
                return pickle.load(self._notes)  # type: ignore[no-any-return]
        except EOFError:
            raise SMPError(
                f"smp-lite check: the plain run of the step ended without a result (limit {CHILD_LIMIT_S:g} "
                f"s)"
            ) from None
        finally:
            timer.cancel()
            os.waitpid(self.pid, 0)


def _run_in_child(
    session: Session,
    function: Callable[..., Any],
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
    recorded: frozenset[str],
    seeded: frozenset[Key],
) -> StepNotes:
    module = session.model.module
    names = {id(part): name or "model" for name, part in module.named_modules()}
    step = PlainStep(names, recorded, seeded, len(inputs))
    session.step = step
    # What is left out by plain torch: nothing may hold on to a generator or a number of the parent's.
    torch.set_num_threads(1)
    return run_plainly(step, module, function, inputs)
