"""Whether segments of two microbatches do the same, so that one's graph computes the other's numbers.

What a graph is given anew each time may differ: the values that the segment imports, and ordinary tensors.
All else must be the same: what is called, in which order and torch state, with which plain values.
"""

from __future__ import annotations

from typing import Any

import torch

from ...plan.step.segments import Segment
from ...record.commands.recording import Command, Recording
from ...record.state.places import PLAIN
from ...record.values.placed import TensorMeta
from .given import given_to_command

__all__ = ["Likeness"]

_TOLD = frozenset((*PLAIN, torch.device, torch.layout, torch.memory_format))
"""Classes whose values are what their ``repr`` says: with the sign of a zero, which ``==`` overlooks."""


class Likeness:
    """Equal where segments do the same; to be a key.

    It keeps what is told apart by identity, so that nothing else comes to have that.
    """

    __slots__ = ("_hash", "_kept", "_key", "_numbers")

    def __init__(self, recording: Recording, segment: Segment) -> None:
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        commands = [recording.commands[index] for index in segment.commands]
        imports = [recording.values[value] for value in segment.imports]
        self._key = (
            segment,
            tuple((value.meta, value.is_parameter) for value in imports),
            tuple(map(self._of_command, commands)),
        )
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Likeness) and self._key == other._key

    def _of_command(self, command: Command) -> tuple[Any, ...]:
        arguments = command.arguments
        return (
            command.label,
            self._this(command.function),
            self._this(command.module),
            command.parameter,
            command.ambient,
            command.bare,
            command.outputs,
            tuple(command.sources),
            self._of_spec(arguments.spec),
            tuple(arguments.positions),
            tuple(self._of_given(tensor) for tensor in given_to_command(command)),
            tuple(self._of_leaf(leaf) for leaf in arguments.leaves if not isinstance(leaf, torch.Tensor)),
            command.must_stay,
            command.unit,
        )

    def _of_given(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """With its number among the segment's: code may ask whether two of them are one."""
        number = self._numbers.setdefault(id(tensor), len(self._numbers))
        self._kept.append(tensor)
        return number, TensorMeta.of(tensor), tensor.is_conj(), tensor.is_neg()

    def _of_spec(self, spec: Any) -> Any:
        """Nests with the keys of dicts as leaves are told: 1 and True are equal."""
        if type(spec) is tuple:
            return tuple(map(self._of_spec, spec))
        return self._of_leaf(spec)

    def _of_leaf(self, leaf: Any) -> Any:
        return (type(leaf), repr(leaf)) if type(leaf) in _TOLD else self._this(leaf)

    def _this(self, what: Any) -> int:
        self._kept.append(what)
        return id(what)
