"""``smp.nn.DistributedAttentionLayer``: attention split by heads, with its norms and residual."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...record.values.parts import mark_part
from .base import DistributedModule, check_known
from .dropout import dropout_alike, dropout_of_part
from .norm import DistributedLayerNorm
from .projections import FromParts, ToParts, initialise, project
from .region import Region
from .scores import Scores, additive, alibi_bias, rotated

__all__ = ["DistributedAttentionLayer", "add_residual", "check_norms", "hidden_dropout"]


class DistributedAttentionLayer(DistributedModule):
    """Self- or cross-attention with dropout, residual connection and layer norms.

    Input: a tuple ``(hidden, mask)``, or with ``cross_attention`` ``(hidden, cross_states, mask)``: hidden
    ``(N, S, H)``; a mask that broadcasts to ``(N, heads, S, S')``, usually ``(N, 1, 1, S')``: numbers to add
    to the scores, or bool or whole ones, True or 1 for what may be attended to; or None. Output: hidden.

    Parts: ``query``, ``key``, ``value`` (a rank has its heads, dimension 0), ``dense`` (dimension 1),
    ``pre_layernorm`` and ``layernorm``, each if asked for. The residual is added with and without
    ``post_layernorm``; the printed reference code forgets it without.

    Args:
        num_attention_heads, attention_head_size, hidden_size: all positive.
        attention_dropout_prob, hidden_dropout_prob: of weights, and of the output before the residual.
        layernorm_epsilon: of the norms.
        initializer_range: standard deviation of the weights, if ``use_normal_initialization``; else they are
            drawn as torch's Linear draws them.
        cross_attention: keys and values are of ``cross_states``.
        causal_mask_size: the longest sequence, of which a token attends to itself and those before; None:
            to all.
        pre_layernorm, post_layernorm: of the input of the projections, and of the output after the residual.
        scale_attention_scores: by 1 / sqrt(attention_head_size).
        scale_attn_by_layer_idx: by 1 / (layer_idx + 1) as well.
        layer_idx: number of the layer, from 0.
        query_key_layer_scaling: the same division, undone in 32 bits before softmax.
        attention_in_fp32: scores and softmax in 32 bits.
        fp32_residual_addition: the residual is added in 32 bits.
        flash_attention: torch's fused kernel where no weight is dropped; the same result.
        use_alibi, alibi_bias_max: biases of distance (Press et al. 2022).
        rotary_dim: features of a head that get rotary positions; None: none.
        window_size: with a causal mask, how many tokens a token sees, itself among them; None: all.
        use_qkv_bias, use_attn_dense_bias: whether those projections have one.
        add_residual: whether the residual is added; for layers that add it themselves.
        fused: ``fused_*``: which kernels; without effect.

    Raises:
        SMPError: ``smp.init()`` was not called.
        CannotShare: the ranks cannot share the heads, or with ``optimize: "memory"`` the features, equally.
        ValueError: no norm at all, numbers that do not fit; in forward: no such tuple, or a sequence longer
            than ``causal_mask_size``.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        query_key_layer_scaling: bool = False,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        flash_attention: bool = False,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        rotary_dim: int | None = None,
        window_size: int | None = None,
        use_qkv_bias: bool = True,
        use_attn_dense_bias: bool = True,
        add_residual: bool = True,
        **fused: object,
    ) -> None:
        super().__init__()
        check_known("DistributedAttentionLayer", fused)
        check_norms("DistributedAttentionLayer", pre_layernorm, post_layernorm)
        region = self.region
        region.check_shares("DistributedAttentionLayer: num_attention_heads", num_attention_heads)
        if region.splits_features:
            region.check_shares("DistributedAttentionLayer: hidden_size", hidden_size)
        by_layer = [
            name
            for name, on in (
                ("scale_attn_by_layer_idx", scale_attn_by_layer_idx),
                ("query_key_layer_scaling", query_key_layer_scaling),
            )
            if on
        ]
        if by_layer and layer_idx is None:
            raise ValueError(f"DistributedAttentionLayer: {by_layer[0]}=True needs layer_idx")
        self.num_attention_heads, self.attention_head_size = num_attention_heads, attention_head_size
        self.hidden_size, self.hidden_dropout_prob = hidden_size, hidden_dropout_prob
        self.cross_attention, self.causal_mask_size = cross_attention, causal_mask_size
        self.use_alibi, self.alibi_bias_max = use_alibi, alibi_bias_max
        self.rotary_dim = rotary_dim
        self.fp32_residual_addition, self.add_residual = fp32_residual_addition, add_residual
        self.enters = self.leaves = True  # False inside a layer, which does it for all its parts
        divisor = float(layer_idx + 1) if layer_idx is not None else 1.0
        scale = attention_head_size**-0.5 if scale_attention_scores else 1.0
        self.scores = Scores(
            scale=scale / divisor if scale_attn_by_layer_idx else scale,
            dropout=attention_dropout_prob,
            causal=causal_mask_size is not None and not cross_attention,
            window=window_size or 0,
            in_fp32=attention_in_fp32,
            layer_scaling=divisor if query_key_layer_scaling else 1.0,
            uses_sdpa=flash_attention,
        )
        inner = num_attention_heads * attention_head_size
        self.query = ToParts(hidden_size, inner, use_qkv_bias)
        self.key = ToParts(hidden_size, inner, use_qkv_bias)
        self.value = ToParts(hidden_size, inner, use_qkv_bias)
        self.dense = FromParts(inner, hidden_size, use_attn_dense_bias)
        if use_normal_initialization:
            initialise(self, initializer_range)
        for part in (self.query, self.key, self.value, self.dense):
            part.split()
        if pre_layernorm:
            self.pre_layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon, inside=True)
        if post_layernorm:
            self.layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon, inside=True)
        self.has_pre_layernorm, self.has_post_layernorm = pre_layernorm, post_layernorm

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        hidden, cross, mask = self._taken_apart(inputs)
        region = self.region
        batch_size = hidden.shape[0] // (1 if self.enters else region.num_batches)
        x = self.enter(hidden) if self.enters else hidden
        normed = self.pre_layernorm(x) if self.has_pre_layernorm else x
        if cross is None:
            query, key, value = map(self._heads, project(normed, (self.query, self.key, self.value), region))
        else:
            (query,) = map(self._heads, project(normed, (self.query,), region))
            states = self.enter(cross)
            key, value = map(self._heads, project(states, (self.key, self.value), region))
        if self.causal_mask_size is not None and cross is None and query.shape[-2] > self.causal_mask_size:
            raise ValueError(
                f"DistributedAttentionLayer: a sequence of {query.shape[-2]} tokens, and causal_mask_size="
                f"{self.causal_mask_size}"
            )
        if self.rotary_dim is not None:
            query, key = rotated(query, self.rotary_dim), rotated(key, self.rotary_dim)
        bias = self._bias(mask, query, key, batch_size)
        found = self.scores.attend(query, key, value, bias, training=self.training, axis=region.axis)
        found = self.dense(found.transpose(1, 2).flatten(-2))
        found = hidden_dropout(found, self.hidden_dropout_prob, self.training, region)
        if self.add_residual:
            found = add_residual(found, x, in_fp32=self.fp32_residual_addition)
        if self.has_post_layernorm:
            found = self.layernorm(found)
        return region.leave(found) if self.leaves else found

    def _taken_apart(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        wanted = "(hidden, cross_states, mask)" if self.cross_attention else "(hidden, mask)"
        if not isinstance(inputs, tuple | list) or len(inputs) != (3 if self.cross_attention else 2):
            raise ValueError(f"DistributedAttentionLayer takes a tuple {wanted}, got {_shown(inputs)}")
        hidden, cross, mask = inputs if self.cross_attention else (inputs[0], None, inputs[1])
        if mask is not None and mask.dim() != 4:
            raise ValueError(
                f"DistributedAttentionLayer: a mask of shape {list(mask.shape)}; it must have four "
                "dimensions, as (N, 1, 1, S)"
            )
        return hidden, cross, mask

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)

    def _bias(
        self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, batch_size: int
    ) -> torch.Tensor | None:
        """To add to the scores of this rank's heads."""
        heads = self.num_attention_heads
        bias = self.region.enter_bias(additive(mask, query.dtype), query, batch_size)
        if bias is not None and bias.dim() == 4 and bias.shape[1] == heads > 1:
            bias = self._of_my_heads(bias, query)
        if self.use_alibi:
            alibi = alibi_bias(heads, key.shape[-2], self.alibi_bias_max, query)
            alibi = self._of_my_heads(alibi, query)
            bias = alibi if bias is None else bias + alibi
        return bias

    def _of_my_heads(self, bias: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """This rank's part of a bias of all heads. If the layer lies on several stages, whose ranks compare
        what they read, it is marked as that, and what is made of it is a value of the step's."""
        axis = self.region.axis
        part = mark_part(
            axis.part(bias, 1), bias, f"heads over {axis.name}", lambda whole: axis.part(whole, 1)
        )
        return part + query.new_zeros(())

    def extra_repr(self) -> str:
        return f"heads={self.num_attention_heads}, ranks={self.region.axis.size}"


def hidden_dropout(x: torch.Tensor, p: float, training: bool, region: Region) -> torch.Tensor:
    """Dropout of the features inside a block, which ranks have parts of or alike."""
    if region.splits_features:
        return dropout_of_part(x, p, training, region.axis)
    if region.own_batches:
        return dropout_alike(x, p, training, region.axis)
    return F.dropout(x, p, training)


def add_residual(x: torch.Tensor, residual: torch.Tensor, *, in_fp32: bool) -> torch.Tensor:
    """Their sum, in the dtype of the former."""
    if in_fp32:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) + residual.to(wide)).to(x.dtype)
    return x + residual


def check_norms(module: str, pre_layernorm: bool, post_layernorm: bool) -> None:
    """
    Raises:
        ValueError: there is none.
    """
    if not (pre_layernorm or post_layernorm):
        raise ValueError(
            f"{module}: pre_layernorm=False and post_layernorm=False: at least one of them must be True"
        )


def _shown(inputs: Any) -> str:
    length = f" of {len(inputs)}" if isinstance(inputs, tuple | list) else ""
    return f"{type(inputs).__name__}{length}"
