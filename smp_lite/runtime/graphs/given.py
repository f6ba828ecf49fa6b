"""The ordinary tensors that a segment's commands are given, and its Python with others in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...plan.step.segments import Segment
from ...record.commands.recording import Command, Recording
from .captured import Run

__all__ = ["given_to", "given_to_command", "python_of"]


def given_to_command(command: Command) -> list[Tensor]:
    """The ordinary tensors among its arguments, in order."""
    pairs = zip(command.arguments.tensors, command.sources, strict=True)
    return [tensor for tensor, source in pairs if source < 0]


def given_to(recording: Recording, segment: Segment) -> list[Tensor]:
    """Each once, in the order in which the commands are given them: code may ask whether two are one."""
    return list({id(tensor): tensor for tensor in _at(_places(recording, segment))}.values())


def python_of(recording: Recording, segment: Segment, run: Callable[[dict[int, Tensor]], None]) -> Run:
    """``run``, which fills in the values of the segment, as a function of its imports and these tensors."""
    outputs = dict.fromkeys((*segment.exports, *segment.gradient_exports, *segment.roots))

    def python(imports: dict[int, Tensor], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        local = dict(imports)
        places = _places(recording, segment)
        own = _at(places)
        others = {
            id(tensor): other for tensor, other in zip(given_to(recording, segment), tensors, strict=True)
        }
        _put(places, [others[id(tensor)] for tensor in own])
        try:
            run(local)
        finally:
            _put(places, own)
        return {value: local[value] for value in outputs}

    return python


_Place = tuple[Command, int]
"""A command, and a number among its tensors."""


def _places(recording: Recording, segment: Segment) -> list[_Place]:
    """Where commands are given ordinary tensors."""
    commands = [recording.commands[index] for index in segment.commands]
    return [(c, number) for c in commands for number, source in enumerate(c.sources) if source < 0]


def _at(places: Sequence[_Place]) -> list[Tensor]:
    return [command.arguments.tensors[number] for command, number in places]


def _put(places: Sequence[_Place], tensors: Sequence[Tensor]) -> None:
    for (command, number), tensor in zip(places, tensors, strict=True):
        command.arguments.replace(number, tensor)
