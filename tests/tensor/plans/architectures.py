"""Architectures of ``transformers``, tiny: four heads, two of keys, an odd vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp_lite.nn.plans.source import words

__all__ = ["ARCHITECTURES", "MORE", "NOT_EXACT", "batch", "build", "build_by_default", "perturb"]

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "phi": {"qk_layernorm": False},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "cohere": {"use_qk_norm": False},
    "starcoder2": {},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    "glm": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
}
"""With plans of their own; each in the default tests."""

MORE = sorted(
    words(
        """
    afmoe arcee aria_text axk1 bailing_hybrid beam cohere2 cohere2_moe cohere_compass_text cwm
    deepseek_v2 deepseek_v3 deepseek_v4 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint
    gemma gemma3_text gemma4_text gemma4_unified_text glm4 glm4_moe glm4_moe_lite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jamba kimi_linear kolibri1 laguna lfm2_moe llama4 llama4_text
    longcat_flash mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral
    ministral3 nanochat nemotron nemotron_h olmo olmo3 olmo_hybrid olmoe phi4_multimodal phimoe
    qwen2_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text seed_oss smollm3 solar_open
    vaultgemma youtu
    """
    )
)
"""Others with plans of their own, by the sweep's configurations."""

NOT_EXACT = {
    "apertus": r"act_fn \(XIELUActivation\), whose parameters are whole",
    "axk2": "attention_interface",  # what an indexer gives has no gradient, but one cannot see that
    "deepseek_v32": "attention_interface",
    "doge": r"q_norm \(DogeRMSNorm\), whose parameters are whole",
    "dots3_note_text": "needs qk_rope_head_dim",
    "gemma3n_text": "takes mean of this rank's part",
    "glm_moe_dsa": "attention_interface",
    "hy_v4": "attention_interface",
    "inkling2_text": "cuts what a colwise layer gives",
    "inkling_text": "cuts what a colwise layer gives",
}
"""Whose plans would not give the dense model's results, or cannot be seen to."""


def build(
    name: str,
    attention: str = "eager",
    dtype: torch.dtype = torch.float64,
    experts: str = "eager",
    **changes: Any,
) -> nn.Module:
    """A causal language model of this type; the same on every rank.

    Args:
        experts: how mixtures compute; the faster ways know no float64.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**_COMMON, **ARCHITECTURES.get(name, {}), **changes}
    config = AutoConfig.for_model(name, **values)
    config._experts_implementation = experts
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return perturb(model.to(dtype))


def perturb(model: nn.Module) -> nn.Module:
    """Norms that are not ones and biases that are not zeros, so that what is lost is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(vocab_size: int = 97) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, vocab_size, (2, 12))
    return {"input_ids": tokens, "labels": tokens}


def build_by_default(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64) -> nn.Module:
    """A causal language model of any type, with the sweep's tiny configuration; the same on every rank."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.sweep.configurations import SCALES, tiny

    config = tiny(CONFIG_MAPPING[name], SCALES[0])
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return perturb(model.to(dtype))
