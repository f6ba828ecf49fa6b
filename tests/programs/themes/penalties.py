"""Penalties on weights that are computed outside of what a step records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program
from tests.programs.small import Net, batches


def penalty(net: nn.Module) -> Tensor:
    return 0.01 * sum((p.square().sum() for p in net.parameters()), torch.zeros(()))


def before_the_call(smp: Any, out: Any) -> None:
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        cost = penalty(net)
        loss = F.cross_entropy(model(x), y) + cost
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), microbatches=1)
def before_the_model_is_called(smp: Any, out: Any) -> None:
    """Also in the first step, where that call cuts the model."""
    before_the_call(smp, out)


@program(
    ranks=(2,),
    replicas=(2,),
    microbatches=1,
    refused_on_ranks=r"made from the parameter '[a-z0-9_.]*' outside of the model",
    always_on_ranks=True,
)
def before_the_model_is_called_by_replicas(smp: Any, out: Any) -> None:
    """Its gradient would come after replicas have averaged theirs."""
    before_the_call(smp, out)


@program(
    stages=(1,),
    ranks=(1,),
    replicas=(2,),
    microbatches=1,
    refused_on_ranks=r"made from the parameter 'head.bias' outside of the model",
    always_on_ranks=True,
)
def before_the_step(smp: Any, out: Any) -> None:
    """The script computes it, and the step function adds it."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    cost = torch.zeros(())

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + cost
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        cost = penalty(net)
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)
