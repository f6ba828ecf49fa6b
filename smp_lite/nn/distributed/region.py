"""How activations lie between the ranks inside a distributed block, and how they get in and out.

Outside a block each tensor-parallel rank has whole features, ``(B, S, H)``: of a batch of its own, or with
``prescaled_batch`` of one that all share. Inside, all ranks work on one batch of N rows, which is T * B
where each brings its own. With ``optimize: "memory"`` a rank has ``(N, S, H / T)``, its part of the
features; with ``"speed"`` all have ``(N, S, H)``. (SMP developer guide, "tensor parallelism": prescaled
batch, optimize.)

Ranks with batches of their own must be in the same layer, with inputs of one shape, or their rows would be
mixed up: a model whose forward looks at its data may send them to different ones. So they meet before each
block (:meth:`Region.meet`), which is one small message to each, on hosts.

Gradients: inside, every rank's gradient of what all ranks hold alike is the whole one. Where ranks bring
their own batches the losses' gradients meet here, as a sum over the batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ... import session as session_module
from ...comm.groups.axis import Axis
from ...devices import CPU
from ...errors import SMPMismatch
from ..one_d.operations import copy_to_ranks, gather_along, split_along
from ..one_d.parts import nearest_sizes
from ..transforms import refuse_transforms

__all__ = ["CannotShare", "Region", "all_to_all"]

_MOST_DIMENSIONS = 8


class CannotShare(ValueError):
    """The tensor-parallel ranks cannot share a size equally."""


@dataclass(frozen=True)
class Region:
    """The inside of distributed blocks.

    Attributes:
        axis: the tensor-parallel ranks.
        own_batches: whether each rank brings a batch of its own.
        splits_features: whether a rank inside has its part of the features; else all have them whole.
    """

    axis: Axis
    own_batches: bool
    splits_features: bool

    @classmethod
    def of_session(cls) -> Region:
        """What the job's parameters say.

        Raises:
            SMPError: ``smp.init()`` was not called.
        """
        session = session_module.current()
        axis, memory = session.axis("tp"), session.cfg.optimize == "memory"
        return cls(axis, session.has_own_batches and axis.size > 1, memory and axis.size > 1)

    @property
    def num_batches(self) -> int:
        """Of different batches that meet inside."""
        return self.axis.size if self.own_batches else 1

    def check_shares(self, what: str, size: int) -> None:
        """
        Raises:
            CannotShare: ``size`` is no multiple of the number of ranks.
        """
        if size % self.axis.size:
            raise CannotShare(
                f"{what}={size}: the {self.axis.size} tensor-parallel ranks cannot share it equally; the "
                f"nearest that they can: {nearest_sizes(size, self.axis.size)}"
            )

    def meet(self, where: str, x: torch.Tensor) -> None:
        """Collective: all ranks bring their own batches to the same layer now.

        Args:
            where: the layer's name.
            x: its input, ``(B, ...)``.

        Raises:
            SMPMismatch: another rank is in another layer, or has an input of another shape or dtype.
        """
        if not self.own_batches or isinstance(x, FakeTensor) or x.device.type == "meta":
            return
        refuse_transforms(x)
        mine = [crc32(where.encode()), crc32(str(x.dtype).encode()), x.dim(), *x.shape[:_MOST_DIMENSIONS]]
        mine += [0] * (3 + _MOST_DIMENSIONS - len(mine))
        every = self.axis.all_gather(torch.tensor([mine], device=CPU)).tolist()
        other = next((i for i, theirs in enumerate(every) if theirs != mine), None)
        if other is None:
            return
        layer, dtype, dims, *shape = every[other]
        there = "there" if layer == mine[0] else "in another split layer"
        other_dtype = "" if dtype == mine[1] else " and another dtype"
        ranks = self.axis.ranks
        raise SMPMismatch(
            f"rank {ranks[self.axis.index]} is in {where} with an input of shape {list(x.shape)}, and rank "
            f"{ranks[other]} is {there} with one of shape {shape[:dims]}{other_dtype}: tensor-parallel ranks "
            "that bring batches of their own must run the same layers on inputs of one shape, so the model's "
            "forward may not branch by their data, or leave out rows. Pad the batches to one shape, or set "
            '"prescaled_batch": True and give all of them the same batch'
        )

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, ..., H)`` outside to what it is inside."""
        if self.own_batches:
            if self.splits_features:
                return all_to_all(x, self.axis, -1, 0)
            return gather_along(x, self.axis, 0, gradients="same")
        return split_along(x, self.axis, -1) if self.splits_features else x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`enter`."""
        if self.own_batches:
            if self.splits_features:
                return all_to_all(x, self.axis, 0, -1)
            return split_along(x, self.axis, 0)
        return gather_along(x, self.axis, -1, gradients="same") if self.splits_features else x

    def enter_bias(
        self, bias: torch.Tensor | None, like: torch.Tensor, batch_size: int
    ) -> torch.Tensor | None:
        """What is added to scores, of a shape that broadcasts to ``(B, heads, S, S)``, for the rows inside.

        Each rank's gradient of it is a summand, of its own heads. With batches of their own, ranks may have
        one or none (a batch without padding needs none), of other shapes, learned or not: they agree first,
        so that all go on alike.

        Args:
            like: gives dtype and device.
            batch_size: B, since a bias may have one row for all.
        """
        learned = bias is not None and bias.requires_grad and torch.is_grad_enabled()
        if not self.own_batches:
            return copy_to_ranks(bias, self.axis) if bias is not None and learned else bias
        agreed = [0, 0, 0, 0] if bias is None else [*bias.shape[1:], int(learned)]
        if not isinstance(like, FakeTensor) and like.device.type != "meta":
            every = self.axis.all_gather(torch.tensor([agreed], device=like.device), 0)
            agreed = every.amax(0).tolist()
        *shape, any_learned = agreed
        if not any(shape):
            return None
        mine = like.new_zeros(1, 1, 1, 1) if bias is None else bias
        if not any_learned:
            return self.axis.all_gather(mine.detach().expand(batch_size, *shape), 0)
        if not learned:
            mine = mine.detach().requires_grad_()  # its backward meets the others'
        return gather_along(mine.expand(batch_size, *shape), self.axis, 0, gradients="summand")

    def of_all_batches(self, whole: torch.Tensor) -> torch.Tensor:
        """A parameter that all ranks hold whole and use inside on the same rows.

        Each rank's gradient of it is of all batches, and will be averaged with the others' as if it were of
        one: so it is divided by their number.
        """
        return _Divided.apply(whole, self.num_batches) if self.num_batches > 1 else whole


def all_to_all(x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
    """Gives rank i the i-th part along one dimension, and joins what came along another; its backward
    is the reverse.

    Raises:
        ValueError: the size of ``split_dim`` is no multiple of the number of ranks.
    """
    if axis.size == 1:
        return x
    refuse_transforms(x)
    found: torch.Tensor = _AllToAll.apply(x, axis, split_dim, join_dim)
    return found


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
        ctx.how = axis, join_dim, split_dim
        return axis.all_to_all(x, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _AllToAll.apply(grad, *ctx.how), None, None, None


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.divisor, None
