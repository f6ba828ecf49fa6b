"""Tiny models of transformers, and rows for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
NO_DROPOUT_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": 48, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**{**sizes, **NO_DROPOUT, **tokens, **changes})
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, attn_implementation="eager")
    )


def bert(num_labels: int = 3, **changes: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, **NO_DROPOUT_BERT, num_labels=num_labels, **changes)
    )


def token_bert() -> nn.Module:
    return transformers.BertForTokenClassification(
        transformers.BertConfig(**SMALL, **NO_DROPOUT_BERT, num_labels=5)
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=48,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["c_attn"])
    return peft.get_peft_model(gpt2(), config)


class Contrastive(nn.Module):
    """Its loss is of the rows of a batch against each other, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids).mean(1)
        scores = self.inner(x) @ self.head(x).T
        return {"loss": nn.functional.cross_entropy(scores, torch.arange(len(x))), "scores": scores}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.embed(input_ids).mean(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt2-dropout": lambda: gpt2(resid_pdrop=0.2),
    "llama": llama,
    "bert": bert,
    "regression": lambda: bert(1, problem_type="regression"),
    "several-labels": lambda: bert(3, problem_type="multi_label_classification"),
    "token-bert": token_bert,
    "t5": t5,
    "lora": lora,
    "contrastive": Contrastive,
    "batch-norm": Normed,
}


class Rows(torch.utils.data.Dataset):
    """``count`` rows, whose numbers of labels differ."""

    def __init__(self, kind: str, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(high: int, *size: int) -> torch.Tensor:
            return torch.randint(high, size, generator=generator)

        self.rows = []
        for i in range(count):
            ids = draw(47, 10) + 1
            labels: Any = ids.clone()
            if kind in ("bert", "contrastive", "batch-norm"):
                labels = int(draw(3, 1))
            elif kind == "regression":
                labels = torch.randn(1, generator=generator).item()
            elif kind == "several-labels":
                labels = draw(2, 3).float()
            else:
                labels = labels % 5 if kind == "token-bert" else labels
                labels[: (3 * i) % 8] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter([dict(row) for row in self.rows.rows])
