"""GPT-Neo: its blocks, and the language model."""

from __future__ import annotations

from typing import Any

from .as_built import LayerParts, of_causal_model
from .names import Names, StateDict, with_causal_buffers

__all__ = [
    "translate_hf_gptneo_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]

NAMES = Names(
    stack="h",
    prefix="transformer.",
    layers={
        "ln_1": "attention.pre_layernorm",
        "attn.attention.q_proj": "attention.query",
        "attn.attention.k_proj": "attention.key",
        "attn.attention.v_proj": "attention.value",
        "attn.attention.out_proj": "attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
    },
    outside={
        "transformer.wte": "word_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "layernorm",
    },
    ignored=("attn.attention.bias", "attn.attention.masked_bias"),
)


def _window(block: Any, config: Any) -> dict[str, Any]:
    return {"window_size": config.window_size if block.attn.attention_type == "local" else None}


LAYER_PARTS = LayerParts(
    attention_dropout="attn.attention.attn_dropout",
    hidden_dropout=("attn.attention.resid_dropout", "mlp.dropout"),
    norms=("ln_1", "ln_2"),
    activation="mlp.act",
    others=_window,
    followed=frozenset(["attn.attention_type", "attn.attention.attention_type"]),
)
PARTS = of_causal_model(LAYER_PARTS)


def translate_state_dict_to_hf_gptneo(state_dict: StateDict, max_seq_len: int | None = None) -> StateDict:
    """From ``smp.nn``'s names to those of ``GPTNeoForCausalLM``; ``max_seq_len`` as for GPT-2."""
    return with_causal_buffers(NAMES.to_hf(state_dict), "attn.attention", max_seq_len)


def translate_hf_state_dict_to_smdistributed_gptneo(
    state_dict: StateDict, max_seq_len: int | None = None
) -> StateDict:
    """From the names of ``GPTNeoForCausalLM`` to ``smp.nn``'s; ``max_seq_len`` has no effect."""
    return NAMES.to_smp(state_dict)


translate_hf_gptneo_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo


def layer_arguments(config: Any, layer_id: int | None = None) -> dict[str, Any]:
    """Of ``smp.nn.DistributedTransformerLayer``; a local layer has a window."""
    hidden = config.hidden_size
    is_local = layer_id is not None and config.attention_layers[layer_id] == "local"
    return {
        "num_attention_heads": config.num_heads,
        "attention_head_size": hidden // config.num_heads,
        "hidden_size": hidden,
        "intermediate_size": config.intermediate_size if config.intermediate_size is not None else 4 * hidden,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attention_scores": False,
        "attention_in_fp32": True,
        "use_qkv_bias": False,
        "window_size": config.window_size if is_local else None,
    }


def model_arguments(config: Any) -> dict[str, Any]:
    """Of ``smp.nn.DistributedTransformerLMHead``."""
    windows = [config.window_size if kind == "local" else None for kind in config.attention_layers]
    return {
        **layer_arguments(config),
        "num_layers": config.num_layers,
        "layer_options": [{"window_size": window} for window in windows],
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "embedding_dropout_prob": float(config.embed_dropout),
        "tie_input_output_embedding": config.tie_word_embeddings,
    }
