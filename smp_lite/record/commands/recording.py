"""What recording one microbatch leaves behind: commands, values, and the loss.

A :class:`Recording` grows while the user's function runs and is handed to the planner and the executor.
Its ``digest`` covers every command with its arguments and is compared between ranks; its
``structure_digest`` covers only what planning depends on, so that a changing Python number among the
arguments does not make a new plan. Both are chains of integer hashes, which Python computes alike in every
process.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...plan.step.segments import CommandNode, SegmentGraph, build_graph
from ..state.ambient import Ambient
from ..state.draws import Draw
from ..state.places import Place
from ..values.calls import Arguments, ResultMeta
from ..values.memory import storage_of
from ..values.placed import TensorMeta

_NOTHING = contextlib.nullcontext()


def nothing_around(stage_index: int, commands: Sequence[int]) -> AbstractContextManager[Any]:
    return _NOTHING


@dataclass(slots=True)
class Value:
    """One version of one placed tensor within a microbatch; microbatches that do the same share it."""

    index: int
    stage_index: int
    meta: TensorMeta
    is_parameter: bool = False
    is_view: bool = False
    """It is a view of something else that the call has made that made it, returned or not."""
    lies_in: str = ""
    """If its memory is not that of a value: what it is, and what changes of it would miss."""


@dataclass(slots=True)
class Command:
    """One recorded call: of a module, of a torch function, or the use of a parameter.

    ``sources`` gives for each tensor argument its value, or -1 for an ordinary tensor, which is kept in
    ``arguments``. ``bare`` calls run without the module's forward hooks, which have run around the
    recording. ``touches`` numbers the modules whose buffers the call changes. ``carried`` is Python state
    to run it with. ``changes`` pairs each value that the call changes in place with its new version,
    views that share the memory of an argument too; if there are any, it ``changes_views``; if nobody holds
    what they are views of, it ``hides_base``. ``on_made``
    calls get the tensors that were made, where others get leaves of those of earlier segments.
    ``must_stay`` names parameters and buffers that the call must not really change. ``seeds`` takes the
    place of ``seed_key`` where several modules are called in one go. ``unit`` is that of the module,
    where parameters are sharded; a call without one belongs to that of the call before it on its stage.
    ``looks_at_gradients`` tells of code that may read ``grad`` of parameters.
    """

    index: int
    stage_index: int
    label: str
    arguments: Arguments
    sources: list[int]
    ambient: Ambient
    epoch: int
    function: Callable[..., Any] | None = None
    module: nn.Module | None = None
    parameter: str | None = None
    input: torch.Tensor | None = None
    bare: bool = False
    on_made: bool = False
    must_stay: tuple[str, ...] = ()
    touches: tuple[int, ...] = ()
    carried: list[tuple[Place, Any]] | None = None
    seed_key: tuple[str, int] | None = None
    seeds: tuple[tuple[str, int], ...] = ()
    draw: Draw | None = None
    meta: ResultMeta | None = None
    outputs: tuple[int, ...] = ()
    changes: tuple[tuple[int, int], ...] = ()
    changes_views: bool = False
    hides_base: bool = False
    unit: int | None = None
    looks_at_gradients: bool = False

    def is_seeded(self) -> bool:
        """Whether it draws random numbers, or may: nobody knows yet what it does."""
        return self.seed_key is not None or bool(self.seeds) or self.meta is None

    def values(self) -> list[int]:
        """Values that it reads."""
        return [source for source in self.sources if source >= 0]

    def is_trained(self) -> bool:
        """Whether parameters get gradients by it. A product with a weight has one for each operand."""
        return self.module is not None and any(p.requires_grad for p in self.module.parameters())

    def again(self, arguments: Arguments) -> Command:
        """The same call with arguments of its own and without state to carry."""
        return Command(
            self.index,
            self.stage_index,
            self.label,
            arguments,
            self.sources,
            self.ambient,
            self.epoch,
            self.function,
            self.module,
            unit=self.unit,
            meta=self.meta,
            seed_key=self.seed_key,
            looks_at_gradients=self.looks_at_gradients,
        )

    def carry(self, state: list[tuple[Place, Any]]) -> None:
        """Runs with this state, unless what is there by then was noted before: the earlier word counts."""
        known = {place.identity for place, _ in self.carried or ()}
        self.carried = [*(self.carried or ()), *[pair for pair in state if pair[0].identity not in known]]


@dataclass
class Backward:
    """One ``model.backward`` call: values and the gradients to start from (None: ones).

    ``num_commands`` is how many commands had been recorded when it came.
    """

    values: tuple[int, ...]
    gradients: tuple[torch.Tensor | None, ...]
    num_commands: int


@dataclass
class Recording:
    """Everything recorded of one microbatch."""

    microbatch_index: int
    commands: list[Command] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    around_backward: Callable[[int, Sequence[int]], AbstractContextManager[Any]] = nothing_around
    needed: set[int] = field(default_factory=set)
    links: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    inputs: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    complete: bool = False
    epoch: int = 0
    digest: int = 0
    structure_digest: int = 0
    draws: bool = False
    _key: tuple[tuple[int, int, int, bool, int], tuple[int, ...]] | None = None  # the last, and what it is of

    def new_value(
        self,
        stage_index: int,
        meta: TensorMeta,
        *,
        is_parameter: bool = False,
        is_view: bool = False,
        lies_in: str = "",
    ) -> int:
        index = len(self.values)
        self.values.append(Value(index, stage_index, meta, is_parameter, is_view, lies_in))
        return index

    def add(self, command: Command, links: tuple[tuple[int, ...], ...], tokens: tuple[int, int]) -> None:
        """Appends a command; ``links`` per output, ``tokens`` its content and its structure."""
        self.commands.append(command)
        self.links.append(links)
        place = (command.stage_index, command.epoch, *command.touches, -2, *command.sources)
        self.digest = hash((self.digest, tokens[0], place))
        self.structure_digest = hash((self.structure_digest, tokens[1], place))

    def draw_again(self) -> None:
        """For a step that is replayed: its functions draw the next numbers."""
        for command in self.commands:
            if command.draw is not None:
                command.draw.note()
                command.draw.advance()

    def one_more(self, microbatch_index: int, earlier: Recording) -> Recording:
        """Another microbatch that does the same, to plan with: it has ordinary tensors of its own.

        Args:
            microbatch_index: which.
            earlier: one that this repeats; what both have captured is not made for each microbatch.
        """
        commands = []
        made: dict[int, torch.Tensor] = {}
        for command, before in zip(self.commands, earlier.commands, strict=True):
            pairs = zip(command.sources, command.arguments.tensors, before.arguments.tensors, strict=True)
            own = [
                i
                for i, (source, now, then) in enumerate(pairs)
                if source < 0 and storage_of(now) != storage_of(then)
            ]
            if own:
                arguments = command.arguments.copy()
                for i in own:
                    tensor = arguments.tensors[i]
                    if id(tensor) not in made:
                        with torch.no_grad(), torch._C.DisableTorchFunction():
                            made[id(tensor)] = tensor.clone()
                    arguments.replace(i, made[id(tensor)])
                command = replace(command, arguments=arguments)
            commands.append(command)
        return replace(self, microbatch_index=microbatch_index, commands=commands)

    def roots(self) -> list[int]:
        return [value for backward in self.backwards for value in backward.values]

    def ancestors(self, values: Iterable[int]) -> set[int]:
        """The commands whose results these values' gradients flow to; parameters are not among them."""
        wanted, found = set(values), set()
        for command in reversed(self.commands):
            made = {*command.outputs, *(new for _, new in command.changes)}
            if command.parameter is None and not wanted.isdisjoint(made):
                found.add(command.index)
                wanted.update(v for v in command.values() if self.values[v].meta.requires_grad)
                wanted.update(old for old, _ in command.changes)
        return found

    def graph(self) -> SegmentGraph:
        """The segment graph of what has been recorded so far."""
        nodes = []
        units: dict[int, int] = {}  # by stage
        reached = self._reached()
        for command, links in zip(self.commands, self.links, strict=True):
            # A change in place makes new versions; it reads the old ones of all views concerned.
            read = dict.fromkeys(command.values())
            read.update(dict.fromkeys(old for old, _ in command.changes))
            if command.unit is not None:
                units[command.stage_index] = command.unit
            cost = COMMAND_FLOPS + (command.meta.flops if command.meta else 0.0)
            nodes.append(
                CommandNode(
                    stage_index=command.stage_index,
                    inputs=tuple(read),
                    outputs=command.outputs,
                    links=links,
                    cost=cost,
                    weight_cost=cost if command.is_trained() else 0.0,
                    epoch=command.epoch,
                    touches=command.touches,
                    unit=units.get(command.stage_index, 0),
                    backwards=reached[command.index],
                )
            )
        sizes = {value.index: value.meta.num_bytes for value in self.values}
        return build_graph(
            nodes,
            roots=self.roots(),
            needed=self.needed,
            value_bytes=sizes,
            may_grow=self._may_grow(),
        )

    def _reached(self) -> list[int]:
        """Of each command the bits of the backwards that reach it, where there are several.

        What runs before the recording ends is taken to be the next backward's, which nobody knows by then; so
        is all, if some has, where views of one tensor change together, which only one segment can do. A
        command that no backward reaches goes with the one before it on its stage.
        """
        following = [0] * len(self.commands)
        if self._may_grow():
            ends = [backward.num_commands for backward in self.backwards]
            following = [1 << bisect_right(ends, command.index) for command in self.commands]
        if not self.complete or not (self._keeps_apart() or self.epoch):
            return following
        if any(command.changes_views for command in self.commands):
            return following
        reached = [0] * len(self.commands)
        wanted: dict[int, int] = {}
        for bit, backward in enumerate(self.backwards):
            for value in backward.values:
                wanted[value] = wanted.get(value, 0) | 1 << bit
        for command in reversed(self.commands):
            for output, inputs in zip(command.outputs, self.links[command.index], strict=True):
                bits = wanted.get(output, 0)
                reached[command.index] |= bits
                for value in inputs if bits else ():
                    wanted[value] = wanted.get(value, 0) | bits
        latest: dict[int, int] = {}
        for command, otherwise in zip(self.commands, following, strict=True):
            if command.epoch != self.epoch:
                reached[command.index] = otherwise
            elif reached[command.index]:
                latest[command.stage_index] = reached[command.index]
            else:
                reached[command.index] = latest.get(command.stage_index, otherwise)
        return reached

    def _keeps_apart(self) -> bool:
        return self.complete and len(self.backwards) > 1

    def _may_grow(self) -> bool:
        """Whether commands will follow, or did after some had run."""
        return not self.complete or self.epoch > 0

    def plan_key(self) -> tuple[int, ...]:
        """Recordings with equal keys have equal graphs."""
        # What is needed and what has a backward only grows.
        of = (self.structure_digest, len(self.needed), len(self.backwards), self.complete, self.epoch)
        if self._key is not None and self._key[0] == of:
            return self._key[1]
        apart = [backward.values for backward in self.backwards] if self._keeps_apart() else self.roots()
        ends = [backward.num_commands for backward in self.backwards] if self._may_grow() else []
        key = (
            self.structure_digest,
            hash((tuple(apart), self._keeps_apart() and self.epoch, self._may_grow(), tuple(ends))),
            hash(tuple(sorted(self.needed))),
        )
        self._key = of, key
        return key


COMMAND_FLOPS = 1e5
"""What running any command costs beside its flops, so that empty modules cost something."""


def describe_command(command: Command, recording: Recording) -> str:
    """One line for error messages: ``decoder.3 on stage 1 of float32[2, 8, 16]``."""
    parts = []
    for tensor, source in zip(command.arguments.tensors, command.sources, strict=True):
        meta = recording.values[source].meta if source >= 0 else TensorMeta.of(tensor)
        parts.append(f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}")
    return f"{command.label} on stage {command.stage_index} of ({', '.join(parts)})"
