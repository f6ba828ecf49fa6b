"""What BERT and RoBERTa share: names, arguments of their layers, and what calls of them become."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed import Region
from .as_built import LayerParts, ModelParts
from .calls import refuse_given
from .names import Names

__all__ = ["NAMES", "encoder_arguments", "encoder_call", "layer_arguments", "layer_call"]

NAMES = Names(
    stack="layer",
    layers={
        **{f"attention.self.{name}": f"attention.{name}" for name in ("query", "key", "value")},
        "attention.output.dense": "attention.dense",
        "attention.output.LayerNorm": "attention.layernorm",
        **{f"crossattention.self.{name}": f"cross_attention.{name}" for name in ("query", "key", "value")},
        "crossattention.output.dense": "cross_attention.dense",
        "crossattention.output.LayerNorm": "cross_attention.layernorm",
        "intermediate.dense": "output.dense1",
        "output.dense": "output.dense2",
        "output.LayerNorm": "output.layernorm",
    },
)


LAYER_PARTS = LayerParts(
    attention_dropout="attention.self.dropout",
    hidden_dropout=("attention.output.dropout", "output.dropout"),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    activation="intermediate.intermediate_act_fn",
)
PARTS = ModelParts(LAYER_PARTS, "layer")


def layer_arguments(config: Any, layer_idx: int | None = None) -> dict[str, Any] | None:
    """Of ``smp.nn.DistributedTransformerLayer``; None for a decoder, which stays as it is."""
    if config.is_decoder or config.add_cross_attention:
        return None
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": False,
        "post_layernorm": True,
    }


def encoder_arguments(config: Any) -> dict[str, Any] | None:
    """Of ``smp.nn.DistributedTransformer``."""
    layer = layer_arguments(config)
    return None if layer is None else {**layer, "num_layers": config.num_hidden_layers}


def layer_call(
    hidden_states: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """The forward hook of a layer."""
    given = {"encoder_hidden_states": encoder_hidden_states, "past_key_values": past_key_values}
    refuse_given("a BERT or RoBERTa layer", {**given, **kwargs})
    return ((hidden_states, _same_on_all(hidden_states, attention_mask)),), {}


def encoder_call(
    hidden_states: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    past_key_values: Any = None,
    use_cache: Any = None,
    **kwargs: Any,
) -> Any:
    """The forward hook of an encoder."""
    given = {"encoder_hidden_states": encoder_hidden_states, "past_key_values": past_key_values}
    refuse_given("a BERT or RoBERTa encoder", {**given, "use_cache": use_cache, **kwargs})
    return ((hidden_states, _same_on_all(hidden_states, attention_mask)),), {}


def _same_on_all(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask also where transformers leaves it out, because it hides nothing in this rank's own batch; on
    other ranks it is there, and all record the same calls."""
    if mask is not None or not Region.of_session().own_batches:
        return mask
    batch, length = hidden.shape[:2]
    return torch.zeros(batch, 1, length, length, dtype=hidden.dtype, device=hidden.device)
