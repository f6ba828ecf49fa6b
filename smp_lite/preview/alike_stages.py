"""Which stages are alike, so that one of them is played for all.

Two stages are alike if what they run could be exchanged with no difference to memory: the same lists of
actions, but for the numbers of values and stages; the same calls, of modules of the same classes with
parameters and buffers of the same form and with equal attributes; the same results, as the recorder has
described them, bytes kept included. One attribute may differ: a block's own number. Whatever is not known to
be equal counts as different: then each is played for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..plan.step.actions import Action
from ..plan.step.segments import Segment, SegmentGraph
from ..record.commands.recording import Command, Recording
from ..record.parameters.placement import Placement
from ..record.values.placed import TensorMeta

__all__ = ["Likeness", "alike"]

_NUMBERS_OF_BLOCKS = frozenset({"layer_idx"})
"""transformers gives each block its number, to find its part of a cache."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_PLAIN_SET = frozenset(_PLAIN)
_CONTAINERS = (dict, list, tuple, set)


class Likeness:
    """Describes one stage so that alike stages have equal descriptions.

    Args:
        stage: the stage.
        placement: of the model; its parameters are as the recorder saw them.

    Attributes:
        parameters: names of those that are called, in the order of the calls.
    """

    def __init__(self, stage: int, placement: Placement) -> None:
        self.stage = stage
        self._numbers: dict[tuple[str, Any], int] = {}
        self._kept: list[Any] = []  # alive, or ids would be used again
        self.parameters: dict[str, None] = {}
        self._names = {
            id(placement.parameter(name)): name
            for name, home in placement.parameter_stage.items()
            if home == stage
        }
        self._placement = placement

    def of(self, recording: Recording, graph: SegmentGraph, actions: Sequence[Action]) -> tuple[Any, ...]:
        """The description of one microbatch."""
        commands = [c for c in recording.commands if c.stage_index == self.stage]
        place = {command.index: number for number, command in enumerate(commands)}
        return (
            [
                (a.kind, a.visit, self._value(recording, a.value), self._number("stage", a.peer))
                for a in actions
            ],
            [self._command(recording, command) for command in commands],
            [
                (
                    s.visit,
                    [place[i] for i in s.commands],
                    *[self._values(recording, v) for v in _values_of(graph, s)],
                )
                for s in graph.segments
                if s.stage_index == self.stage
            ],
            [
                (self._values(recording, b.values), [g if g is None else _meta(g) for g in b.gradients])
                for b in recording.backwards
                if any(recording.values[v].stage_index == self.stage for v in b.values)
            ],
            [
                self._value(recording, v)
                for v in sorted(recording.needed)
                if recording.values[v].stage_index == self.stage
            ],
        )

    def _number(self, what: str, thing: Any) -> int:
        return self._numbers.setdefault((what, thing), len(self._numbers))

    def _value(self, recording: Recording, value: int | None) -> Any:
        if value is None or value < 0:
            return value
        of = recording.values[value]
        key = self._number(f"value {recording.microbatch_index}", value)
        return key, of.meta, of.is_parameter, of.stage_index == self.stage

    def _values(self, recording: Recording, values: Sequence[int]) -> list[Any]:
        return [self._value(recording, value) for value in values]

    def _command(self, recording: Recording, command: Command) -> tuple[Any, ...]:
        tensors = iter(zip(command.arguments.tensors, command.sources, strict=True))
        positions = set(command.arguments.positions)
        leaves = []
        for position, leaf in enumerate(command.arguments.leaves):
            if position in positions:
                tensor, source = next(tensors)
                leaves.append(self._value(recording, source) if source >= 0 else self._tensor(tensor))
            else:
                leaves.append(self._plain(leaf))
        return (
            command.arguments.spec,
            leaves,
            command.ambient,
            command.epoch,
            self._plain(command.function),
            None if command.module is None else self._module(command.module),
            None if command.parameter is None else self._parameter(command.parameter),
            None if command.input is None else self._tensor(command.input),
            (command.bare, command.on_made, command.must_stay, len(command.touches)),
            None if command.carried is None else self._number("state", id(command)),
            command.draw is None,
            command.meta,
            self._values(recording, command.outputs),
            [self._values(recording, pair) for pair in command.changes],
        )

    def _parameter(self, name: str) -> Any:
        self.parameters[name] = None
        return self._tensor(self._placement.parameter(name))

    def _module(self, module: nn.Module) -> list[Any]:
        parts = []
        for name, part in module.named_modules():
            attributes = []
            for key, value in vars(part).items():
                if key in ("_parameters", "_buffers"):
                    tensors = [(k, None if t is None else self._tensor(t)) for k, t in value.items()]
                    attributes.append((key, tensors))
                elif key == "_modules":
                    attributes.append((key, list(value)))
                elif key in _NUMBERS_OF_BLOCKS and type(value) is int:
                    attributes.append((key, None))
                else:
                    attributes.append((key, self._plain(value)))
            parts.append((name, type(part), attributes))
        return parts

    def _tensor(self, tensor: torch.Tensor) -> Any:
        """Its form, and which other tensors it shares memory with."""
        name = self._names.get(id(tensor))
        if name is not None:
            self.parameters[name] = None
        self._kept.append(tensor)
        memory = id(tensor)
        if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
            memory = tensor.untyped_storage()._cdata
        return self._number("memory", memory), type(tensor), _meta(tensor)

    def _plain(self, value: Any) -> Any:
        """Something that is equal only where the value is; empty containers are."""
        kind = type(value)
        if kind in _PLAIN_SET or isinstance(value, _PLAIN):
            return kind, value
        if isinstance(value, _CONTAINERS) and not value:
            return kind
        if kind is list or kind is tuple:
            return kind, [self._plain(part) for part in value]
        if kind is set and all(type(part) is str for part in value):
            return kind, sorted(value)
        self._kept.append(value)
        return "one object", id(value)


def _values_of(graph: SegmentGraph, segment: Segment) -> tuple[tuple[int, ...], ...]:
    return (
        graph.sums_taken(segment),
        graph.seeds_taken(segment),
        segment.imports,
        segment.exports,
        segment.gradient_exports,
        segment.gradient_imports,
        segment.roots,
    )


def alike(one: Any, other: Any) -> bool:
    """Whether two descriptions are equal; what cannot be compared is not."""
    try:
        return bool(one == other)
    except Exception:
        return False


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta.of(tensor)
