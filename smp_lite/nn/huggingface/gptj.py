"""GPT-J: its blocks, and the language model."""

from __future__ import annotations

from typing import Any

from .as_built import LayerParts, of_causal_model
from .names import Names, StateDict, with_causal_buffers

__all__ = [
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_gptj_state_dict_to_smdistributed_gptj",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]

NAMES = Names(
    stack="h",
    prefix="transformer.",
    layers={
        "ln_1": "attention.pre_layernorm",
        "attn.q_proj": "attention.query",
        "attn.k_proj": "attention.key",
        "attn.v_proj": "attention.value",
        "attn.out_proj": "attention.dense",
        "mlp.fc_in": "output.dense1",
        "mlp.fc_out": "output.dense2",
    },
    outside={"transformer.wte": "word_embedding", "transformer.ln_f": "layernorm"},
    ignored=("attn.bias", "attn.masked_bias", "attn.embed_positions"),
)


LAYER_PARTS = LayerParts(
    attention_dropout="attn.attn_dropout",
    hidden_dropout=("attn.resid_dropout", "mlp.dropout"),
    norms=("ln_1",),
    activation="mlp.act",
)
PARTS = of_causal_model(LAYER_PARTS)


def translate_state_dict_to_hf_gptj(state_dict: StateDict, max_seq_len: int | None = None) -> StateDict:
    """From ``smp.nn``'s names to those of ``GPTJForCausalLM``; ``max_seq_len`` as for GPT-2."""
    return with_causal_buffers(NAMES.to_hf(state_dict), "attn", max_seq_len)


def translate_hf_state_dict_to_smdistributed_gptj(
    state_dict: StateDict, max_seq_len: int | None = None
) -> StateDict:
    """From the names of ``GPTJForCausalLM`` to ``smp.nn``'s; ``max_seq_len`` has no effect."""
    return NAMES.to_smp(state_dict)


translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj


def layer_arguments(config: Any, layer_idx: int | None = None) -> dict[str, Any]:
    """Of ``smp.nn.DistributedTransformerLayer``."""
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
        "attention_in_fp32": True,
        "rotary_dim": config.rotary_dim or hidden // config.n_head,
        "use_qkv_bias": False,
        "use_attn_dense_bias": False,
        "parallel_attn_output": True,
    }


def model_arguments(config: Any) -> dict[str, Any]:
    """Of ``smp.nn.DistributedTransformerLMHead``."""
    return {
        **layer_arguments(config),
        "num_layers": config.n_layer,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "embedding_dropout_prob": config.embd_pdrop,
        "tie_input_output_embedding": config.tie_word_embeddings,
        "use_lm_head_bias": True,
    }
