"""The graphs of one stage: which segments of a replayed step become graphs, and when.

A recording that comes again is that of a step which is replayed. Each of its segments runs as it is the
first time, is looked at the second time, and is captured the third; from then on it is replayed, as long as
what its Python reads stays as it was. Each microbatch has graphs of its own, since several are in flight:
their memory is taken for good.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...device_graphs import CaptureSpoilt, can_capture
from ...devices import home, synchronize
from ...errors import SMPError
from ...plan.step.segments import Segment
from ...record.commands.recording import Command, Recording
from ...record.parameters.placement import Placement
from .allowed import modules_of, why_not
from .captured import CannotCapture, CapturedSegment, Run, first_line
from .looking import look
from .reads import Reads
from .stand_ins import stand_ins

__all__ = ["GRAPHS_VARIABLE", "StageGraphs", "are_wanted"]

GRAPHS_VARIABLE = "SMP_LITE_CUDA_GRAPHS"
"""``1``: segments of replayed steps become graphs of the device. Else ``0``."""

_MOST_CHANGES = 4

RunCommands = Callable[[dict[int, Tensor]], None]
"""Runs the segment's commands; fills in all its values."""


def are_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for graphs.

    Raises:
        SMPError: it says something else than 0 or 1.
    """
    value = environment.get(GRAPHS_VARIABLE, "0")
    if value not in ("0", "1"):
        raise SMPError(f"{GRAPHS_VARIABLE}={value!r}: it must be 0 or 1")
    return value == "1"


@dataclass
class _Known:
    """What has become of one segment of one recording."""

    times: int = 0
    changes: int = 0  # how often what it reads was another
    why_not: str = ""
    reads: Reads | None = None
    captured: CapturedSegment | None = None


@dataclass
class StageGraphs:
    """For one stage.

    Args:
        stage_index: which.
        placement: where the live parameters are.
        refused: why no segment of the stage can be a graph; "": each is looked at.
        says: prints what has become of them.
    """

    stage_index: int
    placement: Placement
    refused: str = ""
    replayed: int = 0  # forwards, over all steps
    says: bool = True
    _known: dict[int, dict[tuple[int, ...], _Known]] = field(default_factory=dict)  # by recording's id
    _was_said: str = ""

    def __post_init__(self) -> None:
        if not can_capture():
            self.refused = f"{home()} has no graphs"

    # What the executor calls --------------------------------------------------------------------------------

    def forward(
        self, recording: Recording, segment: Segment, leaves: dict[int, Tensor], run: RunCommands
    ) -> dict[int, Tensor] | None:
        """The segment's exports and roots by a graph; None: its commands have to run."""
        if self.refused or _under_a_mode():
            return None
        known = self._of(recording, segment)
        known.times += 1
        if known.reads is not None and known.reads.have_changed():
            self._forget(known)
            known.changes += 1
            if known.changes == _MOST_CHANGES:
                known.why_not = "what its Python reads, or where its memory is, changes from step to step"
        if known.why_not or known.times == 1:
            return None
        given = _given(recording, segment)
        if known.reads is None:
            self._look(known, recording, segment, leaves, run)
            return None

        def python(imports: dict[int, Tensor], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
            with _Given(recording, segment, tensors):
                local = dict(imports)
                run(local)
            return {value: local[value] for value in _outputs(segment)}

        if known.captured is None:
            self._capture(known, recording, segment, leaves, given, python)
        if known.captured is None or not known.captured.fits(leaves, given):
            return None
        self.replayed += 1
        return known.captured.forward(leaves, given, python)

    def before_backward(
        self, recording: Recording, segment: Segment, starts: list[Any], gradients: list[Tensor | None]
    ) -> None:
        """The segment's backward comes."""
        known = self._known.get(id(recording), {}).get(segment.commands)
        if known is not None and known.captured is not None and known.captured.in_flight:
            known.captured.prepare(starts, gradients)

    def end_step(self) -> None:
        """Forwards without a backward are given up; says what has become of the segments, once."""
        for known in self._all():
            if known.captured is not None and known.captured.must_run:
                self._give_up(known, known.captured.must_run)
            elif known.captured is not None and known.captured.lacks_backward():
                self._forget(known)
            elif known.captured is not None:
                known.captured.land()
        text = self.text()
        if self.says and text and text != self._was_said:
            self._was_said = text
            print(f"smp_lite: {text}", flush=True)

    def text(self) -> str:
        """Which segments are graphs, and why others are not; "" as long as it is not known."""
        if self.refused:
            return f"{GRAPHS_VARIABLE}: no graphs on stage {self.stage_index}: {self.refused}"
        replayed = [known for known in self._all() if known.times > 1]
        decided = [known for known in replayed if known.captured is not None or known.why_not]
        if not decided or len(decided) < len(replayed):
            return ""
        num = sum(known.captured is not None for known in decided)
        reasons = dict.fromkeys(known.why_not for known in decided if known.why_not)
        text = f"{GRAPHS_VARIABLE}: {num} of {len(decided)} segments of stage {self.stage_index} are graphs"
        return f"{text}; not: {'; '.join(reasons)}" if reasons else text

    # --------------------------------------------------------------------------------------------------------

    def _of(self, recording: Recording, segment: Segment) -> _Known:
        number = id(recording)
        of_recording = self._known.get(number)
        if of_recording is None:
            of_recording = self._known[number] = {}
            weakref.finalize(recording, self._known.pop, number, None)
        return of_recording.setdefault(segment.commands, _Known())

    def _all(self) -> list[_Known]:
        return [known for of_recording in list(self._known.values()) for known in of_recording.values()]

    def _look(
        self,
        known: _Known,
        recording: Recording,
        segment: Segment,
        leaves: dict[int, Tensor],
        run: RunCommands,
    ) -> None:
        reason = why_not(recording, segment)
        if reason is None:
            modules = modules_of(recording, segment)
            fresh = {value: _leaf_like(leaf) for value, leaf in leaves.items()}
            names, reason = look(modules, lambda: run(fresh))
            if names is not None:
                known.reads = Reads(modules, names, self._single_parameters(recording, segment))
                return
        self._give_up(known, reason)

    def _capture(
        self,
        known: _Known,
        recording: Recording,
        segment: Segment,
        leaves: dict[int, Tensor],
        given: list[Tensor],
        python: Run,
    ) -> None:
        modules = modules_of(recording, segment)
        state = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        parameters = {id(p): p for module in modules for p in module.parameters()}
        parameters |= {id(p): p for p in self._single_parameters(recording, segment)}
        try:
            known.captured = CapturedSegment(
                python,
                leaves,
                given,
                [p for p in parameters.values() if p.requires_grad],
                state,
                partial(stand_ins, self.placement),
                has_backward=segment.has_backward,
            )
        except CaptureSpoilt:
            raise
        except (CannotCapture, RuntimeError) as error:
            self._give_up(known, f"it cannot be captured ({first_line(error)})")

    def _single_parameters(self, recording: Recording, segment: Segment) -> list[Tensor]:
        commands = [recording.commands[index] for index in segment.commands]
        return [self.placement.parameter(c.parameter) for c in commands if c.parameter is not None]

    def _give_up(self, known: _Known, reason: str) -> None:
        self._forget(known)
        known.why_not = reason

    @staticmethod
    def _forget(known: _Known) -> None:
        if known.captured is not None:
            synchronize()  # its memory may still be written to
        known.captured = known.reads = None


def _under_a_mode() -> bool:
    """Whether somebody sees each operation that runs, as the script has asked for."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


class _Given:
    """Within: the commands are given these ordinary tensors in the place of theirs."""

    def __init__(self, recording: Recording, segment: Segment, tensors: Sequence[Tensor]) -> None:
        self._places = _places(recording, segment)
        self._own = [command.arguments.tensors[number] for command, number in self._places]
        self._tensors = tensors

    def __enter__(self) -> None:
        self._put(self._tensors)

    def __exit__(self, *error: object) -> None:
        self._put(self._own)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for (command, number), tensor in zip(self._places, tensors, strict=True):
            command.arguments.replace(number, tensor)


def _places(recording: Recording, segment: Segment) -> list[tuple[Command, int]]:
    """Where commands are given ordinary tensors."""
    commands = [recording.commands[index] for index in segment.commands]
    return [(c, number) for c in commands for number, source in enumerate(c.sources) if source < 0]


def _given(recording: Recording, segment: Segment) -> list[Tensor]:
    return [command.arguments.tensors[number] for command, number in _places(recording, segment)]


def _outputs(segment: Segment) -> list[int]:
    return list(dict.fromkeys((*segment.exports, *segment.gradient_exports, *segment.roots)))


def _leaf_like(leaf: Tensor) -> Tensor:
    return torch.Tensor.detach(leaf).requires_grad_(leaf.requires_grad)
