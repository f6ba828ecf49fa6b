"""Self-attention on a 3D mesh: between its two products the heads lie over one axis, so it is local."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..grid.attention import SplitAttention
from ..grid.checks import check_divides
from ..one_d import Attention
from .layout import Layout3D
from .linear import Linear3D, linear_together
from .mesh import Mesh3D

__all__ = ["Attention3D"]


class Attention3D(SplitAttention):
    """Multi-head attention, also with grouped keys and values; takes and gives
    ``(batch / d^2, tokens, features / d)`` of one layout.

    Args:
        embed_dim, num_heads, options: as of :class:`smp_lite.nn.one_d.Attention`, its dense form. The numbers
            of heads, of keys too, are multiples of d.
        mesh: the ranks that share it.
        layout: of input and result. A mask is split for it by ``mesh.split_mask``.
        regather: as in :class:`Linear3D`.

    Raises:
        ValueError: a size does not divide, or there is dropout of attention weights.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mesh: Mesh3D,
        layout: Layout3D | str,
        *,
        regather: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._set(Attention(embed_dim, num_heads, **options), mesh, layout, regather)

    @classmethod
    def from_dense(
        cls,
        dense: Attention | nn.MultiheadAttention,
        mesh: Mesh3D,
        layout: Layout3D | str,
        *,
        regather: bool = False,
    ) -> Attention3D:
        """This rank's part of a layer that all ranks hold."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set(dense, mesh, layout, regather)
        return layer

    def _set(self, dense: nn.Module, mesh: Mesh3D, layout: Layout3D | str, regather: bool) -> None:
        self.mesh = mesh
        self.takes = self.gives = Layout3D.of(layout)

        def split(projection: nn.Linear, last: bool) -> nn.Module:
            taken = self.takes.swapped if last else self.takes
            return Linear3D.from_dense(projection, mesh, taken, regather=regather)

        self._take(dense, split)
        over = (mesh.features(self.takes.swapped),)
        check_divides("Attention3D: num_heads", self.num_heads, over)
        check_divides("Attention3D: num_kv_heads", self.num_kv_heads, over)

    def _project(self, input: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if context is input:
            return linear_together(input, (self.q_proj, self.k_proj, self.v_proj))
        (q,) = linear_together(input, (self.q_proj,))
        return q, *linear_together(context, (self.k_proj, self.v_proj))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, takes={self.takes.value!r}, gives={self.gives.value!r}"
