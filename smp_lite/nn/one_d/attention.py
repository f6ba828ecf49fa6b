"""Self-attention split over one axis by heads (Shoeybi et al. 2019, section 3), also with grouped keys and
values (Ainslie et al. 2023, "GQA").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...comm.groups.axis import Axis
from .linear import ColumnParallelLinear, RowParallelLinear, SharedRowsLinear
from .operations import copy_to_ranks, gather_along
from .parts import ONE_RANK, check_divides

__all__ = ["Attention"]


class Attention(nn.Module):
    """Multi-head self-attention, each rank with an equal part of the query heads.

    Input ``(batch, sequence, embed_dim)``, whole on every rank, and so is the output. On an axis of one rank
    it is the dense layer. Parameters: ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, each with ``weight``
    and perhaps ``bias``.

    Where the ranks cannot share the key and value heads equally (fewer heads than ranks), ``k_proj`` and
    ``v_proj`` stay whole on every rank. Each computes the heads that its query heads attend to, so the ranks'
    gradients of those weights are summands.

    Args:
        embed_dim: features of input and output.
        num_heads: of the queries.
        num_kv_heads: of keys and values; None: as many as of the queries.
        head_dim: features of a head; None: ``embed_dim / num_heads``.
        bias: of the query, key and value projections; ``out_bias``: of the last, None: the same.
        causal: a token attends to itself and those before.
        dropout: of attention weights, in training. All ranks draw the mask of all heads, from the same random
            stream, so the result is that of the dense layer, at the price of its memory for that mask.
        axis: the ranks that share it.
        sequence_parallel: input and output are this rank's part along the sequence.

    Raises:
        ValueError: the ranks cannot share the query heads equally, or they are no multiple of the key heads;
            names the nearest numbers.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        *,
        axis: Axis = ONE_RANK,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(f"Attention: embed_dim={embed_dim} is no multiple of num_heads={num_heads}")
            head_dim = embed_dim // num_heads
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self._set(num_heads, kv_heads, head_dim, causal, dropout, axis, sequence_parallel)
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self._take(
            nn.Linear(embed_dim, num_heads * head_dim, bias, **kind),
            nn.Linear(embed_dim, kv_heads * head_dim, bias, **kind),
            nn.Linear(embed_dim, kv_heads * head_dim, bias, **kind),
            nn.Linear(num_heads * head_dim, embed_dim, bias if out_bias is None else out_bias, **kind),
        )

    @classmethod
    def from_dense(cls, dense: nn.Module, axis: Axis, *, sequence_parallel: bool = False) -> Attention:
        """This rank's part of a layer that all ranks hold.

        Args:
            dense: an :class:`Attention` over one rank, or ``torch.nn.MultiheadAttention`` (batch first, one
                width of query, key and value, no bias_kv, no zero attention).
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        if isinstance(dense, nn.MultiheadAttention):
            layer._set(
                dense.num_heads,
                dense.num_heads,
                dense.head_dim,
                False,
                dense.dropout,
                axis,
                sequence_parallel,
            )
            layer._take(*_linears(dense))
        elif isinstance(dense, Attention) and dense.axis.size == 1:
            layer._set(
                dense.num_heads,
                dense.num_kv_heads,
                dense.head_dim,
                dense.causal,
                dense.dropout,
                axis,
                sequence_parallel,
            )
            layer._take(*(projection.to_dense() for projection in dense.children()))
        else:
            raise ValueError(
                f"Attention.from_dense takes an Attention over one rank or torch.nn.MultiheadAttention, not "
                f"{dense!r}"
            )
        return layer.train(dense.training)

    def _set(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool,
        dropout: float,
        axis: Axis,
        sequence_parallel: bool,
    ) -> None:
        check_divides("Attention: num_heads", num_heads, axis)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"Attention: num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.causal, self.dropout, self.axis = causal, dropout, axis
        self.sequence_parallel = sequence_parallel

    def _take(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> None:
        # The input is handed to the ranks once, for all three projections.
        inside = _InsideLinear.from_dense
        self.q_proj = inside(q, self.axis)
        if self.num_kv_heads % self.axis.size == 0:
            self.k_proj, self.v_proj = inside(k, self.axis), inside(v, self.axis)
        else:
            heads = self._kv_heads_here()
            rows = range(heads.start * self.head_dim, heads.stop * self.head_dim)
            shared = SharedRowsLinear.from_dense
            self.k_proj = shared(k, self.axis, rows=rows, copies_input=False)
            self.v_proj = shared(v, self.axis, rows=rows, copies_input=False)
        self.o_proj = RowParallelLinear.from_dense(o, self.axis, sequence_parallel=self.sequence_parallel)

    def _kv_head_of(self) -> list[int]:
        """Key head of each of this rank's query heads."""
        here = self.num_heads // self.axis.size
        first = here * self.axis.index
        return [head // (self.num_heads // self.num_kv_heads) for head in range(first, first + here)]

    def _kv_heads_here(self) -> range:
        heads = self._kv_head_of()
        return range(heads[0], heads[-1] + 1)

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            input: ``(batch, sequence, embed_dim)``, or this rank's part of the sequence.
            mask: of a shape that broadcasts to ``(batch, num_heads, sequence, sequence)``; True: attend, or
                numbers to add. Not together with ``causal``.
        """
        if self.sequence_parallel:
            x = gather_along(input, self.axis, -2, gradients="summand")
        else:
            x = copy_to_ranks(input, self.axis)
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = self._kv_head_of()
        if k.shape[1] != q.shape[1]:
            index = torch.tensor([head - heads[0] for head in heads], device=k.device)
            k, v = k.index_select(1, index), v.index_select(1, index)
        if mask is not None and mask.requires_grad:
            mask = copy_to_ranks(mask, self.axis)  # each rank's gradient of it is of its own heads
        if mask is not None and mask.dim() >= 3 and mask.shape[-3] == self.num_heads:
            mask = self.axis.part(mask, mask.dim() - 3)
        found = self._attend(q, k, v, mask)
        return self.o_proj(found.transpose(1, 2).flatten(-2))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if mask is not None and self.causal:
            raise ValueError("Attention: causal=True with a mask: put the causal part into the mask")
        if not (self.training and self.dropout):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        length, other = q.shape[-2], k.shape[-2]
        if self.causal:
            mask = torch.ones(length, other, dtype=torch.bool, device=q.device).tril()
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        weights = scores.softmax(-1)
        kept = F.dropout(weights.new_ones(q.shape[0], self.num_heads, length, other), self.dropout)
        return (weights * self.axis.part(kept, 1)) @ v

    def to_dense(self) -> Attention:
        """The whole layer, over one rank; collective over the axis."""
        dense = Attention.__new__(Attention)
        nn.Module.__init__(dense)
        dense._set(
            self.num_heads, self.num_kv_heads, self.head_dim, self.causal, self.dropout, ONE_RANK, False
        )
        dense._take(*(projection.to_dense() for projection in self.children()))
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"axis={self.axis.name!r}, ranks={self.axis.size}"
        )


class _InsideLinear(ColumnParallelLinear):
    """Its input has been handed to the ranks already."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias)


def _linears(dense: nn.MultiheadAttention) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    wrong = {
        "batch_first=False": not dense.batch_first,
        "kdim or vdim": not dense._qkv_same_embed_dim,
        "add_bias_kv": dense.bias_k is not None,
        "add_zero_attn": dense.add_zero_attn,
    }
    for name, given in wrong.items():
        if given:
            raise ValueError(
                f"Attention.from_dense: a torch.nn.MultiheadAttention with {name} is not supported"
            )
    weights = dense.in_proj_weight.chunk(3)
    biases = (None, None, None) if dense.in_proj_bias is None else dense.in_proj_bias.chunk(3)
    found = [
        _linear(weight, bias, dense.in_proj_weight) for weight, bias in zip(weights, biases, strict=True)
    ]
    last = _linear(dense.out_proj.weight, dense.out_proj.bias, dense.out_proj.weight)
    return found[0], found[1], found[2], last


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, source: nn.Parameter) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), source.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), source.requires_grad)
    return linear
