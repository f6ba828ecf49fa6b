"""What attention over a grid of ranks shares: its projections, and attention on one rank's heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..one_d import Attention
from ..one_d.parts import ONE_RANK

__all__ = ["Rotate", "SplitAttention", "attend", "check_mask"]

Rotate = Callable[[torch.Tensor], torch.Tensor]


class SplitAttention(nn.Module):
    """Projections, heads, attention, projection; what differs is where tokens, heads and features lie.

    Parameters as in :class:`smp_lite.nn.one_d.Attention` over one rank, its dense form: ``q_proj``,
    ``k_proj``, ``v_proj``, ``o_proj``. There is no dropout of attention weights: the ranks would draw other
    masks than one process.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module

    def _take(self, dense: nn.Module, split: Callable[[nn.Linear, bool], nn.Module]) -> None:
        """
        Args:
            dense: an Attention over one rank, or torch's MultiheadAttention.
            split: a projection to this rank's part of it; True with the last one.
        """
        whole = Attention.from_dense(dense, ONE_RANK) if isinstance(dense, nn.MultiheadAttention) else dense
        if not isinstance(whole, Attention) or whole.axis.size > 1:
            raise TypeError(
                f"{type(self).__name__}.from_dense takes an Attention over one rank or "
                f"torch.nn.MultiheadAttention, got {type(dense).__name__}"
            )
        if whole.dropout:
            raise ValueError(
                f"{type(self).__name__}: dropout={whole.dropout} of attention weights is not supported over "
                "a grid of ranks, which would drop others than one process; set dropout=0"
            )
        self.num_heads, self.num_kv_heads = whole.num_heads, whole.num_kv_heads
        self.head_dim, self.causal = whole.head_dim, whole.causal
        for name, projection in whole.named_children():
            setattr(self, name, split(projection.to_dense(), name == "o_proj"))
        self.train(dense.training)

    def to_dense(self) -> Attention:
        """The whole layer, over one rank; collective."""
        projections = {name: child.to_dense() for name, child in self.named_children()}
        q, o = projections["q_proj"], projections["o_proj"]
        dense = Attention(
            q.in_features,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            bias=q.bias is not None,
            out_bias=o.bias is not None,
            causal=self.causal,
            device="meta",
        )
        for name, projection in projections.items():
            for parameter, value in projection.named_parameters():
                setattr(getattr(dense, name), parameter, value)
        return dense.train(self.training)

    def forward(
        self,
        input: torch.Tensor,
        mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        rotate: Rotate | None = None,
    ) -> torch.Tensor:
        """
        Args:
            input: this rank's part of ``(batch, tokens, features)``.
            mask: broadcasts to ``(batch, heads, tokens, keys)`` of this rank; True: attend, or numbers to
                add,
                which are constants: it cannot require a gradient.
            context: what is attended to, laid out as the input; None: the input. Not with ``causal``.
            rotate: applied to queries and keys, ``(batch, heads, tokens, head_dim)`` of this rank, such as a
                rotary embedding.
        """
        if context is not None and self.causal:
            raise ValueError("causal attention is to the input itself: context must be None")
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in self._project(input, input if context is None else context)
        )
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        found = self._attend(q, k, v, mask)
        result: torch.Tensor = self.o_proj(found.transpose(1, 2).flatten(-2))
        return result

    def _project(self, input: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(input), self.k_proj(context), self.v_proj(context)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return attend(q, k, v, mask, self.causal)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """Attention of heads that are all here, with all their tokens; fewer key heads than query heads serve
    consecutive groups of these (Ainslie et al. 2023, "GQA", arXiv 2305.13245).
    """
    options: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)
    check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if causal:
        past = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def check_mask(mask: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a mask broadcasts to a shape, and is a constant."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"an attention mask of {mask.dtype}: it is of bool, or of numbers to add")
    if mask.requires_grad:
        raise ValueError(
            "an attention mask that requires a gradient is not supported over a grid of ranks, of which each "
            "would have one summand of it: detach it"
        )
    fits = mask.dim() <= len(shape) and all(
        size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(shape))
    )
    if not fits:
        raise ValueError(
            f"a mask of shape {list(mask.shape)} for this rank's (batch, heads, tokens, keys) {list(shape)}: "
            "take this rank's part of the mask with the mesh's split_mask"
        )
