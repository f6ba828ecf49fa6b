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

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ...comm.groups.axis import Axis, Started
from ...comm.layout import bits_summed
from ...devices import is_host
from ...errors import SMPError
from ...nn.guarding import Piece, PieceParameter, plain, set_whole_shape
from ...nn.layout import ParameterLayout, layout_of, part_of, set_layout
from ...record.values.memory import place_of

__all__ = ["ShardGroup", "ShardedParameters", "over"]


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
        num_elements, num_bytes: of the whole parameters, padding included.
        pending: its gathering, while that is under way.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], axis: Axis) -> None:
        self.names, self.parameters, self.axis = list(names), list(parameters), axis
        self.bounds: list[tuple[int, int]] = []
        pieces, start = [], 0
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        # None: pieces in turn are its memory. Others (channels last) lie as they did.
        self._strides = [_own_strides(parameter) for parameter in parameters]
        self._given: dict[int, torch.Tensor] = {}  # what a script has put in the place of a piece
        with torch.no_grad():
            for parameter, stride in zip(parameters, self._strides, strict=True):
                layout = layout_of(parameter)
                whole = ParameterLayout(tuple(parameter.shape), ((),) * parameter.dim(), flat=axis)
                pieces.append(part_of(parameter, whole))
                self.bounds.append((start, start + len(pieces[-1])))
                start += len(pieces[-1])
                parameter.data = pieces[-1]
                set_layout(parameter, over(layout, whole.shape, axis, stride))
                set_whole_shape(parameter, whole.shape, stride)
            self.mine = torch.cat(pieces)
            self._rows = self.mine.new_empty((axis.size, 0))
            self._wholes = [
                self.mine.new_empty(axis.size * (b - a) if stride is None else _extent(shape, stride))
                for (a, b), shape, stride in zip(self.bounds, self._shapes, self._strides, strict=True)
            ]
            for whole in self._wholes:
                whole.untyped_storage().resize_(0)
            nan = self.mine.new_full((), math.nan)
            self._absent = [nan.expand(shape) for shape in self._shapes]
        self.num_elements = start * axis.size
        self.num_bytes = self.num_elements * self.mine.element_size()
        self._show_pieces()
        self.pending: Started | None = None
        self._sent = self.mine
        self._versions: list[int] = []
        self._digests: list[torch.Tensor] = []
        self.is_here = False

    @property
    def is_coming(self) -> bool:
        """Whether its gathering is under way."""
        return self.pending is not None

    def _piece(self, number: int) -> torch.Tensor:
        if number in self._given:
            return self._given[number]
        start, end = self.bounds[number]
        return self.mine[start:end]

    def _take(self, number: int) -> None:
        """A script may have given the parameter other data (``parameter.data = ...``), which the script may
        hold as well and change later, as it may go back to what was there before."""
        parameter = self.parameters[number]
        if (
            place_of(parameter) == place_of(self._piece(number))
            and parameter.shape == self._piece(number).shape
        ):
            return
        self._given.pop(number, None)
        piece = self._piece(number)
        if parameter.shape != piece.shape or parameter.dtype != piece.dtype:
            raise SMPError(
                f"the parameter {self.names[number]!r} was given data of shape {list(parameter.shape)} and "
                f"{parameter.dtype}, but this rank holds a piece of it of shape {list(piece.shape)} and "
                f"{piece.dtype}: change it in place"
            )
        if place_of(parameter) != place_of(piece):
            self._given[number] = plain(parameter).to(piece.device)
        if (named := getattr(parameter, "ds_tensor", None)) is not None:
            named.data = self._piece(number)

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
            self._take(number)
            parameter.data = self._absent[number]

    def show(self) -> None:
        """The list has ended: each parameter is its piece again."""
        self.pending = None
        self.let_go()
        self._show_pieces()

    def start(self) -> None:
        """Begins to gather."""
        self._rows = self.mine.new_empty((self.axis.size, len(self.mine)))
        self._sent = self.mine
        if self._given:
            self._sent = torch.cat([self._piece(number).detach() for number in range(len(self.parameters))])
        self.pending = self.axis.start_all_gather(self._sent, self._rows)

    def arrive(self) -> Iterator[str]:
        """Yields what it waits for until the parameters are whole."""
        assert self.pending is not None
        while not self.pending.done():
            yield self.pending.waits_for()
        self.pending, self._sent = None, self.mine
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                start, end = self.bounds[number]
                whole, shape, stride = self._wholes[number], self._shapes[number], self._strides[number]
                whole.untyped_storage().resize_(whole.numel() * whole.element_size())
                pieces = self._rows[:, start:end]
                if stride is None:
                    whole.view(self.axis.size, end - start).copy_(pieces)
                    parameter.data = whole[: math.prod(shape)].view(shape)
                else:
                    row = pieces.reshape(-1)[: math.prod(shape)]
                    parameter.data = whole.as_strided(shape, stride).copy_(row.view(shape))
        self._rows = self._rows.new_empty((self.axis.size, 0))
        self._versions = [parameter._version for parameter in self.parameters]
        self._digests = [_digest(whole) for whole in self._wholes]
        self.is_here = True

    def changed(self) -> list[str]:
        """Names of the parameters that are other ones than those that were gathered."""
        return [
            name
            for number, name in enumerate(self.names)
            if self._is_another(number)
            or not torch.equal(_digest(self._wholes[number]), self._digests[number])
        ]

    def _is_another(self, number: int) -> bool:
        """Whether a parameter is seen to have changed without a look at its elements."""
        parameter = self.parameters[number]
        return (
            parameter._version != self._versions[number]
            or place_of(parameter) != place_of(self._wholes[number])
            or tuple(parameter.shape) != self._shapes[number]
        )

    def check_unchanged(self) -> torch.Tensor | None:
        """Raises SMPError if an action has changed one of the parameters: the change would be lost.

        Returns:
            On a device, for which the host does not wait here: for each parameter whether its elements are
            others, for :meth:`refuse`.
        """
        if is_host(self.mine.device):
            changed = self.changed()
            self.refuse([name in changed for name in self.names])
            return None
        self.refuse([self._is_another(number) for number in range(len(self.names))])
        digests = torch.stack([_digest(whole) for whole in self._wholes])
        return (digests != torch.stack(self._digests)).any(1)

    def refuse(self, changed: Sequence[bool]) -> None:
        """Raises SMPError if any of the parameters has changed."""
        for name, is_changed in zip(self.names, changed, strict=True):
            if is_changed:
                raise SMPError(
                    f"the parameter {name!r} was changed in place inside an smp.step, where it is a copy "
                    "gathered from the ranks that it is sharded over, so the change would be lost: change "
                    "it when the step has returned"
                )

    def take_back(self) -> list[str]:
        """This rank's pieces are those of the whole parameters as they are now; names of the changed ones.

        Raises:
            SMPError: one was given data of another shape or type.
        """
        changed = self.changed()
        for number, parameter in enumerate(self.parameters):
            piece, shape = self._piece(number), self._shapes[number]
            if self.names[number] not in changed:
                continue
            if tuple(parameter.shape) != shape or parameter.dtype != piece.dtype:
                raise SMPError(
                    f"the parameter {self.names[number]!r} was given data of shape {list(parameter.shape)} "
                    f"and {parameter.dtype}, and is one of {list(shape)} and {piece.dtype}"
                )
            own = ParameterLayout(shape, ((),) * len(shape), flat=self.axis)
            piece.copy_(part_of(parameter, own))
        return changed

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
        max_live_elements: nothing is gathered ahead beyond so many gathered elements; what an action needs
            is gathered all the same. None: there is no limit.
        tables: of the model's modules by name their own parameters, as they are at any time.
    """

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        max_live_elements: int | None = None,
        tables: Sequence[tuple[str, dict[str, nn.Parameter | None]]] = (),
    ) -> None:
        self.groups = list(groups)
        self._tables = list(tables)
        self.most_bytes = 0
        """Most bytes of whole parameters at a time, in the last list of actions."""
        self.most_live_elements = 0
        """Most elements that were gathered or under way at a time, in the last list of actions."""
        self._max_live_elements = math.inf if max_live_elements is None else max_live_elements
        self._group_of = {id(p): number for number, group in enumerate(groups) for p in group.parameters}
        self._memory = {storage for group in groups for storage in group.memory()}
        self._uses: Sequence[Sequence[int]] = ()
        self._position = 0
        self._is_open = False
        self._doubts: list[tuple[ShardGroup, torch.Tensor]] = []

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
        self._uses, self._position, self.most_bytes, self.most_live_elements = uses, 0, 0, 0
        self._refuse_strangers()
        self._is_open = True
        for group in self.groups:
            group.hide()

    def _refuse_strangers(self) -> None:
        """Raises SMPError where a script has put a piece into the model that nobody gathers."""
        for name, table in self._tables:
            for own, parameter in table.items():
                if type(parameter) in (Piece, PieceParameter) and not self.holds(parameter):  # type: ignore[arg-type]
                    full = f"{name}.{own}" if name else own
                    raise SMPError(
                        f"{full!r} is a new parameter that was made from a piece of a sharded one, and no "
                        "step would bring it together: set values in place (parameter.copy_, "
                        "load_state_dict), and tie or untie parameters before smp.DistributedModel"
                    )

    def bring(self) -> Iterator[str]:
        """Yields what it waits for until all that the next action needs is whole."""
        needed = self._uses[self._position]
        following = self._uses[self._position + 1 : self._position + 2]
        for number in (*needed, *(number for numbers in following for number in numbers)):
            group = self.groups[number]
            if group.is_here or group.is_coming:
                continue
            live = self._live_elements() + group.num_elements
            if number in needed or live <= self._max_live_elements:
                group.start()
                self.most_live_elements = max(self.most_live_elements, live)
        for number in needed:
            if not self.groups[number].is_here:
                yield from self.groups[number].arrive()
        here = sum(group.num_bytes for group in self.groups if group.is_here)
        self.most_bytes = max(self.most_bytes, here)

    def _live_elements(self) -> int:
        return sum(group.num_elements for group in self.groups if group.is_here or group.is_coming)

    def leave(self) -> None:
        """The action has ended."""
        self._position += 1
        kept = self._uses[self._position] if self._position < len(self._uses) else ()
        for number, group in enumerate(self.groups):
            if group.is_here:
                if (changed := group.check_unchanged()) is not None:
                    self._doubts.append((group, changed))
                if number not in kept:
                    group.let_go()
        if self._doubts and self._position == len(self._uses):
            self._settle()

    def _settle(self) -> None:
        """Once in a list the host waits for the device: whether all that it had was left as it was."""
        doubts, self._doubts = self._doubts, []
        if bool(torch.cat([changed for _, changed in doubts]).any()):
            for group, changed in doubts:
                group.refuse(changed.tolist())

    def end(self) -> None:
        """The list has ended, or is given up."""
        if self._is_open:
            self._is_open = False
            for group in self.groups:
                group.show()


def _own_strides(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Its strides; None: its elements are one after another, or some of them in one place."""
    if parameter.stride() == torch.empty(parameter.shape, device="meta").stride():
        return None
    reach = 0
    for step, length in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if length > 1:
            if step <= reach:
                return None
            reach += (length - 1) * step
    return parameter.stride()


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements of memory from the first to the last."""
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def _digest(whole: torch.Tensor) -> torch.Tensor:
    """Of all its bits; autograd hears nothing of changes through ``parameter.data``."""
    return torch.stack([bits_summed(whole), bits_summed(whole[: len(whole) // 2])])


def over(
    layout: ParameterLayout | None, shape: tuple[int, ...], axis: Axis, stride: tuple[int, ...] | None = None
) -> ParameterLayout:
    """How a parameter lies when a rank's part of it is cut into pieces.

    Args:
        layout: how it lies before; None: a rank has all of it.
        shape: of what a rank has.
        axis: of the pieces.
        stride: of that part, unless its elements are one after another.
    """
    if layout is None:
        layout = ParameterLayout(shape, ((),) * len(shape))
    return dataclasses.replace(layout, flat=axis, stride=stride)
