"""Cross entropy on a 3D mesh."""

from __future__ import annotations

from typing import Literal

import torch

from ..grid.cross_entropy import split_cross_entropy
from .layout import Layout3D, check_layout
from .mesh import Mesh3D

__all__ = ["cross_entropy_3d"]


def cross_entropy_3d(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mesh: Mesh3D,
    layout: Layout3D | str,
    num_classes: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of what :class:`~smp_lite.nn.three_d.Classifier3D` gives, over
    the rows of all ranks; the same scalar on each.

    Args:
        logits: ``(batch / d^2, ..., padded classes / d)``.
        targets: ``(batch / d^2, ...)``, split in the layout of the logits: ``mesh.split_batch(whole,
            layout)``.
        mesh: the ranks that share them.
        layout: of logits and targets, which is what the classifier gives, not what it takes.
        num_classes: without padding.
        ignore_index, label_smoothing, reduction: as in torch's; ``mean`` is over all rows of all ranks that
            are not ignored.

    Raises:
        LayoutError: logits or targets come in the other layout.
        ValueError: shapes that do not fit.
        IndexError: a target is no class.
    """
    layout = Layout3D.of(layout)
    check_layout("cross_entropy_3d (logits)", logits, layout)
    check_layout("cross_entropy_3d (targets)", targets, layout)
    return split_cross_entropy(
        logits,
        targets,
        classes=mesh.features(layout),
        rows=mesh.rows(layout),
        num_classes=num_classes,
        padding=mesh.d**2,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
