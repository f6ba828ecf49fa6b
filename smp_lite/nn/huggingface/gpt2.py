"""GPT-2: its blocks, and the language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .as_built import Differs, LayerParts, of_causal_model
from .causal import block_hooks
from .names import Names, StateDict, with_causal_buffers

__all__ = [
    "get_hf_gpt2_transformer_layer_hooks",
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_layer_state_dict_to_hf_gpt2_block",
    "translate_state_dict_to_hf_gpt2",
]

NAMES = Names(
    stack="h",
    prefix="transformer.",
    layers={
        "ln_1": "attention.pre_layernorm",
        "attn.c_proj": "attention.dense",
        "ln_cross_attn": "cross_attention.pre_layernorm",
        "crossattention.q_attn": "cross_attention.query",
        "crossattention.c_proj": "cross_attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
    },
    fused={
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "crossattention.c_attn": ("cross_attention.key", "cross_attention.value"),
    },
    transposed=(
        *("attn.c_attn", "attn.c_proj", "crossattention.c_attn", "crossattention.q_attn"),
        *("crossattention.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
    outside={
        "transformer.wte": "word_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "layernorm",
    },
    ignored=("attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias"),
)


_OF_SCORES = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "scaling", "reorder_and_upcast_attn")


def _scores(block: Any, config: Any) -> dict[str, Any]:
    attention = block.attn
    scales, by_layer = attention.scale_attn_weights, attention.scale_attn_by_inverse_layer_idx
    if hasattr(attention, "scaling"):  # what computes, from transformers 4.48 on
        expected = attention.head_dim**-0.5 if scales else 1.0
        expected /= float(attention.layer_idx + 1) if by_layer else 1.0
        if attention.scaling != expected:
            raise Differs(
                f"attn.scaling is {attention.scaling!r}, and scale_attn_weights={scales} with "
                f"scale_attn_by_inverse_layer_idx={by_layer} makes it {expected!r}"
            )
    return {
        "scale_attention_scores": scales,
        "scale_attn_by_layer_idx": by_layer,
        "attention_in_fp32": attention.reorder_and_upcast_attn,
        "layer_idx": attention.layer_idx,
    }


LAYER_PARTS = LayerParts(
    attention_dropout="attn.attn_dropout",
    hidden_dropout=("attn.resid_dropout", "mlp.dropout"),
    norms=("ln_1", "ln_2"),
    activation="mlp.act",
    others=_scores,
    followed=frozenset(f"attn.{name}" for name in _OF_SCORES),
)
PARTS = of_causal_model(LAYER_PARTS)


def translate_state_dict_to_hf_gpt2(state_dict: StateDict, max_seq_len: int | None = None) -> StateDict:
    """From ``smp.nn``'s names to those of ``GPT2LMHeadModel``.

    Args:
        state_dict: whole tensors.
        max_seq_len: adds the masks of this length that transformers up to 4.2x kept; None: no masks.
    """
    return with_causal_buffers(NAMES.to_hf(state_dict), "attn", max_seq_len)


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: StateDict, max_seq_len: int | None = None
) -> StateDict:
    """From the names of ``GPT2LMHeadModel`` to ``smp.nn``'s; masks fall away, so ``max_seq_len`` has no
    effect."""
    return NAMES.to_smp(state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2


def translate_hf_block_state_dict_to_smdistributed(
    state_dict: StateDict, max_seq_len: int | None = None
) -> StateDict:
    """Of one ``GPT2Block``, without a prefix, to that of ``smp.nn.DistributedTransformerLayer``."""
    return NAMES.layer_to_smp(state_dict)


def translate_layer_state_dict_to_hf_gpt2_block(
    state_dict: StateDict, max_seq_len: int | None = None
) -> StateDict:
    """The reverse of :func:`translate_hf_block_state_dict_to_smdistributed`."""
    found = NAMES.layer_to_hf(state_dict)
    if max_seq_len is not None:
        masks = with_causal_buffers({"h.0.attn": None}, "attn", max_seq_len)
        found |= {f"attn.{kind}": masks[f"h.0.attn.{kind}"] for kind in ("bias", "masked_bias")}
    return found


def get_hf_gpt2_transformer_layer_hooks() -> tuple[
    Callable[..., Any], Callable[..., Any], Callable[..., Any]
]:
    """The init, forward and return hooks with which a ``GPT2Block`` becomes a
    ``smp.nn.DistributedTransformerLayer``, for ``smp.tp_register_with_module``."""
    hooks = block_hooks(layer_arguments, returns="hidden")
    return hooks.init, hooks.forward, hooks.result


def layer_arguments(config: Any, layer_idx: int | None = None) -> dict[str, Any] | None:
    """Of ``smp.nn.DistributedTransformerLayer``; None for one with cross-attention, which stays as it is."""
    if getattr(config, "add_cross_attention", False):
        return None
    hidden = config.n_embd
    return {
        "num_attention_heads": config.n_head,
        "attention_head_size": hidden // config.n_head,
        "hidden_size": hidden,
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * hidden,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.n_positions,
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
        "layer_idx": layer_idx,
    }


def model_arguments(config: Any) -> dict[str, Any] | None:
    """Of ``smp.nn.DistributedTransformerLMHead``."""
    layer = layer_arguments(config)
    if layer is None:
        return None
    return {
        **{name: value for name, value in layer.items() if name != "layer_idx"},
        "num_layers": config.n_layer,
        "vocab_size": config.vocab_size,
        "num_positions": config.n_positions,
        "embedding_dropout_prob": config.embd_pdrop,
        "tie_input_output_embedding": config.tie_word_embeddings,
    }
