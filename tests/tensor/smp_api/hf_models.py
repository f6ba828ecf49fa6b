"""Tiny models of transformers, as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

VOCABULARY = 24


def _gpt2(**others: Any) -> Any:
    return transformers.GPT2Config(
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=4,
        use_cache=False,
        num_labels=3,
        classifier_dropout=0.0,
        **{"vocab_size": VOCABULARY, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **others},
    )


def _gptj(**others: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPTJConfig(rotary_dim=4, **{**sizes, **others})
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.use_cache = False
    return config


def _gptneo() -> Any:
    config = transformers.GPTNeoConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        hidden_size=16,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        window_size=3,
        use_cache=False,
    )
    config.resid_dropout = config.embed_dropout = config.attention_dropout = 0.0
    return config


def _bert(kind: Any) -> Any:
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=20,
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.num_labels = 3
    return config


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(_gpt2()),
    "gpt2 scaled": lambda: transformers.GPT2LMHeadModel(_gpt2(scale_attn_by_inverse_layer_idx=True)),
    "gpt2 blocks": lambda: transformers.GPT2ForTokenClassification(_gpt2()),
    "gptj": lambda: transformers.GPTJForCausalLM(_gptj()),
    "gptneo": lambda: transformers.GPTNeoForCausalLM(_gptneo()),
    "bert": lambda: transformers.BertForMaskedLM(_bert(transformers.BertConfig)),
    "bert classes": lambda: transformers.BertForTokenClassification(_bert(transformers.BertConfig)),
    "roberta": lambda: transformers.RobertaForMaskedLM(_bert(transformers.RobertaConfig)),
}
KINDS = {
    "gpt2": "DistributedTransformerLMHead",
    "gpt2 scaled": "DistributedTransformerLMHead",
    "gpt2 blocks": "DistributedTransformerLayer",
    "gptj": "DistributedTransformerLMHead",
    "gptneo": "DistributedTransformerLMHead",
    "bert": "DistributedTransformer",
    "bert classes": "DistributedTransformer",
    "roberta": "DistributedTransformer",
}


class Wrapped(nn.Module):
    """Gives a mask that hides the end of some rows, and returns loss and logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any) -> Any:
        mask = (ids[:, :1] % 2 == 0) | (ids.cumsum(-1) < 30)
        mask[:, 0] = True
        found = self.model(
            input_ids=ids, attention_mask=mask.long(), labels=(ids % 3).masked_fill(~mask, -100)
        )
        return found.logits.masked_fill(~mask.unsqueeze(-1), 0), found.loss


def build(name: str) -> nn.Module:
    return Wrapped(MODELS[name]())


ODD = 23
"""A vocabulary that two ranks cannot share equally."""
OF_ODD_VOCABULARY: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(_gpt2(vocab_size=ODD)),
    "gptj": lambda: transformers.GPTJForCausalLM(_gptj(vocab_size=ODD)),
}


NAMES = {f"hf {name}": functools.partial(build, name) for name in MODELS}
