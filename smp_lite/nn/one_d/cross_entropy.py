"""Cross entropy of logits that are split by the vocabulary (Shoeybi et al. 2019, section 3).

The logits are never gathered: for each token the ranks exchange the largest logit, the sum of exponentials
and the target's logit.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ...comm.groups.axis import Axis
from ..autocast import cast_for_loss
from ..transforms import refuse_transforms
from .embedding import check_indices
from .operations import sum_over_ranks

__all__ = ["VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    axis: Axis,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of this rank's part of the logits; the same result on all ranks.

    Args:
        logits: ``(..., padded vocabulary / ranks)``, classes in the last dimension. 16-bit ones are summed up
            in 32 bits.
        target: ``(...)``, whole numbers in 0..vocab_size-1 or ``ignore_index``; the same on all ranks.
        vocab_size: without padding; the padding's logits never matter, and their gradient is zero. None:
            there is no padding.
        ignore_index, reduction, label_smoothing: as in ``torch.nn.functional.cross_entropy``.

    Returns:
        A scalar, or ``(...)`` with ``reduction="none"``; of the logits' dtype, under autocast in 32 bits.

    Raises:
        ValueError: shapes that do not fit each other, a vocabulary that has more or less classes than the
            parts, or another reduction.
        IndexError: a target is no class.
    """
    # As a module it is one call of a recorded step. What it makes of the targets is each rank's own, which in
    # a step function would pass for a batch that differs. The recorder keeps what it knows of a module, so
    # one serves all calls.
    key = (VocabParallelCrossEntropy, vocab_size, ignore_index, reduction, label_smoothing)
    module = axis.kept.get(key)
    if module is None:
        module = axis.kept[key] = VocabParallelCrossEntropy(
            axis=axis,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    loss: torch.Tensor = module(logits, target)
    return loss


class VocabParallelCrossEntropy(nn.Module):
    """:func:`vocab_parallel_cross_entropy` as a module."""

    def __init__(
        self,
        *,
        axis: Axis,
        vocab_size: int | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.axis, self.vocab_size, self.ignore_index = axis, vocab_size, ignore_index
        self.reduction, self.label_smoothing = reduction, label_smoothing

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return _cross_entropy(
            logits,
            target,
            self.axis,
            self.vocab_size,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
        )


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    axis: Axis,
    vocab_size: int | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> torch.Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: it is 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: it is in 0..1")
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {list(logits.shape)} (classes last, this rank's part) need a target of shape "
            f"{list(logits.shape[:-1])}, not {list(target.shape)}"
        )
    here = logits.shape[-1]
    vocab_size = here * axis.size if vocab_size is None else vocab_size
    if not 0 <= here * axis.size - vocab_size < axis.size:
        raise ValueError(
            f"vocab_size={vocab_size}, but {axis.size} ranks with {here} logits each hold {here * axis.size}"
        )
    ignored = target == ignore_index
    check_indices(target.masked_fill(ignored, 0), vocab_size, "vocab_parallel_cross_entropy: target")

    if axis.size > 1:
        refuse_transforms(logits)
    logits = cast_for_loss(logits)
    dtype = logits.dtype
    logits = logits.float() if dtype in (torch.float16, torch.bfloat16) else logits
    first = here * axis.index
    padding = torch.arange(first, first + here, device=logits.device) >= vocab_size
    with torch.no_grad():
        largest = axis.all_reduce(logits.masked_fill(padding, -torch.inf).amax(-1), "max")
    shifted = logits - largest.unsqueeze(-1)
    exponentials = shifted.masked_fill(padding, -torch.inf).exp().sum(-1)
    elsewhere = ignored | (target < first) | (target >= first + here)
    index = (target - first).masked_fill(elsewhere, 0).unsqueeze(-1)
    picked = shifted.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0)
    summands = [exponentials, picked]
    if label_smoothing:
        summands.append(shifted.masked_fill(padding, 0).sum(-1))
    total, picked, *rest = sum_over_ranks(torch.stack(summands), axis).unbind()
    log_total = total.log()
    losses = log_total - picked
    if rest:
        even = log_total - rest[0] / vocab_size
        losses = (1 - label_smoothing) * losses + label_smoothing * even
    losses = losses.masked_fill(ignored, 0)
    if reduction == "none":
        return losses.to(dtype)
    loss = losses.sum()
    if reduction == "mean":
        loss = loss / (~ignored).sum()
    return loss.to(dtype)
