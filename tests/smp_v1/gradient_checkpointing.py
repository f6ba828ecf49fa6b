"""transformers' ``gradient_checkpointing_enable()`` on tiny models: what a few steps give and keep."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import smp_lite as smp
from tests.allocated import memory_profile, most_and_left

__all__ = ["on_ranks", "trained"]


def _gpt2() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=8, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"gpt2": _gpt2, "llama": _llama}
ACTIVATIONS = {"gpt2": (torch, "tanh"), "llama": (torch.nn.functional, "silu")}
"""What each block of the model calls once."""


class Counted:
    """A function whose calls are counted; unlike a mock it does not hold what it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.count = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


def trained(model_name: str, use_reentrant: bool | None) -> dict[str, Any]:
    """Losses, gradients of the last step, calls of activations in it, and the most bytes it took.

    Args:
        model_name: gpt2 or llama.
        use_reentrant: of checkpointing; None: without.
    """
    torch.manual_seed(0)
    net: Any = MODELS[model_name]()
    if use_reentrant is not None:
        net.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model = smp.DistributedModel(net)
    model.train()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    losses, peak, runs = [], 0, 0
    holder, activation = ACTIVATIONS[model_name]
    for i in range(3):
        ids = (torch.arange(16 * 32).reshape(16, 32) * (i + 3)) % 64
        optimizer.zero_grad()
        gc.collect()  # what is freed in the step must have been made in it
        with (
            mock.patch.object(holder, activation, Counted(getattr(holder, activation))) as counted,
            memory_profile() as profile,
        ):
            losses.append(float(step(model, ids).reduce_mean()))
        runs, peak = counted.count, most_and_left(profile)[0]
        if i < 2:
            optimizer.step()
    gradients = {name: p.grad for name, p in model.local_named_parameters()}
    return {"losses": losses, "gradients": gradients, "runs": runs, "peak": peak}


def on_ranks(model_name: str, use_reentrant: bool | None) -> dict[str, Any]:
    smp.init()
    return trained(model_name, use_reentrant)
