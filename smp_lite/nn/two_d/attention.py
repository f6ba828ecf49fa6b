"""Self-attention on a 2D or 2.5D mesh: heads lie over ``mesh.col``, so it is local to each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..grid.attention import SplitAttention
from ..grid.checks import check_divides
from ..one_d import Attention
from .linear import Linear2D, linear_together
from .mesh import SummaMesh

__all__ = ["Attention2D"]


class Attention2D(SplitAttention):
    """Multi-head attention, also with grouped keys and values; takes and gives parts
    ``(batch / q, tokens, features / q)``.

    Args:
        embed_dim, num_heads, options: as of :class:`smp_lite.nn.one_d.Attention`, its dense form. The numbers
            of heads, of keys too, are multiples of q.
        mesh: the ranks that share it.

    Raises:
        ValueError: a size does not divide, or there is dropout of attention weights.
    """

    def __init__(self, embed_dim: int, num_heads: int, mesh: SummaMesh, **options: Any) -> None:
        super().__init__()
        self._set(Attention(embed_dim, num_heads, **options), mesh)

    @classmethod
    def from_dense(cls, dense: Attention | nn.MultiheadAttention, mesh: SummaMesh) -> Attention2D:
        """This rank's part of a layer that all ranks hold."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set(dense, mesh)
        return layer

    def _set(self, dense: nn.Module, mesh: SummaMesh) -> None:
        self.mesh = mesh
        self._take(dense, lambda projection, last: Linear2D.from_dense(projection, mesh))
        check_divides("Attention2D: num_heads", self.num_heads, (mesh.col,))
        check_divides("Attention2D: num_kv_heads", self.num_kv_heads, (mesh.col,))

    def _project(self, input: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if context is input:
            return linear_together(input, (self.q_proj, self.k_proj, self.v_proj))
        (q,) = linear_together(input, (self.q_proj,))
        return q, *linear_together(context, (self.k_proj, self.v_proj))
