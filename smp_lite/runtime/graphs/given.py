"""The ordinary tensors that a segment's commands are given, and its Python with others in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...plan.step.segments import Segment
from ...record.commands.recording import Command, Recording
from .captured import Run

__all__ = ["given_to", "python_of"]


def given_to(recording: Recording, segment: Segment) -> list[Tensor]:
    """In the order of the commands."""
    return [command.arguments.tensors[number] for command, number in _places(recording, segment)]


def python_of(recording: Recording, segment: Segment, run: Callable[[dict[int, Tensor]], None]) -> Run:
    """``run``, which fills in the values of the segment, as a function of its imports and these tensors."""
    outputs = dict.fromkeys((*segment.exports, *segment.gradient_exports, *segment.roots))

    def python(imports: dict[int, Tensor], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        local = dict(imports)
        places = _places(recording, segment)
        own = given_to(recording, segment)
        _put(places, tensors)
        try:
            run(local)
        finally:
            _put(places, own)
        return {value: local[value] for value in outputs}

    return python


def _put(places: Sequence[tuple[Command, int]], tensors: Sequence[Tensor]) -> None:
    for (command, number), tensor in zip(places, tensors, strict=True):
        command.arguments.replace(number, tensor)


def _places(recording: Recording, segment: Segment) -> list[tuple[Command, int]]:
    """Where commands are given ordinary tensors."""
    commands = [recording.commands[index] for index in segment.commands]
    return [(c, number) for c in commands for number, source in enumerate(c.sources) if source < 0]
