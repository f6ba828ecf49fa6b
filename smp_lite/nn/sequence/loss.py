"""Cross entropy of a sequence that lies over several ranks."""

from __future__ import annotations

from typing import Literal

import torch

from ..grid.cross_entropy import split_cross_entropy
from .mesh import SequenceMesh

__all__ = ["cross_entropy_sequence"]


def cross_entropy_sequence(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mesh: SequenceMesh,
    num_classes: int,
    *,
    vocabulary_split: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` over the tokens of all ranks; the same scalar on each.

    Args:
        logits: ``(batch, tokens / P, classes)`` of this rank's tokens; with ``vocabulary_split`` what
            :class:`~smp_lite.nn.sequence.SequenceClassifier` gives.
        targets: ``(batch, tokens / P)``, of this rank's tokens (``mesh.split_batch``).
        mesh: the ranks.
        num_classes: without padding.
        ignore_index, label_smoothing, reduction: as in torch's; ``mean`` is over all tokens of all ranks that
            are not ignored.

    Raises:
        ValueError: shapes that do not fit.
        IndexError: a target is no class.
    """
    axis = mesh.axis
    return split_cross_entropy(
        logits,
        axis.all_gather(targets, 1) if vocabulary_split else targets,
        classes=axis if vocabulary_split else None,
        rows=() if vocabulary_split else (axis,),
        num_classes=num_classes,
        padding=mesh.size if vocabulary_split else 1,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
