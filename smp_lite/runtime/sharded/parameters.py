"""Parameters that lie in pieces over an axis, and are whole while an action needs them.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (stage 3).
Each rank holds an equal piece of every parameter's elements (``ParameterLayout.flat``), and its optimizer
steps that. Before an action the ranks gather the parameters that it uses, unit by unit; since the list of
actions is known, those of the next action are started before this one runs, and what it does not need is let
go. No hooks, no guessing.

The object of a parameter stays the same. What autograd keeps for the backward refers to the memory that the
whole parameter had in the forward, so that memory is given back by emptying its storage, and filled again
before the backward (as FSDP does it). In between the parameter reads as NaN in its whole shape: code that
reaches for it in an unknown way makes no plausible number. Outside of a list of actions it is its piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ...comm.axis import Axis, Started
from ...comm.layout import sum_of_bits
from ...errors import SMPError
from ...nn.guarding import PieceParameter
from ...nn.layout import ParameterLayout, layout_of, part_of, set_layout

__all__ = ["ShardGroup", "ShardedParameters"]


class ShardGroup:
    """Parameters of one unit and one dtype, which travel together.

    Args:
        names: of the parameters, for errors.
        parameters: whole ones, the same on all ranks of the axis; they become their pieces.
        axis: that they lie over.

    Attributes:
        parameters: as given.
        bounds: (start, end) of each of them in ``mine``.
        mine: this rank's pieces, one after another.
        num_bytes: of the whole parameters, padding included.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], axis: Axis) -> None:
        self.names, self.parameters, self.axis = list(names), list(parameters), axis
        self.bounds: list[tuple[int, int]] = []
        pieces, start = [], 0
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                layout = layout_of(parameter) or _replicated(parameter)
                whole = ParameterLayout(tuple(parameter.shape), ((),) * parameter.dim(), flat=axis)
                pieces.append(part_of(parameter, whole))
                self.bounds.append((start, start + len(pieces[-1])))
                start += len(pieces[-1])
                parameter.data = pieces[-1]
                set_layout(parameter, _over(layout, axis))
            self.mine = torch.cat(pieces)
            self._rows = self.mine.new_empty((axis.size, 0))
            self._wholes = [self.mine.new_empty(axis.size * (b - a)) for a, b in self.bounds]
            for whole in self._wholes:
                whole.untyped_storage().resize_(0)
            nan = self.mine.new_full((), math.nan)
            self._absent = [nan.expand(shape) for shape in self._shapes]
        self.num_bytes = start * axis.size * self.mine.element_size()
        self._show_pieces()
        self._pending: Started | None = None
        self._versions: list[int] = []
        self._digests: list[tuple[int, int]] = []
        self.is_here = False

    @property
    def is_coming(self) -> bool:
        """Whether its gathering is under way."""
        return self._pending is not None

    def _piece(self, number: int) -> torch.Tensor:
        start, end = self.bounds[number]
        return self.mine[start:end]

    def _show_pieces(self) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.data = self._piece(number)
            if type(parameter) is nn.Parameter:
                parameter.__class__ = PieceParameter

    def hide(self) -> None:
        """A list of actions begins: the parameters are absent until they are gathered."""
        for number, parameter in enumerate(self.parameters):
            if type(parameter) is PieceParameter:
                parameter.__class__ = nn.Parameter
            piece = self._piece(number)
            if parameter.data.data_ptr() != piece.data_ptr() or parameter.shape != piece.shape:
                # Somebody has given it other data (parameter.data = ...).
                if parameter.shape != piece.shape or parameter.dtype != piece.dtype:
                    raise SMPError(
                        f"the parameter {self.names[number]!r} was given data of shape "
                        f"{list(parameter.shape)} and {parameter.dtype}, but this rank holds a piece of it "
                        f"of shape {list(piece.shape)} and {piece.dtype}: change it in place"
                    )
                piece.copy_(parameter.data)
            parameter.data = self._absent[number]

    def show(self) -> None:
        """The list has ended: each parameter is its piece again."""
        self._pending = None
        self.let_go()
        self._show_pieces()

    def start(self) -> None:
        """Begins to gather."""
        self._rows = self.mine.new_empty((self.axis.size, len(self.mine)))
        self._pending = self.axis.start_all_gather(self.mine, self._rows)

    def arrive(self) -> Iterator[str]:
        """Yields what it waits for until the parameters are whole."""
        assert self._pending is not None
        while not self._pending.done():
            yield self._pending.waits_for()
        self._pending = None
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                start, end = self.bounds[number]
                whole, shape = self._wholes[number], self._shapes[number]
                whole.untyped_storage().resize_(whole.numel() * whole.element_size())
                whole.view(self.axis.size, end - start).copy_(self._rows[:, start:end])
                parameter.data = whole[: math.prod(shape)].view(shape)
        self._rows = self._rows.new_empty((self.axis.size, 0))
        self._versions = [parameter._version for parameter in self.parameters]
        self._digests = [_digest(whole) for whole in self._wholes]
        self.is_here = True

    def check_unchanged(self) -> None:
        """Raises SMPError if an action has changed one of the parameters: the change would be lost."""
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            whole = self._wholes[number]
            if (
                parameter._version != self._versions[number]
                or parameter.data_ptr() != whole.data_ptr()
                or tuple(parameter.shape) != self._shapes[number]
                or _digest(whole) != self._digests[number]
            ):
                raise SMPError(
                    f"the parameter {name!r} was changed in place inside an smp.step, where it is a copy "
                    "gathered from the ranks that it is sharded over, so the change would be lost: change "
                    "it when the step has returned"
                )

    def let_go(self) -> None:
        """Frees the whole parameters."""
        self.is_here = False
        for number, parameter in enumerate(self.parameters):
            parameter.data = self._absent[number]
            self._wholes[number].untyped_storage().resize_(0)

    def memory(self) -> set[int]:
        """The storages of the whole parameters."""
        return {whole.untyped_storage()._cdata for whole in self._wholes}


class ShardedParameters:
    """The sharded parameters of one stage.

    Args:
        groups: of them.
    """

    def __init__(self, groups: Sequence[ShardGroup]) -> None:
        self.groups = list(groups)
        self.most_bytes = 0
        """Most bytes of whole parameters at a time, in the last list of actions."""
        self._group_of = {id(p): number for number, group in enumerate(groups) for p in group.parameters}
        self._memory = {storage for group in groups for storage in group.memory()}
        self._uses: Sequence[Sequence[int]] = ()
        self._position = 0
        self._is_open = False

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is sharded."""
        return id(parameter) in self._group_of

    def groups_of(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Numbers of the groups that hold any of them, ascending."""
        found = {self._group_of[id(p)] for p in parameters if id(p) in self._group_of}
        return tuple(sorted(found))

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a whole parameter's memory, which does not outlive its action."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._memory

    def begin(self, uses: Sequence[Sequence[int]]) -> None:
        """A list of actions begins.

        Args:
            uses: for each of its forwards and backwards the groups that it needs; the same on all ranks of
                the axis.
        """
        self._uses, self._position, self.most_bytes = uses, 0, 0
        self._is_open = True
        for group in self.groups:
            group.hide()

    def bring(self) -> Iterator[str]:
        """Yields what it waits for until all that the next action needs is whole."""
        needed = self._uses[self._position]
        following = self._uses[self._position + 1 : self._position + 2]
        for number in (*needed, *(number for numbers in following for number in numbers)):
            group = self.groups[number]
            if not group.is_here and not group.is_coming:
                group.start()
        for number in needed:
            if not self.groups[number].is_here:
                yield from self.groups[number].arrive()
        here = sum(group.num_bytes for group in self.groups if group.is_here)
        self.most_bytes = max(self.most_bytes, here)

    def leave(self) -> None:
        """The action has ended."""
        self._position += 1
        kept = self._uses[self._position] if self._position < len(self._uses) else ()
        for number, group in enumerate(self.groups):
            if group.is_here:
                group.check_unchanged()
                if number not in kept:
                    group.let_go()

    def end(self) -> None:
        """The list has ended, or is given up."""
        if self._is_open:
            self._is_open = False
            for group in self.groups:
                group.show()


def _digest(whole: torch.Tensor) -> tuple[int, int]:
    """Of all its bits; autograd hears nothing of changes through ``parameter.data``."""
    return sum_of_bits(whole), sum_of_bits(whole[: len(whole) // 2])


def _replicated(parameter: torch.Tensor) -> ParameterLayout:
    return ParameterLayout(tuple(parameter.shape), ((),) * parameter.dim())


def _over(layout: ParameterLayout, axis: Axis) -> ParameterLayout:
    return ParameterLayout(
        layout.shape, layout.dims, layout.partial_over, layout.sections, layout.padded, axis
    )
