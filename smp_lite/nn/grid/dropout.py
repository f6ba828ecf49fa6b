"""Dropout of this rank's part of an activation, with the mask that one process would draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from ..sequence.mesh import SequenceMesh
    from ..three_d.mesh import Mesh3D
    from ..two_d.mesh import SummaMesh

__all__ = ["PartDropout"]


class PartDropout(nn.Dropout):
    """``torch.nn.Dropout`` on a 2D, 2.5D, 3D or sequence mesh.

    All ranks draw the mask of the whole tensor, from the same random stream, and each applies its own part:
    the result is that of the dense layer, at the price of its time and memory for the mask.

    Args:
        p: as in ``torch.nn.Dropout``.
        mesh: over which the input lies: ``(batch, ..., features)``, of a SequenceMesh ``(batch, tokens,
            ...)``.
        layout: of the input on a 3D mesh.
    """

    def __init__(
        self, p: float = 0.5, *, mesh: SummaMesh | Mesh3D | SequenceMesh, layout: Any = None
    ) -> None:
        super().__init__(p)
        self.mesh = mesh
        self.layout = () if layout is None else (layout,)
        if (layout is not None) != hasattr(mesh, "rows"):
            raise ValueError("PartDropout: layout is that of the input on a Mesh3D, and needed there alone")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.p):
            return input
        mesh: Any = self.mesh
        mask = F.dropout(input.new_ones(mesh.whole_shape(input.shape, *self.layout)), self.p)
        result: torch.Tensor = input * mesh.split_input(mask, *self.layout)
        return result
