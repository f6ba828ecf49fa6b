"""Cross entropy on a 2D or 2.5D mesh."""

from __future__ import annotations

from typing import Literal

import torch

from ..grid.cross_entropy import split_cross_entropy
from .mesh import SummaMesh

__all__ = ["cross_entropy_2d"]


def cross_entropy_2d(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mesh: SummaMesh,
    num_classes: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of what :class:`~smp_lite.nn.two_d.Classifier2D` gives, over the
    rows of all ranks; the same scalar on each.

    Args:
        logits: ``(batch / q, ..., padded classes / q)``.
        targets: ``(batch / q, ...)``, of this rank's rows (``mesh.split_batch``).
        mesh: the ranks that share them.
        num_classes: without padding.
        ignore_index, label_smoothing, reduction: as in torch's; ``mean`` is over all rows of all ranks that
            are not ignored.

    Raises:
        ValueError: shapes that do not fit.
        IndexError: a target is no class.
    """
    return split_cross_entropy(
        logits,
        targets,
        classes=mesh.col,
        rows=mesh.batch_axes,
        num_classes=num_classes,
        padding=mesh.q**2,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
