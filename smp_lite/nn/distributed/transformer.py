"""``smp.nn.DistributedTransformerLayer`` and ``smp.nn.DistributedTransformer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attention import DistributedAttentionLayer, add_residual, check_norms
from .base import DistributedModule, check_known
from .output import DistributedTransformerOutputLayer

__all__ = ["DistributedTransformer", "DistributedTransformerLayer"]


class DistributedTransformerLayer(DistributedModule):
    """One transformer layer: ``attention``, perhaps ``cross_attention``, and ``output``.

    Takes and returns one tuple: ``(hidden, mask)``, or with ``add_cross_attention`` ``(hidden, cross_states,
    mask, cross_mask)``; of it, hidden ``(N, S, H)`` is new in the result.

    Args:
        num_attention_heads, attention_head_size, hidden_size, intermediate_size, attention_dropout_prob,
            hidden_dropout_prob, activation, layernorm_epsilon, initializer_range, use_normal_initialization,
            causal_mask_size, pre_layernorm, post_layernorm and all by name alone: see
            :class:`DistributedAttentionLayer` and :class:`DistributedTransformerOutputLayer`.
        add_cross_attention: whether attention to ``cross_states`` follows that of the layer itself.
        parallel_attn_output: both halves take the layer's normalised input, and their results are added to
            the input once (GPT-J); needs ``pre_layernorm`` alone, and has that norm once.

    Raises:
        SMPError: ``smp.init()`` was not called.
        CannotShare: the ranks cannot share heads or features equally.
        ValueError: numbers or switches that do not fit; in forward, another tuple.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
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
        parallel_attn_output: bool = False,
        **fused: object,
    ) -> None:
        super().__init__()
        check_known("DistributedTransformerLayer", fused)
        check_norms("DistributedTransformerLayer", pre_layernorm, post_layernorm)
        if parallel_attn_output and (post_layernorm or not pre_layernorm or add_cross_attention):
            raise ValueError(
                "DistributedTransformerLayer: parallel_attn_output=True needs pre_layernorm=True, "
                "post_layernorm=False and add_cross_attention=False"
            )
        common: dict[str, Any] = {
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "fp32_residual_addition": fp32_residual_addition,
            "post_layernorm": post_layernorm,
        }
        heads: dict[str, Any] = {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "hidden_size": hidden_size,
            "attention_dropout_prob": attention_dropout_prob,
            "hidden_dropout_prob": hidden_dropout_prob,
            "pre_layernorm": pre_layernorm,
            "scale_attention_scores": scale_attention_scores,
            "scale_attn_by_layer_idx": scale_attn_by_layer_idx,
            "layer_idx": layer_idx,
            "query_key_layer_scaling": query_key_layer_scaling,
            "attention_in_fp32": attention_in_fp32,
            "flash_attention": flash_attention,
            "use_qkv_bias": use_qkv_bias,
            "use_attn_dense_bias": use_attn_dense_bias,
            **common,
        }
        self.add_cross_attention = add_cross_attention
        self.parallel_attn_output = parallel_attn_output
        self.fp32_residual_addition = fp32_residual_addition
        self.enters = self.leaves = True  # False within a DistributedTransformer, but at its ends
        self.attention = DistributedAttentionLayer(
            causal_mask_size=causal_mask_size,
            use_alibi=use_alibi,
            alibi_bias_max=alibi_bias_max,
            rotary_dim=rotary_dim,
            window_size=window_size,
            add_residual=not parallel_attn_output,
            **heads,
        )
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(cross_attention=True, **heads)
        self.output = DistributedTransformerOutputLayer(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            pre_layernorm=pre_layernorm and not parallel_attn_output,
            add_residual=not parallel_attn_output,
            **common,
        )
        for part in self.children():
            part.enters = part.leaves = False  # type: ignore[assignment]

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        hidden, rest = self._taken_apart(inputs)
        x = self.enter(hidden) if self.enters else hidden
        if self.parallel_attn_output:
            found = self.attention((x, rest[0])) + self.output(self.attention.pre_layernorm(x))
            x = add_residual(found, x, in_fp32=self.fp32_residual_addition)
        else:
            if self.add_cross_attention:
                cross_states, mask, cross_mask = rest
                x = self.attention((x, mask))
                x = self.cross_attention((x, cross_states, cross_mask))
            else:
                x = self.attention((x, rest[0]))
            x = self.output(x)
        return (self.region.leave(x) if self.leaves else x, *rest)

    def _taken_apart(self, inputs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        length, names = 2, "(hidden, mask)"
        if self.add_cross_attention:
            length, names = 4, "(hidden, cross_states, mask, cross_mask)"
        if not isinstance(inputs, tuple | list) or len(inputs) != length:
            raise ValueError(
                f"DistributedTransformerLayer takes one tuple {names}, got {type(inputs).__name__}"
                + (f" of {len(inputs)}" if isinstance(inputs, tuple | list) else "")
            )
        return inputs[0], tuple(inputs[1:])


class DistributedTransformer(DistributedModule):
    """A stack of :class:`DistributedTransformerLayer`, in ``seq_layers``.

    Takes and returns the tuple that a layer does. Activations enter the region before the first layer and
    leave it after the last. With both ``pre_layernorm`` and ``post_layernorm`` it normalises its own input
    and output too, in ``pre_layernorm`` and ``layernorm``.

    Args:
        num_layers: how many.
        others: of :class:`DistributedTransformerLayer`; ``layer_idx`` is each one's number.
        layer_options: for each layer arguments that differ from the others'; None: they are alike.

    Raises:
        As a layer does; ValueError: ``num_layers`` is no positive number.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        layer_options: list[dict[str, Any]] | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"DistributedTransformer: num_layers={num_layers} must be a positive number")
        if layer_options is not None and len(layer_options) != num_layers:
            raise ValueError(
                f"DistributedTransformer: {len(layer_options)} layer_options for num_layers={num_layers}"
            )
        arguments: dict[str, Any] = {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "attention_dropout_prob": attention_dropout_prob,
            "hidden_dropout_prob": hidden_dropout_prob,
            "activation": activation,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "causal_mask_size": causal_mask_size,
            "add_cross_attention": add_cross_attention,
            "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm,
            **others,
        }
        each = layer_options or [{}] * num_layers
        self.seq_layers = nn.Sequential(
            *(
                DistributedTransformerLayer(**{**arguments, "layer_idx": i, **own})
                for i, own in enumerate(each)
            )
        )
        for i, layer in enumerate(self.seq_layers):
            assert isinstance(layer, DistributedTransformerLayer)
            layer.enters, layer.leaves = i == 0, i == num_layers - 1
        self.normalises = pre_layernorm and post_layernorm
        if self.normalises:
            self.pre_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon)
            self.layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon)

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        if not self.normalises:
            found: tuple[torch.Tensor | None, ...] = self.seq_layers(inputs)
            return found
        hidden, *rest = inputs
        hidden, *rest = self.seq_layers((self.pre_layernorm(hidden), *rest))
        return (self.layernorm(hidden), *rest)
