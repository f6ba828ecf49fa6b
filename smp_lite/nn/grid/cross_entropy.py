"""Cross entropy of logits whose classes lie over one axis and whose rows lie over others.

The logits are never gathered. For each row the ranks of the class axis exchange the largest logit, the sum of
exponentials and the target's logit (Shoeybi et al. 2019, "Megatron-LM", section 3); the sum over rows and
their number are added up over the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...comm.groups.axis import Axis
from ..autocast import cast_for_loss
from ..transforms import refuse_transforms
from .checks import check_ids, compute_dtype

__all__ = ["split_cross_entropy"]


def split_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    classes: Axis | None,
    rows: Sequence[Axis],
    num_classes: int,
    padding: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` over all rows of all ranks; the same scalar on each of them.

    Args:
        logits: ``(..., classes / ranks)``, this rank's rows and classes; 16-bit ones are summed up in
            32 bits.
        targets: ``(...)``, of this rank's rows, in 0 ... num_classes - 1 or ``ignore_index``.
        classes: the axis over which the classes lie; None: every rank has them all.
        rows: the axes over which the rows lie.
        num_classes: without padding. Logits of the padding never matter, and their gradient is zero.
        padding: there is less than this.
        ignore_index, label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        reduction: ``mean`` is over the rows of all ranks that are not ignored; of none it is nan, as torch's.

    Raises:
        ValueError: shapes that do not fit, or another option.
        IndexError: a target is no class.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: it is 'mean' or 'sum'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: it is in 0 ... 1")
    parts = classes.size if classes is not None else 1
    here = logits.shape[-1] if logits.dim() else 0
    if not 0 <= here * parts - num_classes < padding:
        raise ValueError(
            f"logits of shape {list(logits.shape)} on each of {parts} ranks are {here * parts} classes, not "
            f"{num_classes}: take this rank's part of them, as the layers give it"
        )
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {list(logits.shape)} are this rank's part and need targets of shape "
            f"{list(logits.shape[:-1])}, got {list(targets.shape)}: split the targets as the rows of the "
            "logits are, with the mesh's split_batch"
        )
    check_ids("targets", targets, num_classes, ignore_index)
    refuse_transforms(logits)
    logits = cast_for_loss(logits)
    loss: torch.Tensor = _CrossEntropy.apply(
        logits, targets, classes, tuple(rows), num_classes, ignore_index, label_smoothing, reduction == "mean"
    )
    return loss


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        classes: Axis | None,
        rows: tuple[Axis, ...],
        num_classes: int,
        ignore_index: int,
        smoothing: float,
        mean: bool,
    ) -> torch.Tensor:
        over = classes if classes is not None else Axis("one", (0,), 0)
        size = logits.shape[-1]
        first = over.index * size
        here = max(0, min(size, num_classes - first))  # classes, the others are padding
        work = logits.to(compute_dtype(logits.dtype))
        if here < size:
            work = work.clone()
            work[..., here:] = -torch.inf
        largest = over.all_reduce(work.amax(-1), "max")
        # Where all logits are -inf, torch's own result is nan, and so is this one.
        exponentials = (work - largest.unsqueeze(-1)).exp()
        kept = targets != ignore_index
        mine = kept & (targets >= first) & (targets < first + here)
        index = torch.where(mine, targets - first, 0)
        picked = torch.where(mine, work.gather(-1, index.unsqueeze(-1)).squeeze(-1), 0)
        summands = [exponentials.sum(-1), picked]
        if smoothing:
            summands.append(work[..., :here].sum(-1))
        total, picked, *all_logits = over.all_reduce(torch.stack(summands)).unbind()
        losses = total.log() + largest - (1 - smoothing) * picked
        for each in all_logits:
            losses = losses - smoothing / num_classes * each
        # In 64 bits: the number of rows may be more than 32-bit floats can count.
        sums = torch.stack([torch.where(kept, losses, 0).sum().double(), kept.sum().double()])
        for axis in rows:
            sums = axis.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, mine, kept, sums[1])
        ctx.here, ctx.num_classes, ctx.smoothing, ctx.mean, ctx.dtype = (
            here,
            num_classes,
            smoothing,
            mean,
            logits.dtype,
        )
        return (sums[0] / sums[1] if mean else sums[0]).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        probabilities, index, mine, kept, count = ctx.saved_tensors
        scale = grad / count if ctx.mean else grad
        found = probabilities.clone()
        if ctx.smoothing:
            found[..., : ctx.here] -= ctx.smoothing / ctx.num_classes
        hot = mine.to(found.dtype).unsqueeze(-1) * (1 - ctx.smoothing)
        found.scatter_add_(-1, index.unsqueeze(-1), -hot)
        # An ignored row of logits that are nan or infinite has a gradient of zero all the same.
        found = torch.where(kept.unsqueeze(-1), found * scale.to(found.dtype), 0)
        return found.to(ctx.dtype), *(None,) * 7
