"""Parameters that an optimizer steps in the place of the model's.

One mechanism for two features. In half precision the optimizer steps *masters*: float32 copies, in which
small updates are not lost (Micikevicius et al. 2018, "Mixed Precision Training"). With sharded optimizer
state it steps this rank's *piece* of each parameter, so that its state takes one part in as many as there are
replicas (ZeRO stage 1, Rajbhandari et al. 2020). With both, masters of pieces. Before the optimizer's step
gradients are put on the stand-ins, after it their values go back to the parameters, brought together over the
replicas.

A script goes on seeing the model's own parameters in the optimizer's groups, and their state under them: the
stand-ins are in the groups only while the optimizer itself runs (:mod:`.groups`). A stand-in lies as its
parameter does, so whoever puts state together reads its layout (:mod:`smp_lite.nn.layout`).

What the model's parameters say counts: where one is no longer what its stand-in was rounded to, somebody has
changed it (a state dict was loaded, weights were averaged), and the stand-in is set anew from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ...comm.groups.axis import Axis
from ...comm.layout import shaped_like
from ...errors import SMPError
from ...nn.guarding import plain, unguarded
from ...nn.layout import ParameterLayout, layout_of, set_layout, whole_of

__all__ = ["HALF_TYPES", "StandIns"]

HALF_TYPES = (torch.float16, torch.bfloat16)
_GATHERED_AT_ONCE = 1 << 24  # elements


@dataclasses.dataclass
class _Pair:
    parameter: torch.Tensor
    stand_in: nn.Parameter
    shares_memory: bool
    is_cut: bool


class StandIns:
    """Of one optimizer on one rank, after partition.

    Args:
        groups: for each group of the optimizer the parameters that live here.
        own: ids of the model's; others are on every rank, and are never cut.
        half: the session's type of parameters; None: they have their own.
        axis: the ranks over which each parameter is cut; None: none.

    Raises:
        TypeError: half precision, and a parameter that trains is of a type without masters.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        own: frozenset[int],
        half: torch.dtype | None,
        axis: Axis | None,
    ) -> None:
        self.half, self.axis = half, axis
        self._pairs: list[_Pair] = []
        self._given = [parameter for group in groups for parameter in group]
        for group in groups:
            self._pairs += self._of_group([p for p in group if p.requires_grad], own)
        self._by_parameter = {id(pair.parameter): pair for pair in self._pairs}
        self._by_stand_in = {id(pair.stand_in): pair for pair in self._pairs}

    def _of_group(self, members: Sequence[torch.Tensor], own: frozenset[int]) -> Iterator[_Pair]:
        for parameter in members:
            if self.half is not None and parameter.dtype not in (*HALF_TYPES, torch.float32):
                name = "fp16" if self.half is torch.float16 else "bf16"
                raise TypeError(
                    f"{name}: a parameter of shape {list(parameter.shape)} that the optimizer has is "
                    f"{parameter.dtype}; masters are made of float16 and bfloat16 parameters, and float32 "
                    "ones are stepped themselves: convert it, or leave it out"
                )
        with torch.no_grad(), unguarded():
            values = [self._cut(plain(p)) if self._is_cut(p, own) else plain(p) for p in members]
            kinds = [torch.float32 if self.half is not None else value.dtype for value in values]
            copied = [
                self._is_cut(parameter, own) or value.dtype != kind
                for parameter, value, kind in zip(members, values, kinds, strict=True)
            ]
            # One flat buffer for a group and type.
            sizes = Counter[torch.dtype]()
            for value, kind, is_copy in zip(values, kinds, copied, strict=True):
                sizes[kind] += value.numel() if is_copy else 0
            flat = {
                kind: torch.empty(size, dtype=kind, device=values[kinds.index(kind)].device)
                for kind, size in sizes.items()
            }
            used = Counter[torch.dtype]()
            for parameter, value, kind, is_copy in zip(members, values, kinds, copied, strict=True):
                if is_copy:
                    start = used[kind]
                    used[kind] += value.numel()
                    value = shaped_like(flat[kind][start : used[kind]], value).copy_(value)
                stand_in = nn.Parameter(value)
                notes = {k: v for k, v in vars(parameter).items() if not k.startswith("smp_")}
                vars(stand_in).update(notes)  # what optimizers ask of a parameter (an axis, a decay)
                if (layout := self._layout(parameter, own)) is not None:
                    set_layout(stand_in, layout)
                yield _Pair(parameter, stand_in, not is_copy, self._is_cut(parameter, own))

    def _is_cut(self, parameter: torch.Tensor, own: frozenset[int]) -> bool:
        # One number is whole on every rank: its state could not be told from a count of steps.
        return self.axis is not None and id(parameter) in own and parameter.dim() > 0

    def _layout(self, parameter: torch.Tensor, own: frozenset[int]) -> ParameterLayout | None:
        layout = layout_of(parameter)
        if not self._is_cut(parameter, own):
            return layout
        if layout is None:
            layout = ParameterLayout(tuple(parameter.shape), ((),) * parameter.dim())
        return dataclasses.replace(layout, flat=self.axis)

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of its elements; zeros at the end of the last."""
        assert self.axis is not None
        row = tensor.reshape(-1)
        length = -(-row.numel() // self.axis.size)
        piece = row[self.axis.index * length : (self.axis.index + 1) * length]
        return torch.cat([piece, piece.new_zeros(length - len(piece))]) if len(piece) < length else piece

    # Which stands for which ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[torch.Tensor, nn.Parameter]]:
        """The model's parameters with their stand-ins."""
        return ((pair.parameter, pair.stand_in) for pair in self._pairs)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The stand-in of a parameter; itself, if it has none (frozen ones, those of other stages)."""
        pair = self._by_parameter.get(id(parameter))
        return parameter if pair is None else pair.stand_in

    def parameter_of(self, stand_in: torch.Tensor) -> torch.Tensor:
        """The parameter that it stands for; itself, if it is no stand-in."""
        pair = self._by_stand_in.get(id(stand_in))
        return stand_in if pair is None else pair.parameter

    def cuts(self, parameter: torch.Tensor) -> bool:
        """Whether its stand-in is a piece."""
        return self._by_parameter[id(parameter)].is_cut

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the stand-ins."""
        return id(tensor) in self._by_stand_in

    def knew(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer had it when stand-ins were made, if only frozen."""
        return any(each is parameter for each in self._given)

    def masters(self) -> Iterator[tuple[torch.Tensor, nn.Parameter]]:
        """Those that say more than their parameters, with these."""
        return (
            (pair.parameter, pair.stand_in)
            for pair in self._pairs
            if pair.parameter.dtype != pair.stand_in.dtype
        )

    # Gradients ----------------------------------------------------------------------------------------------

    def are_finite(self) -> bool:
        """Whether all gradients here are."""
        with unguarded():
            found = [_strided(p.grad) for p, _ in self if p.grad is not None]
            return all(bool(torch.isfinite(gradient).all()) for gradient in found)

    def bring_gradients(self, scale: float) -> None:
        """Each stand-in gets its parameter's gradient, in its own type and divided by the loss scale."""
        with torch.no_grad(), unguarded():
            for pair in self._pairs:
                gradient = pair.parameter.grad
                if gradient is None:
                    pair.stand_in.grad = None
                    continue
                own = _strided(gradient)
                own = self._cut(own) if pair.is_cut else own
                own = own.to(pair.stand_in.dtype)
                if self.half is not None and pair.shares_memory and scale == 1.0:
                    own = own.clone()  # clip_master_grads clips copies, of float32 parameters too
                pair.stand_in.grad = own if scale == 1.0 else own / scale

    def whole_gradient(self, stand_in: torch.Tensor) -> torch.Tensor | None:
        """A stand-in's gradient in the shape of its parameter; collective where it is cut."""
        pair = self._by_stand_in[id(stand_in)]
        if stand_in.grad is None or not pair.is_cut:
            return stand_in.grad
        shape = tuple(pair.parameter.shape)
        return whole_of(stand_in.grad, ParameterLayout(shape, ((),) * len(shape), flat=self.axis))

    def drop_gradients(self) -> None:
        """They are made anew from those of the parameters."""
        for pair in self._pairs:
            pair.stand_in.grad = None

    # Values -------------------------------------------------------------------------------------------------

    def follow(self, *, exactly: bool = False) -> bool:
        """Sets stand-ins anew whose parameters have been changed; whether there were any.

        Element by element: what a script has not changed keeps what its master says more, however the
        parameter is cut.

        Args:
            exactly: all of them, also where a parameter is what its master rounds to.
        """
        changed = False
        with torch.no_grad(), unguarded():
            for pair in self._pairs:
                if pair.shares_memory:
                    continue
                value = self._value(pair)
                if exactly:
                    pair.stand_in.detach().copy_(value)
                    changed = True
                elif _is_other(pair.stand_in, value):
                    pair.stand_in.detach().copy_(_followed(pair.stand_in, value))
                    changed = True
        return changed

    def are_followed(self) -> bool:
        """Whether no parameter has been changed; sets nothing."""
        with torch.no_grad(), unguarded():
            pairs = (pair for pair in self._pairs if not pair.shares_memory)
            return not any(_is_other(pair.stand_in, self._value(pair)) for pair in pairs)

    def value_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """What its stand-in would be after :meth:`follow`, without setting it: whoever saves a model whose
        weights are others for a while (averages) takes nothing from the masters."""
        pair = self._by_parameter[id(parameter)]
        with torch.no_grad(), unguarded():
            value = self._value(pair)
            if not pair.shares_memory and _is_other(pair.stand_in, value):
                return _followed(pair.stand_in, value)
        return pair.stand_in.detach()

    def _value(self, pair: _Pair) -> torch.Tensor:
        value = plain(pair.parameter)
        return self._cut(value) if pair.is_cut else value

    def give_back(self) -> None:
        """The parameters get the values of their stand-ins; collective over the axis."""
        with torch.no_grad(), unguarded():
            for pair in self._pairs:
                if not pair.is_cut and not pair.shares_memory:
                    plain(pair.parameter).copy_(pair.stand_in.detach())
            for pairs in _portions([pair for pair in self._pairs if pair.is_cut]):
                self._gather(pairs)

    def _gather(self, pairs: Sequence[_Pair]) -> None:
        assert self.axis is not None
        mine = torch.cat([pair.stand_in.detach().to(pair.parameter.dtype) for pair in pairs])
        rows = self.axis.all_gather(mine).view(self.axis.size, -1)
        start = 0
        for pair in pairs:
            end = start + pair.stand_in.numel()
            whole = rows[:, start:end].reshape(-1)[: math.prod(pair.parameter.shape)]
            plain(pair.parameter).copy_(whole.view(pair.parameter.shape))
            start = end


def _strided(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as an ordinary tensor; raises SMPError if it is sparse."""
    if gradient.layout is not torch.strided:
        raise SMPError(
            f"the gradient of a parameter of shape {list(gradient.shape)} is sparse, and can be neither cut "
            "nor unscaled for fp16, bf16 or sharded optimizer state: build the embedding with sparse=False"
        )
    return plain(gradient)


def _is_other(stand_in: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a parameter's value is not what its stand-in rounds to."""
    return not torch.equal(stand_in.detach().to(value.dtype), value)


def _followed(stand_in: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The stand-in with those elements of the parameter that have been changed."""
    own = stand_in.detach()
    return torch.where(own.to(value.dtype) == value, own, value.to(own.dtype))


def _portions(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Those of one type, a limited number of elements at a time; the same on all ranks."""
    by_type: dict[torch.dtype, list[_Pair]] = {}
    for pair in pairs:
        by_type.setdefault(pair.parameter.dtype, []).append(pair)
    for members in by_type.values():
        portion: list[_Pair] = []
        size = 0
        for pair in members:
            portion.append(pair)
            size += pair.parameter.numel()
            if size >= _GATHERED_AT_ONCE:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion
