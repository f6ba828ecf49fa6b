"""Language models: the notebooks' GPT, tied embeddings, masks, an encoder-decoder, an LSTM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from notebooks.gpt import GPT
from tests.models.case import Batch, Case
from tests.models.layers import (
    LENGTH,
    WIDTH,
    Attention,
    MLPBlock,
    mlp_blocks,
    random_generator,
    token_batch,
)

__all__ = ["CASES"]

VOCAB_SIZE = 64


def next_token_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Cross entropy of the logits ``[B, T, V]`` that ``model(tokens)`` gives."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def length_aware_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """As `next_token_loss`, for a model that is told how long each sample is."""
    logits = model(batch["tokens"], batch["lengths"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def byte_batch(num_samples: int) -> Batch:
    """Bytes; no lengths, since the model does not take them."""
    batch = token_batch(num_samples, vocab_size=256)
    return {"tokens": batch["tokens"], "targets": batch["targets"]}


def build_gpt() -> nn.Module:
    return GPT(vocab_size=256, d_model=32, num_blocks=4, num_heads=2, context=LENGTH)


def build_tied_gpt() -> nn.Module:
    model = GPT(vocab_size=256, d_model=32, num_blocks=4, num_heads=2, context=LENGTH)
    model.head.weight = model.token_embedding.weight
    return model


class MaskedEncoder(nn.Module):
    """The root turns lengths into a mask, which every block takes beside the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (positions < lengths[:, None])[:, None, None, :]  # [B, 1, 1, T]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x * mask[:, 0, 0, :, None])


class EncoderDecoder(nn.Module):
    """Three decoder blocks each read the encoder's output: one value, many consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.encoder = nn.ModuleList(Attention() for _ in range(3))
        self.target_embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.decoder = nn.ModuleList(
            nn.ModuleDict({"self": Attention(), "cross": Attention(), "mlp": MLPBlock()}) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        memory = self.source_embedding(source)
        for block in self.encoder:
            memory = block(memory)
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        x = self.target_embedding(tokens)
        for block in self.decoder:
            x = block["self"](x, mask=causal)
            x = block["cross"](x, source=memory)
            x = x + block["mlp"](x)
        return self.head(x)


def translation_batch(num_samples: int) -> Batch:
    """Source sentences of another length than the targets."""
    batch = byte_batch(num_samples)
    source = torch.randint(VOCAB_SIZE, (num_samples, 9), generator=random_generator(1))
    return {
        "source": source,
        "tokens": batch["tokens"] % VOCAB_SIZE,
        "targets": batch["targets"] % VOCAB_SIZE,
    }


def translation_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    logits = model(batch["source"], batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class Recurrent(nn.Module):
    """LSTM layers that hand on a tensor and a tuple of states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(x)


class HiddenList(nn.Module):
    """Collects hidden states in a list and passes the list itself to the last module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = mlp_blocks(4)
        self.readout = WeightedSum(5)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.embedding(tokens)
        hidden_states = [x]
        for block in self.blocks:
            x = x + block(x)
            hidden_states.append(x)
        return self.head(self.readout(hidden_states)), hidden_states


class WeightedSum(nn.Module):
    """Mixes a list of equally shaped tensors with learned weights."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((num_inputs,), 1.0 / num_inputs))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return (torch.stack(inputs, dim=-1) * self.weights).sum(-1)


def hidden_list_loss(model: Callable[..., Any], batch: Batch) -> tuple[Tensor, list[Tensor]]:
    logits, hidden_states = model(batch["tokens"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    return loss, hidden_states


CASES = (
    Case(
        "gpt",
        build_gpt,
        byte_batch,
        "the model of the training example: a plain chain of blocks",
        next_token_loss,
    ),
    Case(
        "gpt_tied",
        build_tied_gpt,
        byte_batch,
        "input and output embeddings share a weight: first and last command on one stage",
        next_token_loss,
    ),
    Case(
        "attention_mask",
        MaskedEncoder,
        token_batch,
        "a mask that the root makes from the batch reaches every block",
        length_aware_loss,
    ),
    Case(
        "encoder_decoder",
        EncoderDecoder,
        translation_batch,
        "cross attention: one value with consumers on several stages",
        translation_loss,
    ),
    Case(
        "lstm",
        Recurrent,
        byte_batch,
        "modules that take None at first and then a tuple of tensors, and return nested tuples",
        next_token_loss,
        pretendable=False,  # torch takes a fused cell for devices in Python, which is there for CUDA only
    ),
    Case(
        "hidden_list",
        HiddenList,
        byte_batch,
        "a mutable list collects values of all stages, is passed to a module and returned",
        hidden_list_loss,
        loss_of=lambda output: output[0],
    ),
)
