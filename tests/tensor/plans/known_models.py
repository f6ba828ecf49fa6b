"""Models whose plans are ours, tiny: four heads, two layers in each stack, no dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.tensor.plans.architectures import perturb

__all__ = ["FAMILIES", "VARIANTS", "batch_of", "build_known"]

_SIZES: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": 97,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    # Heads of another width than the model; buckets and distances that sequences of 12 reach.
    "t5": {
        "d_model": 24,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 97,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    },
    "vit": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": 5,
    },
}
_CLASSES = {
    "bert": "BertForPreTraining",
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}

FAMILIES = tuple(_CLASSES)

VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert decoder": ("bert", "BertLMHeadModel", {"is_decoder": True, "add_cross_attention": True}),
    "bert without heads": ("bert", "BertModel", {}),
    "gpt2 decoder": ("gpt2", "GPT2LMHeadModel", {"add_cross_attention": True}),
    "gpt2 classifier": ("gpt2", "GPT2ForSequenceClassification", {"pad_token_id": 0}),
    "t5 gated": (
        "t5",
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5 encoder": ("t5", "T5EncoderModel", {}),
    "t5 tokens": ("t5", "T5ForTokenClassification", {}),
    "vit masked": ("vit", "ViTForMaskedImageModeling", {"encoder_stride": 4}),
    "vit biases": ("vit", "ViTForImageClassification", {"qkv_bias": False}),
}
"""Name -> family, class, what its configuration has beside the family's."""


def build_known(
    name: str, attention: str = "eager", dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    """A model of a family or of a variant; the same on every rank."""
    import transformers

    family, kind, more = VARIANTS.get(name) or (name, _CLASSES[name], {})
    config = transformers.AutoConfig.for_model(family, **{**_SIZES[family], **more, **changes})
    torch.manual_seed(0)
    build: Callable[..., nn.Module] = getattr(transformers, kind)._from_config
    return perturb(build(config, attn_implementation=attention).to(dtype))


def batch_of(name: str, number: int = 0, rows: int = 4, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of the model's call; another number, other ones. Masks leave out the ends of some rows."""
    family, kind, _ = VARIANTS.get(name) or (name, _CLASSES[name], {})
    random = torch.Generator().manual_seed(number)

    def tokens(length: int = 12) -> torch.Tensor:
        return torch.randint(3, 97, (rows, length), generator=random)

    if family == "vit":
        pixels = torch.randn(rows, 3, 8, 8, generator=random, dtype=dtype)
        if kind == "ViTForMaskedImageModeling":
            masked = torch.tensor([True, False, False, True]).expand(rows, 4)
            return {"pixel_values": pixels, "bool_masked_pos": masked}
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (rows,), generator=random)}
    mask = torch.ones(rows, 12, dtype=torch.long)
    mask[1::2, 9:] = 0
    found: dict[str, Any] = {"input_ids": tokens(), "attention_mask": mask}
    if name.endswith("decoder"):
        found["encoder_hidden_states"] = torch.randn(rows, 7, 32, generator=random, dtype=dtype)
    if kind == "GPT2ForSequenceClassification":
        found["labels"] = torch.randint(0, 2, (rows,), generator=random)
    elif kind == "T5ForTokenClassification":
        found["labels"] = torch.randint(0, 2, (rows, 12), generator=random)
    elif family == "t5" and kind == "T5ForConditionalGeneration":
        found["labels"] = tokens(9)
    elif kind not in ("BertModel", "T5EncoderModel"):
        found["labels"] = tokens()
    if kind == "BertForPreTraining":
        found["next_sentence_label"] = torch.randint(0, 2, (rows,), generator=random)
    return found
