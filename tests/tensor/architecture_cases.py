"""What the tests of transformers' architectures run in the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.nn.layout import layout_of, whole_of
from tests.tensor.plans.architectures import build

PARAMETERS = {
    "partitions": 2,
    "microbatches": 2,
    "tensor_parallel_degree": 2,
    "prescaled_batch": True,
    "ddp": True,
}


def batch_of(step: int) -> torch.Tensor:
    return torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(name: str, attention: str) -> dict[str, Any]:
    smp.init(PARAMETERS)
    net = build(name, attention)
    smp.parallelize(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        model.backward(loss)
        return loss

    losses = []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(step(batch_of(number)).reduce_mean().item())
        optimizer.step()
    found, num_split = {}, 0
    for parameter, tensor in model.local_named_parameters():
        layout = layout_of(tensor)
        found[parameter] = tensor.detach() if layout is None else whole_of(tensor, layout)
        num_split += layout is not None
    return {"losses": losses, "parameters": found, "num_split": num_split}
