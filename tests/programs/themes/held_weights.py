"""Scripts that take weights' own memory before the first step, and use it after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import program
from tests.programs.small import Net, batches, make_step


def trained(smp: Any, out: Any, net: nn.Module, after_step: Any = lambda: None) -> Any:
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        after_step()
    out.model(model)
    return model


@program(stages=(2,), ranks=(2,), replicas=(1, 2), always_on_ranks=True)
def clamped_by_their_data(smp: Any, out: Any) -> None:
    """As in Wasserstein GANs, by a list made before the first step, and one of rows."""
    net = Net()
    data = [parameter.data for parameter in net.parameters()]
    rows = [parameter.detach()[0] for parameter in net.parameters()]

    def clamp() -> None:
        for each in data:
            each.clamp_(-0.2, 0.2)
        for row in rows:
            row.mul_(0.9)

    trained(smp, out, net, clamp)


@program(stages=(2,), ranks=(2,))
def loaded_from_a_live_state(smp: Any, out: Any) -> None:
    """A state dict of the plain module follows the training, so loading it changes nothing."""
    net = Net()
    state = net.state_dict()
    model = trained(smp, out, net)
    model.load_state_dict(state)
    out.model(model)
    out.value("shapes", [tuple(value.shape) for value in state.values()])


@program(stages=(2,), ranks=(2,), refused_on_ranks=r"__float__: .* lives on stage [01], in another process")
def live_state_read(smp: Any, out: Any) -> None:
    """The plain module's state dict is read after training."""
    net = Net()
    state = net.state_dict()
    trained(smp, out, net)
    out.value("norms", [float(value.norm()) for value in state.values()])


@program(
    stages=(2,),
    ranks=(2,),
    refused_on_ranks=r"norm of a tensor that shared memory with the parameter 'stem.weight'",
)
def flat_memory_read(smp: Any, out: Any) -> None:
    """All weights lie in one row, of which each stage has a part."""
    net = Net()
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    nn.utils.vector_to_parameters(flat, net.parameters())
    trained(smp, out, net)
    out.value("norm", float(flat.norm()))


@program(stages=(2,), ranks=(2,), refused="share memory without being one parameter")
def tied_by_data(smp: Any, out: Any) -> None:
    """Two layers far from each other, tied as scripts once did."""
    net = Net()
    net.blocks[3].up.weight.data = net.blocks[0].up.weight.data
    trained(smp, out, net)


class WithVectors(Net):
    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.head = nn.Sequential(self.head, nn.Linear(3, 6))
        self.vectors = nn.Embedding.from_pretrained(vectors)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.vectors.weight.T


@program(stages=(2,), ranks=(2,))
def vectors_of_a_frozen_embedding(smp: Any, out: Any) -> None:
    """They do not train, and the script goes on using them."""
    vectors = torch.randn(3, 6)
    net = WithVectors(vectors)
    trained(smp, out, net)
    out.value("similar", vectors @ vectors.T)
