"""Models people bring: GPT-2, BERT, T5 and ViT of ``transformers``, tiny and randomly initialised.

Key/value caches are off, as in any training: a cache is an argument that modules mutate. The steps
return the model's whole output object, a dict subclass, since user code usually does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.case import Batch, Case
from tests.models.layers import random_generator, token_batch

__all__ = ["CASES"]

VOCAB_SIZE = 64


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=16,
            n_embd=16,
            n_layer=4,
            n_head=2,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            use_cache=False,
            num_labels=3,
        )
    )


def build_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB_SIZE,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def build_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=3,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )


def causal_batch(num_samples: int) -> Batch:
    """The labels of a causal model are its inputs: it shifts them itself."""
    tokens = token_batch(num_samples, VOCAB_SIZE)["tokens"]
    return {"input_ids": tokens, "labels": tokens}


def padded_batch(num_samples: int) -> Batch:
    """Sentences of different lengths with their attention mask, and a class each."""
    batch = token_batch(num_samples, VOCAB_SIZE)
    mask = torch.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]
    return {
        "input_ids": batch["tokens"] * mask,
        "attention_mask": mask.long(),
        "labels": torch.arange(num_samples) % 3,
    }


def translation_batch(num_samples: int) -> Batch:
    batch = padded_batch(num_samples)
    batch["labels"] = token_batch(num_samples, VOCAB_SIZE, length=5)["targets"]
    return batch


def image_batch(num_samples: int) -> Batch:
    return {
        "pixel_values": torch.randn(num_samples, 3, 8, 8, generator=random_generator()),
        "labels": torch.arange(num_samples) % 3,
    }


def call_with_labels(model: Callable[..., Any], batch: Batch) -> Any:
    return model(**batch)


def loss_entry(output: Any) -> Tensor:
    return output["loss"]


def _case(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    notes: str,
    *,
    exact: bool = True,
) -> Case:
    return Case(
        name,
        build,
        batch,
        notes,
        call_with_labels,
        loss_of=loss_entry,
        exact=exact,
        requires="transformers",
    )


CASES = (
    _case("gpt2", build_gpt2, causal_batch, "tied embeddings, causal mask"),
    _case("bert", build_bert, padded_batch, "padding mask, pooler, classifier"),
    _case(
        "t5",
        build_t5,
        translation_batch,
        "encoder-decoder, shared embeddings, position biases that later blocks reuse",
    ),
    _case("vit", build_vit, image_batch, "patch embedding, class token held by the embeddings"),
)
