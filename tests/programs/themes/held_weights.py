"""Scripts that take weights' own memory before the first step, and use it after."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class ChangesData(Net):
    """Between two calls of a block, by what it has kept of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.blocks[0].up.weight.data

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        self.kept.mul_(0.9)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@program(stages=(2, 3), ranks=(2,), refused=r"in the memory of the parameter 'blocks\.0\.up\.weight'")
def data_changed_in_a_step(smp: Any, out: Any) -> None:
    """The first call has not run by then."""
    trained(smp, out, ChangesData())


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


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, weight: x @ weight,
    "its data": lambda x, weight: x @ weight.data,
    "without gradient": lambda x, weight: x * weight.detach().norm(),
    "a number": lambda x, weight: x * float(weight.detach().sum()),
    "in a checkpoint": lambda x, weight: checkpoint(lambda h: h @ weight, x, use_reentrant=False),
    "a copy": lambda x, weight: x @ copy.deepcopy(weight),
    "in a list": lambda x, weight: x + torch.stack([weight, weight.T]).mean((0, 1)),
    "or without": lambda x, weight: _or_without(x, weight),
}


def _or_without(x: Tensor, weight: Tensor) -> Tensor:
    try:
        return x @ weight
    except RuntimeError:
        return x


class Keeps(nn.Module):
    """Uses a weight of a module that it does not hold."""

    def __init__(self, other: nn.Linear, way: str = "product") -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kept = [other.weight]
        self.use = WAYS[way]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.use(x, self.kept[0])


class Kept(nn.Module):
    def __init__(self, way: str = "product") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.near, self.far = Keeps(self.first, way), Keeps(self.first, way)
        self.before = Keeps(self.second, way)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.near(self.before(self.first(x).relu()))
        return self.head(self.far(self.second(x).relu()))


class InManyWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Kept(way) for way in WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


@program(
    stages=(2, 3),
    ranks=(2,),
    replicas=(1, 2),
    microbatches=1,
    static=True,
    refused_static="a parameter or buffer that is not its own",
    always_on_ranks=True,
)
def weights_of_others_in_lists(smp: Any, out: Any) -> None:
    """Blocks keep weights of others, of their own stage and of another one, before and after these."""
    trained(smp, out, Kept())


@program(stages=(2,), ranks=(2,), microbatches=2)
def weights_of_others_used_in_many_ways(smp: Any, out: Any) -> None:
    """Their data, numbers, copies of them, without a gradient, in a checkpoint."""
    trained(smp, out, InManyWays())


@program(stages=(2,), ranks=(2,), microbatches=1)
def weights_of_others_under_a_closure(smp: Any, out: Any) -> None:
    """The same, where the optimizer runs the step."""
    model = smp.DistributedModel(Kept())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            return step(model, x, y).reduce_mean()

        out.value("loss", optimizer.step(closure))
    out.model(model)


@program(
    stages=(2,), ranks=(2,), refused_on_ranks=r"sum of a tensor that shared memory with the parameter '[a-z]"
)
def weights_that_somebody_refers_to_weakly(smp: Any, out: Any) -> None:
    """The objects cannot become away; clipping knows them all the same."""
    net = Net()
    parameters = list(net.parameters())
    references = [weakref.ref(parameter) for parameter in parameters]
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        out.value("norm", nn.utils.clip_grad_norm_(parameters, 0.1))
        optimizer.step()
    out.model(model)
    out.value("sums", [reference().sum() for reference in references])
