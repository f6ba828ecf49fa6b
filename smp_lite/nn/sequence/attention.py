"""Self-attention of a sequence that lies over several ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..grid.attention import SplitAttention
from ..grid.checks import check_divides
from ..one_d import Attention
from .all_to_all import all_to_all_attention
from .layers import SequenceLinear
from .mesh import SequenceMesh
from .ring import ring_attention

__all__ = ["SequenceAttention"]


class SequenceAttention(SplitAttention):
    """Multi-head attention, also with grouped keys and values; takes and gives ``(batch, tokens / P,
    features)``.

    Args:
        embed_dim, num_heads, options: as of :class:`smp_lite.nn.one_d.Attention`, its dense form.
        mesh: the ranks that share the sequence.
        exchange: ``ring``, for any number of heads, or ``all_to_all``, for multiples of P.

    Raises:
        ValueError: heads that do not divide, or dropout of attention weights.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mesh: SequenceMesh,
        exchange: Literal["ring", "all_to_all"] = "ring",
        **options: Any,
    ) -> None:
        super().__init__()
        self._set(Attention(embed_dim, num_heads, **options), mesh, exchange)

    @classmethod
    def from_dense(
        cls,
        dense: Attention | nn.MultiheadAttention,
        mesh: SequenceMesh,
        exchange: Literal["ring", "all_to_all"] = "ring",
    ) -> SequenceAttention:
        """With a copy of a layer's parameters."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set(dense, mesh, exchange)
        return layer

    def _set(self, dense: nn.Module, mesh: SequenceMesh, exchange: str) -> None:
        if exchange not in ("ring", "all_to_all"):
            raise ValueError(f"exchange={exchange!r}: it is 'ring' or 'all_to_all'")
        self.mesh, self.exchange = mesh, exchange
        self._take(dense, lambda projection, last: SequenceLinear.from_dense(projection, mesh))
        if exchange == "all_to_all":
            for what, heads in (("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads)):
                check_divides(f"SequenceAttention with all_to_all: {what}", heads, (mesh.axis,))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        run = ring_attention if self.exchange == "ring" else all_to_all_attention
        return run(q, k, v, self.mesh, causal=self.causal, mask=mask)
