"""The graphs of one stage: which segments of a replayed step become graphs, and when.

A recording that comes again is that of a step which is replayed. Each of its segments runs as it is the
first time, is looked at the second time, and is captured the third; from then on it is replayed, as long as
what its Python reads stays as it was. Microbatches whose segments do the same (:mod:`.alike`) take turns with
the same graphs: there are as many of a segment as microbatches are in flight at a time (more, where what they
are given lies otherwise in memory, by which kernels are chosen). Their memory is taken for good.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...device_graphs import CaptureSpoilt, can_capture
from ...devices import home, synchronize
from ...errors import SMPError
from ...plan.step.segments import Segment
from ...record.commands.recording import Recording
from ...record.parameters.placement import Placement
from .alike import Likeness
from .allowed import modules_of, why_not
from .captured import CapturedSegment, Run, first_line
from .given import given_to, python_of
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


@dataclass(eq=False)
class _Graphs:
    """Of one segment of microbatches that are alike; each is one microbatch's at a time."""

    likeness: Likeness
    changes: int = 0  # how often what it reads was another
    why_not: str = ""
    reads: Reads | None = None
    captured: list[CapturedSegment] = field(default_factory=list)


@dataclass
class _Known:
    """What has become of one segment of one recording."""

    times: int = 0
    why_not: str = ""
    graphs: _Graphs | None = None
    in_use: CapturedSegment | None = None  # of this step's forward


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
    _alike_of: weakref.WeakValueDictionary[Likeness, _Graphs] = field(
        default_factory=weakref.WeakValueDictionary
    )
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
        known.in_use = None
        if known.graphs is None and known.times > 1 and not known.why_not:
            known.why_not = why_not(recording, segment) or ""
            if not known.why_not:
                known.graphs = self._alike(Likeness(recording, segment))
        graphs = known.graphs
        if graphs is None:
            return None
        if graphs.reads is not None and graphs.reads.have_changed():
            self._forget(graphs)
            graphs.changes += 1
            if graphs.changes == _MOST_CHANGES:
                graphs.why_not = "what its Python reads, or where its memory is, changes from step to step"
        if graphs.why_not:
            return None
        if graphs.reads is None:
            self._look(graphs, recording, segment, leaves, run)
            return None
        if known.times == 2:  # its like has been looked at
            return None
        given = given_to(recording, segment)
        python = python_of(recording, segment, run)
        captured = next((each for each in graphs.captured if each.fits(leaves, given)), None)
        if captured is None and len(graphs.captured) < sum(each.graphs is graphs for each in self._all()):
            captured = self._capture(graphs, recording, segment, leaves, given, python)
        if captured is None:
            return None
        self.replayed += 1
        known.in_use = captured
        return captured.forward(leaves, given, python)

    def before_backward(
        self, recording: Recording, segment: Segment, starts: list[Any], gradients: list[Tensor | None]
    ) -> None:
        """The segment's backward comes."""
        known = self._known.get(id(recording), {}).get(segment.commands)
        if known is not None and known.in_use is not None and known.in_use.in_flight:
            known.in_use.prepare(starts, gradients)

    def end_step(self) -> None:
        """Forwards without a backward are given up; says what has become of the segments, once."""
        for known in self._all():
            if known.in_use is not None:
                known.in_use.land()
            known.in_use = None
        for graphs in self._alike_of.values():
            reason = next((each.must_run for each in graphs.captured if each.must_run), "")
            if reason:
                self._give_up(graphs, reason)
            elif any(each.lacks_backward() for each in graphs.captured):
                synchronize()  # their memory may still be written to
                graphs.captured = [each for each in graphs.captured if not each.lacks_backward()]
            for captured in graphs.captured:  # of microbatches that are forgotten
                captured.land()
        text = self.text()
        if self.says and text and text != self._was_said:
            self._was_said = text
            print(f"smp_lite: {text}", flush=True)

    def text(self) -> str:
        """Which segments are graphs, and why others are not; "" as long as it is not known."""
        if self.refused:
            return f"{GRAPHS_VARIABLE}: no graphs on stage {self.stage_index}: {self.refused}"
        replayed = [known for known in self._all() if known.times > 1]
        reasons = [known.why_not or (known.graphs.why_not if known.graphs else "") for known in replayed]
        are = [known.graphs is not None and bool(known.graphs.captured) for known in replayed]
        if not replayed or not all(is_graph or why for is_graph, why in zip(are, reasons, strict=True)):
            return ""
        in_memory = sum(len(graphs.captured) for graphs in self._alike_of.values())
        text = (
            f"{GRAPHS_VARIABLE}: {sum(are)} of {len(are)} segments of stage {self.stage_index} are graphs, "
            f"which share {in_memory}"
        )
        reasons = list(filter(None, dict.fromkeys(reasons)))
        return f"{text}; not: {'; '.join(reasons)}" if reasons else text

    # --------------------------------------------------------------------------------------------------------

    def _of(self, recording: Recording, segment: Segment) -> _Known:
        number = id(recording)
        of_recording = self._known.get(number)
        if of_recording is None:
            of_recording = self._known[number] = {}
            weakref.finalize(recording, self._known.pop, number, None)
        return of_recording.setdefault(segment.commands, _Known())

    def _alike(self, likeness: Likeness) -> _Graphs:
        found = self._alike_of.get(likeness)
        if found is None:
            found = self._alike_of[likeness] = _Graphs(likeness)
        return found

    def _all(self) -> list[_Known]:
        return [known for of_recording in list(self._known.values()) for known in of_recording.values()]

    def _look(
        self,
        graphs: _Graphs,
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
                graphs.reads = Reads(modules, names, self._single_parameters(recording, segment))
                return
        self._give_up(graphs, reason)

    def _capture(
        self,
        graphs: _Graphs,
        recording: Recording,
        segment: Segment,
        leaves: dict[int, Tensor],
        given: list[Tensor],
        python: Run,
    ) -> CapturedSegment | None:
        modules = modules_of(recording, segment)
        state = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        parameters = {id(p): p for module in modules for p in module.parameters()}
        parameters |= {id(p): p for p in self._single_parameters(recording, segment)}
        try:
            captured = CapturedSegment(
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
        except Exception as error:  # what is an error without a graph too comes up again there
            self._give_up(graphs, f"it cannot be captured ({first_line(error)})")
            return None
        graphs.captured.append(captured)
        return captured

    def _single_parameters(self, recording: Recording, segment: Segment) -> list[Tensor]:
        commands = [recording.commands[index] for index in segment.commands]
        return [self.placement.parameter(c.parameter) for c in commands if c.parameter is not None]

    def _give_up(self, graphs: _Graphs, reason: str) -> None:
        self._forget(graphs)
        graphs.why_not = reason

    @staticmethod
    def _forget(graphs: _Graphs) -> None:
        if graphs.captured:
            synchronize()  # their memory may still be written to
        # Of those in flight a backward may come: it holds them.
        graphs.captured, graphs.reads = [], None


def _under_a_mode() -> bool:
    """Whether somebody sees each operation that runs, as the script has asked for."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def _leaf_like(leaf: Tensor) -> Tensor:
    return torch.Tensor.detach(leaf).requires_grad_(leaf.requires_grad)
