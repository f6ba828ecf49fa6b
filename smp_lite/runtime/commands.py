"""Runs recorded commands on real tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import SMPError
from ..plan.segments import Segment
from ..record.ambient import Ambient
from ..record.calls import NewTensor
from ..record.placement import Placement
from ..record.recording import Command, Recording
from ..record.structure import LEAF, flatten
from .random_streams import RandomStreams


class CommandRunner:
    """Executes the commands of one segment after another."""

    def __init__(self, placement: Placement, streams: RandomStreams) -> None:
        self.placement = placement
        self.streams = streams
        # Command -> (tensors given, result, whether it drew), for a command that is still to be described.
        self.undescribed: dict[int, tuple[list[torch.Tensor], Any, bool]] = {}

    def run_segment(self, recording: Recording, segment: Segment, local: dict[int, torch.Tensor]) -> None:
        """Runs the segment's commands; ``local`` maps its imports, and then all its values, to tensors."""
        ambient = Ambient.current()
        cut = frozenset(segment.imports)
        wanted = frozenset((*segment.exports, *segment.roots))
        for index in segment.commands:
            command = recording.commands[index]
            if command.ambient == ambient:
                self._run(recording, command, local, cut, wanted)
            else:
                with command.ambient.entered():
                    self._run(recording, command, local, cut, wanted)

    def _run(
        self,
        recording: Recording,
        command: Command,
        local: dict[int, torch.Tensor],
        cut: frozenset[int],
        wanted: frozenset[int],
    ) -> None:
        if command.parameter is not None:
            local[command.outputs[0]] = self.placement.parameter(command.parameter)
            return
        changed = self._before_changes(recording, command, local, cut, wanted) if command.changes else {}
        tensors = [
            tensor if source < 0 else changed.get(source, local[source])
            for tensor, source in zip(command.arguments.tensors, command.sources, strict=True)
        ]
        if command.meta is None:
            # Copies: whether the call changes its arguments in place is not known yet.
            tensors = [t.clone() if s >= 0 else t for t, s in zip(tensors, command.sources)]
        args, kwargs = command.arguments.build(tensors)
        if command.meta is None or command.meta.draws:
            self.streams.seed(recording.microbatch_index, command.index)
        call = command.module if command.module is not None else command.function
        assert call is not None
        if command.meta is None:
            before = torch.default_generator.get_state()
            result = call(*args, **kwargs)
            drew = not torch.equal(before, torch.default_generator.get_state())
            self.undescribed[command.index] = (tensors, result, drew)
            return
        result = call(*args, **kwargs)
        self._store(command, result, local)
        for old, new in command.changes:
            local[new] = changed[old]

    def _before_changes(
        self,
        recording: Recording,
        command: Command,
        local: dict[int, torch.Tensor],
        cut: frozenset[int],
        wanted: frozenset[int],
    ) -> dict[int, torch.Tensor]:
        """For each value that changes in place, the tensor to change.

        A cut value is copied first: its memory belongs to whoever made it. A value that others still
        want as it was is copied for them; the original changes, together with the views of it.
        """
        changed: dict[int, torch.Tensor] = {}
        for old, _ in command.changes:
            tensor = local[old]
            if old in cut:
                if len(command.changes) > 1:
                    raise SMPError(
                        f"{command.label} changes a tensor in place of which a view was made on another "
                        "stage, or before a value was fetched: clone() the tensor before changing it"
                    )
                changed[old] = tensor.clone()
                continue
            changed[old] = tensor
            if old in wanted or not recording.complete:
                local[old] = tensor.clone()
        return changed

    @staticmethod
    def _store(command: Command, result: Any, local: dict[int, torch.Tensor]) -> None:
        """Puts the result's new tensors under their values."""
        meta = command.meta
        assert meta is not None
        if meta.spec is LEAF:
            if type(meta.leaves[0]) is NewTensor:
                local[command.outputs[0]] = _checked(command, result, meta.leaves[0])
            return
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        if spec != meta.spec:
            raise _changed(command, "another structure")
        outputs = iter(command.outputs)
        for leaf, described in zip(leaves, meta.leaves, strict=True):
            if type(described) is NewTensor:
                local[next(outputs)] = _checked(command, leaf, described)

    def adopt(self, command: Command, local: dict[int, torch.Tensor]) -> None:
        """Stores the result of a command that was described only after it had run."""
        tensors, result, _ = self.undescribed.pop(command.index)
        self._store(command, result, local)
        for old, new in command.changes:
            position = command.sources.index(old)
            local[new] = tensors[position]


def _checked(command: Command, tensor: Any, described: NewTensor) -> torch.Tensor:
    """The tensor, if it is as it was recorded."""
    meta = described.meta
    if not isinstance(tensor, torch.Tensor):
        raise _changed(command, f"a {type(tensor).__name__}")
    if tensor.shape != meta.shape or tensor.dtype is not meta.dtype:
        raise _changed(
            command,
            f"{tensor.dtype}{list(tensor.shape)} instead of {meta.dtype}{list(meta.shape)}",
        )
    return tensor


def _changed(command: Command, what: str) -> SMPError:
    return SMPError(
        f"{command.label} returned {what}, other than it was recorded with: the form of its result must not "
        "depend on anything but its inputs and attributes"
    )
