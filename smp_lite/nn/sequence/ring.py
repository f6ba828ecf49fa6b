"""Attention of a sequence over ranks that pass keys and values around a ring.

Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective" (arXiv 2105.13120),
with the blockwise softmax of Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite
Context" (arXiv 2310.01889), and the backward of Dao et al. 2022, "FlashAttention" (arXiv 2205.14135),
appendix B. A rank holds the scores of its queries with one rank's keys at a time. Each block gives an output
and the logarithm of its sum of exponentials (lse), by which blocks are merged.

In backward the gradients of keys and values travel with them, and are home after one round. They are sums
over all queries, and so are not divided by the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..autocast import cast_for_autocast, without_autocast
from ..grid.attention import check_mask
from ..grid.checks import compute_dtype
from ..transforms import refuse_transforms
from .mesh import SequenceMesh

__all__ = ["ring_attention"]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: SequenceMesh,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax attention of this rank's queries over the keys and values of all ranks.

    Each rank receives the other ranks' keys and values once in forward, and twice as much (and its own
    gradients) in backward. Scores are taken in 32 bits at least. A query that may attend to nothing gets
    zeros.

    Args:
        q: ``(batch, heads, tokens / P, head_dim)``.
        k, v: ``(batch, kv_heads, keys / P, head_dim)``; ``heads`` is a multiple of ``kv_heads``, which serve
            consecutive groups of them.
        mesh: the ranks, and which tokens they have.
        causal: a token attends to itself and those before.
        mask: broadcasts to ``(batch, heads, tokens / P, keys)``, of this rank's queries and all keys in the
            order of the sequence (``mesh.split_mask``); True: attend, or numbers to add. A constant.
        scale: of the scores; None: ``1 / sqrt(head_dim)``.

    Returns:
        ``(batch, heads, tokens / P, head_dim)``, of the dtype of ``q``.

    Raises:
        ValueError: shapes that do not fit.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads of queries are no multiple of {k.shape[1]} heads of keys")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal attention of {q.shape[2]} tokens a rank to {k.shape[2]} keys a rank")
    num_keys = k.shape[2] * mesh.size
    mesh.positions(num_keys)  # or an error, if no rank can have so many
    if mask is not None:
        check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], num_keys))
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    refuse_transforms(q, k, v)
    q, k, v = cast_for_autocast(q, k, v)
    with without_autocast(q):
        result: torch.Tensor = _Ring.apply(
            q, k, v, mask, mesh, causal, q.shape[-1] ** -0.5 if scale is None else scale
        )
    return result


@dataclass(frozen=True)
class _Block:
    """What of this rank's queries meets what of another rank's keys."""

    queries: slice
    keys: slice
    diagonal: bool
    """Whether they are the same tokens, so that what is masked is the triangle of later ones."""


def _block(mesh: SequenceMesh, other: int, num_tokens: int, causal: bool) -> _Block | None:
    """Of the keys of rank ``other`` of the axis; None: all of them are later than all queries."""
    everything, here = slice(None), mesh.axis.index
    if not causal or other == here:
        return _Block(everything, everything, causal)
    if not mesh.zigzag:
        return _Block(everything, everything, False) if other < here else None
    # A rank with a lower index has an earlier first chunk and a later second chunk.
    half = num_tokens // 2
    if other < here:
        return _Block(everything, slice(None, half), False)
    return _Block(slice(half, None), everything, False)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        mesh: SequenceMesh,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        ctx.mesh, ctx.causal, ctx.scale = mesh, causal, scale
        queries, travelling = _grouped(q, k), torch.cat([k, v], -1)
        total = queries.new_zeros((*queries.shape[:-1], v.shape[-1]))
        lse = queries.new_full(queries.shape[:-1], -torch.inf)
        for step in range(mesh.size):
            other = (mesh.axis.index - step) % mesh.size
            block = _block(mesh, other, q.shape[2], causal)
            if block is not None:
                keys, values = _arrived(travelling, k.shape[-1], block, queries.dtype)
                scores = _scores(queries, keys, mask, mesh, other, block, scale)
                _merge(total[:, :, :, block.queries], lse[:, :, :, block.queries], scores, values)
            if step < mesh.size - 1:
                travelling = mesh.axis.shift(travelling)
        ctx.save_for_backward(q, k, v, mask, total, lse)
        return total.flatten(1, 2).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, mask, total, lse = ctx.saved_tensors
        mesh, width = ctx.mesh, k.shape[-1]
        queries, travelling = _grouped(q, k), torch.cat([k, v], -1)
        grads = _grouped(grad, k)
        along = (grads * total).sum(-1)
        lse = _finite(lse)
        of_q = torch.zeros_like(queries)
        returning = torch.zeros_like(travelling, dtype=queries.dtype)
        for step in range(mesh.size):
            other = (mesh.axis.index - step) % mesh.size
            block = _block(mesh, other, q.shape[2], ctx.causal)
            if block is not None:
                keys, values = _arrived(travelling, width, block, queries.dtype)
                mine = (slice(None), slice(None), slice(None), block.queries)
                scores = _scores(queries, keys, mask, mesh, other, block, ctx.scale)
                weights = (scores - lse[mine].unsqueeze(-1)).exp()
                of_weights = grads[mine] @ values.transpose(-2, -1)
                of_scores = weights * (of_weights - along[mine].unsqueeze(-1))
                of_q[mine] += of_scores @ keys * ctx.scale
                # Summed over the query heads that share a key head.
                of_keys = (of_scores.transpose(-2, -1) @ queries[mine]).sum(2) * ctx.scale
                of_values = (weights.transpose(-2, -1) @ grads[mine]).sum(2)
                returning[:, :, block.keys] += torch.cat([of_keys, of_values], -1)
            if step < mesh.size - 1:
                travelling = mesh.axis.shift(travelling)
            returning = mesh.axis.shift(returning)
        of_k, of_v = returning.split([width, v.shape[-1]], -1)
        return of_q.flatten(1, 2).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), *(None,) * 4


def _grouped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(batch, key heads, query heads of each, tokens, features), in what sums are taken in."""
    return q.to(compute_dtype(q.dtype)).unflatten(1, (k.shape[1], -1))


def _arrived(
    travelling: torch.Tensor, width: int, block: _Block, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's keys and values, (batch, key heads, 1, keys, features)."""
    found = travelling[:, :, block.keys].to(dtype).unsqueeze(2)
    return found[..., :width], found[..., width:]


def _scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    mesh: SequenceMesh,
    other: int,
    block: _Block,
    scale: float,
) -> torch.Tensor:
    scores = queries[:, :, :, block.queries] @ keys.transpose(-2, -1) * scale
    if block.diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is None:
        return scores
    if mask.shape[-2] > 1:
        mask = mask[:, :, block.queries]
    if mask.shape[-1] > 1:
        mask = mask.index_select(-1, mesh.positions(mask.shape[-1], index=other)[block.keys].to(mask.device))
    mask = mask.unflatten(1, queries.shape[1:3]) if mask.shape[1] > 1 else mask.unsqueeze(1)
    return (
        scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    )


def _merge(total: torch.Tensor, lse: torch.Tensor, scores: torch.Tensor, values: torch.Tensor) -> None:
    """Adds a block, in place."""
    largest = _finite(scores.amax(-1))
    weights = (scores - largest.unsqueeze(-1)).exp()
    sums = weights.sum(-1)
    block_lse = sums.log() + largest
    merged = torch.logaddexp(lse, block_lse)
    safe = _finite(merged)
    # The block's weights are relative to its largest score; as parts of the merged sum none is above one.
    share = torch.where(sums > 0, (largest - safe).exp(), 0)
    total.mul_((lse - safe).exp().unsqueeze(-1)).add_((weights @ values) * share.unsqueeze(-1))
    lse.copy_(merged)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Zero for the -inf of a row in which nothing may be attended to."""
    return torch.where(x == -torch.inf, 0, x)
