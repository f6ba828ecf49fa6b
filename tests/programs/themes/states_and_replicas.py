"""State dicts, replicas, and Python state, where ranks could come to differ."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.programs import program
from tests.programs.small import Block, Net, batches, make_step

# State and its copies -------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,))
def momentum_loaded_into_a_new_optimizer(smp: Any, out: Any) -> None:
    """After two steps a second optimizer is made over the same parameters and gets the first one's state
    dict."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 1:
            state = optimizer.state_dict()
            out.value("held", sorted(state["state"]))
            optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.5))
            optimizer.load_state_dict(state)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def sgd_after_adam(smp: Any, out: Any) -> None:
    """SWATS: the optimizer changes its kind after two steps, over groups by name of what has a gradient."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.02))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        if i == 2:
            with_gradient = [(n, p) for n, p in net.named_parameters() if p.grad is not None]
            out.value("with gradient", [n for n, _ in with_gradient])
            optimizer = smp.DistributedOptimizer(
                torch.optim.SGD(
                    [
                        {"params": [p for n, p in with_gradient if p.ndim > 1], "lr": 0.1},
                        {"params": [p for n, p in with_gradient if p.ndim <= 1], "lr": 0.3},
                    ],
                    momentum=0.9,
                )
            )
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def state_dict_edited(smp: Any, out: Any) -> None:
    """The optimizer's state dict is edited by index, momenta halved and rates set, and loaded again."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 1:
            state = copy.deepcopy(optimizer.state_dict())
            for index, entry in state["state"].items():
                entry["momentum_buffer"] = entry["momentum_buffer"] * (0.5 if index % 2 else 0.0)
            for group in state["param_groups"]:
                group["lr"] = 0.03
                group["nesterov"] = True
            optimizer.load_state_dict(state)
    out.value("groups", [(g["lr"], g["nesterov"], len(g["params"])) for g in optimizer.param_groups])
    out.model(model)


@program(stages=(2,), ranks=(2,))
def soups_of_state_dicts(smp: Any, out: Any) -> None:
    """Three state dicts of one run are averaged and loaded strictly; training goes on from the soup."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    kept: list[dict[str, Tensor]] = []
    for x, y in batches(smp, 4):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        kept.append({k: v.clone() for k, v in model.state_dict().items()})
        if len(kept) == 3:
            soup = {k: sum(s[k] for s in kept) / 3 for k in kept[0]}
            model.load_state_dict(soup)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def live_references_of_a_state_dict(smp: Any, out: Any) -> None:
    """A state dict taken of the network before training is written to in place after a step: it is the
    weights."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
    step = make_step(smp)
    live = net.state_dict()
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 1:
            for name in live:
                if name.endswith("bias"):
                    live[name].fill_(0.01)
                elif "down" in name:
                    live[name] *= 0.5
    out.model(model)


@program(stages=(2,), ranks=(2,))
def network_state_kept_and_restored(smp: Any, out: Any) -> None:
    """The bare network's state dict is deep-copied after a step and loaded back into it one step later."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5))
    step = make_step(smp)
    kept: Any = None
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 0:
            kept = copy.deepcopy(net.state_dict())
        if i == 2:
            out.value("missing", list(net.load_state_dict(kept).missing_keys))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def frozen_in_turn(smp: Any, out: Any) -> None:
    """Each step trains another third of the parameters; gradients that are left over must not be used."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 5)):
        for j, p in enumerate(net.parameters()):
            p.requires_grad_((i + j) % 3 != 0)
            if not p.requires_grad:
                p.grad = None
        optimizer.zero_grad(set_to_none=False)
        out.value("loss", step(model, x, y).reduce_mean())
        out.value("without", [j for j, p in enumerate(net.parameters()) if p.grad is None])
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def zeros_or_none(smp: Any, out: Any) -> None:
    """A head used every second step: whether it decays hangs on its gradient being None or zeros."""

    class TwoHeads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 3)

        def forward(self, x: Tensor, which: int) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.other(x) if which else self.head(x)

    model = smp.DistributedModel(TwoHeads())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, which: int) -> Tensor:
        loss = F.cross_entropy(model(x, which), y)
        model.backward(loss)
        return loss

    for i, (x, y) in enumerate(batches(smp, 4)):
        out.value("loss", train(model, x, y, i % 2).reduce_mean())
        out.value("used", [p.grad is not None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=i < 2)
    out.model(model)


class Fork(nn.Module):
    """One of its two layers is used, which nobody sees from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return torch.tanh(self.right(x) if which else self.left(x))


@program(stages=(2, 3), ranks=(2,), always_on_ranks=True)
def none_inside_of_blocks(smp: Any, out: Any) -> None:
    """Blocks that use another layer in every step: which gradients are None is asked on all ranks."""

    class Forks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.forks = nn.ModuleList(Fork() for _ in range(3))

        def forward(self, x: Tensor, which: int) -> Tensor:
            x = self.stem(x)
            for number, fork in enumerate(self.forks):
                x = fork(x, (which + number) % 2)
            return self.head(x)

    model = smp.DistributedModel(Forks())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, which: int) -> Tensor:
        loss = F.cross_entropy(model(x, which), y)
        model.backward(loss)
        return loss

    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", train(model, x, y, i % 2).reduce_mean())
        out.value("used", [p.grad is not None for p in model.parameters()])
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="assign a gradient")
def gradients_taken_from_some(smp: Any, out: Any) -> None:
    """Gradients of some tensors are deleted, bound to new ones, or shared between two layers before the step.
    Gradients of some tensors are deleted, bound to new ones, or shared between two layers before the step."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.02))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        net.blocks[0].up.bias.grad = None
        del net.blocks[3].up.bias.grad
        for block in net.blocks:
            block.norm.weight.grad = torch.ones(8) * 0.1
            block.norm.bias.grad = torch.full_like(block.norm.bias, 0.2)
            block.down.bias.grad = block.norm.bias.grad.clone()
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def optimizer_of_shuffled_parameters(smp: Any, out: Any) -> None:
    """The optimizer's list is sorted by size, not by module; a list by name is laid beside it by zip."""
    net = Net()
    model = smp.DistributedModel(net)
    named = sorted(net.named_parameters(), key=lambda pair: (-pair[1].numel(), pair[0]))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        places = {id(p): i for i, p in enumerate(optimizer.param_groups[0]["params"])}
        out.value("places", [places.get(id(p), -1) for p in net.parameters()])
        with torch.no_grad():
            for i, ((name, _), p) in enumerate(zip(named, optimizer.param_groups[0]["params"])):
                if "down.weight" in name:
                    p.mul_(1 - 0.01 * i)
                    p.grad.clamp_(-0.01 * i, 0.01 * i)
        optimizer.step()
    out.model(model)


# Replicas -------------------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def nothing_learnt_on_one_replica(smp: Any, out: Any) -> None:
    """The second replica's batch is masked out in every second step; clipping sees the mean of both."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = (losses * weight).sum() / weight.sum().clamp(min=1)
        model.backward(loss)
        return loss, weight.sum()

    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        weight = torch.ones(8) if (i + smp.dp_rank()) % 2 == 0 else torch.zeros(8)
        weight[: smp.dp_rank()] = 1
        loss, count = train(model, x, y, weight)
        out.value("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        out.value("loss", loss.reduce_mean())
        out.value("count", count.reduce_sum())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def other_groups_on_replicas(smp: Any, out: Any) -> None:
    """Random numbers differ between replicas (seed by dp_rank), noise on the weights must not: one generator.
    Random numbers differ between replicas (seed by dp_rank), noise on the weights must not: one generator."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    torch.manual_seed(100 + smp.dp_rank())
    shared = torch.Generator().manual_seed(3)
    for x, y in batches(smp):
        optimizer.zero_grad()
        x = x + 0.1 * torch.randn_like(x)
        out.value("loss", step(model, x, y).reduce_mean())
        with torch.no_grad():
            for p in model.parameters():
                p.grad += 0.01 * torch.randn(p.shape, generator=shared)
        optimizer.step()
    out.model(model)


# Python state ---------------------------------------------------------------------------------------------

TEMPERATURE: contextvars.ContextVar[float] = contextvars.ContextVar("TEMPERATURE", default=1.0)


class Pair(NamedTuple):
    hidden: Tensor
    scale: float


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]

    @property
    def last(self) -> Tensor:
        self.hidden.append(self.logits * 0.1)
        return self.hidden[-1]


class Recipe(dict):  # type: ignore[type-arg]
    """Missing keys fall back on a rule, and each look-up is counted."""

    looked = 0

    def __getitem__(self, key: str) -> float:
        type(self).looked += 1
        return super().get(key, 0.1 * len(key))


class PairBlock(nn.Module):
    made = 0

    def __init__(self, width: int, recipe: Recipe) -> None:
        super().__init__()
        type(self).made += 1
        self.name = "b" * type(self).made
        self.recipe = recipe
        self.linear = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, pair: Pair) -> Pair:
        hidden = pair.hidden + torch.tanh(self.linear(pair.hidden)) * self.recipe[self.name] * pair.scale
        hidden = hidden * torch.sigmoid(self.gate(hidden) / TEMPERATURE.get())
        return pair._replace(hidden=hidden, scale=pair.scale * 0.9)


@program(stages=(2, 3), ranks=(2,), static=True, refused_static="sets Recipe.looked")
def recipes_and_pairs(smp: Any, out: Any) -> None:
    """NamedTuples through blocks, a dict with its own look-up, a context variable set in the forward."""
    PairBlock.made = Recipe.looked = 0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            recipe = Recipe(bb=0.7)
            self.stem = nn.Linear(6, 8)
            self.blocks = nn.ModuleList(PairBlock(8, recipe) for _ in range(4))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Output:
            pair = Pair(self.stem(x), 1.0)
            hidden = []
            for i, block in enumerate(self.blocks):
                token = TEMPERATURE.set(1.0 + 0.5 * i)
                pair = block(pair)
                TEMPERATURE.reset(token)
                hidden.append(pair.hidden)
            return Output(self.head(pair.hidden), hidden)

    model = smp.DistributedModel(Model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        loss = F.cross_entropy(output.logits + output.last + output.last, y)
        loss = loss + 0.01 * sum(h.square().mean() for h in output.hidden)
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), static=True, refused_static="may take from")
def generators_of_batches(smp: Any, out: Any) -> None:
    """The step closes over a generator of noise levels and takes one for each microbatch; numpy makes a
    table."""

    def levels() -> Iterator[float]:
        value = 1.0
        while True:
            yield value
            value *= 0.8

    class Table(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor, level: float) -> Tensor:
            table = np.cos(np.arange(x.shape[-1]) * level).astype("float32")
            ramp = torch.linspace(0, level, x.shape[-1], dtype=x.dtype)
            return x + torch.relu(self.linear(x * torch.from_numpy(table))) * ramp

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 8)
            self.tables = nn.ModuleList(Table(8) for _ in range(4))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, level: float) -> Tensor:
            x = self.stem(x)
            for table in self.tables:
                x = table(x, level)
            return self.head(x)

    model = smp.DistributedModel(Model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    noise = levels()

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        level = next(noise)
        loss = F.cross_entropy(model(x, level), y)
        model.backward(loss)
        return loss, level

    for x, y in batches(smp):
        optimizer.zero_grad()
        loss, level = train(model, x, y)
        out.value("loss", loss.reduce_mean())
        out.value("levels", level)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="add_param_group after partition")
def block_grown_between_steps(smp: Any, out: Any) -> None:
    """Progressive stacking: a new block is appended to the list after a step, with a group of its own."""
    net = Net(depth=3)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 0:
            net.blocks.append(Block(8))
            optimizer.add_param_group({"params": net.blocks[-1].parameters(), "lr": 0.3})
    out.model(model)


@program(stages=(2,), ranks=(2,))
def parameter_bound_anew(smp: Any, out: Any) -> None:
    """A layer's weight is replaced by a new Parameter between steps, and put in the optimizer's group for it.
    A layer's weight is replaced by a new Parameter between steps, and put in the optimizer's group for it."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 0:
            for layer in (net.blocks[0].up, net.blocks[3].up):
                old = layer.weight
                layer.weight = nn.Parameter(torch.full((16, 8), 0.05))
                params = optimizer.param_groups[0]["params"]
                params[[q is old for q in params].index(True)] = layer.weight
    out.model(model)


@program(stages=(2,), ranks=(2,))
def weights_normalised_and_tied(smp: Any, out: Any) -> None:
    """weight_norm on some layers, an orthogonal map, and a change of the parametrization's original in
    between."""
    net = Net()
    for block in net.blocks:
        parametrizations.weight_norm(block.up)
    parametrizations.orthogonal(net.blocks[3].down)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            for block in net.blocks:
                block.up.parametrizations.weight.original0.clamp_(max=0.6)
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def functional_norm_on_buffers(smp: Any, out: Any) -> None:
    """F.batch_norm with buffers of the block, which are bound anew at every call; channels_last, size 1 by 1.
    F.batch_norm with buffers of the block, which are bound anew at every call; channels_last, size 1 by 1."""

    class Conv(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, channels, 1)
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("var", torch.ones(channels))

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x.contiguous(memory_format=torch.channels_last))
            mean, var = self.mean.clone(), self.var.clone()
            x = F.batch_norm(x, mean, var, training=True, momentum=0.3)
            self.mean, self.var = mean, var
            return torch.relu_(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[2], x.shape[3])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(6, 8, 1)
            self.convs = nn.ModuleList(Conv(8) for _ in range(4))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x[:, :, None, None])
            for conv in self.convs:
                x = x + conv(x)
            return self.head(x.flatten(1))

    model = smp.DistributedModel(Model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        out.value("statistics", sum(float(v.sum()) for k, v in model.state_dict().items() if "mean" in k))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="keeps state of its own")
def state_in_a_function(smp: Any, out: Any) -> None:
    """A custom autograd function counts its backwards in a class attribute and scales by what it counted in
    forward."""

    class Count(torch.autograd.Function):
        forwards = 0
        backwards = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            Count.forwards += 1
            ctx.scale = 1.0 / Count.forwards
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Count.backwards += 1
            return grad * ctx.scale

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.other(Count.apply(torch.tanh(self.linear(x))))

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    model = smp.DistributedModel(Model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.value("forwards", Count.forwards)
    out.model(model)


@program(stages=(2,), ranks=(2,), refused=r"double\(\) after partition")
def double_for_one_step(smp: Any, out: Any) -> None:
    """model.double() between steps and back to float, with the optimizer's state as it is."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        if i == 1:
            model.double()
            x = x.double()
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 1:
            model.float()
        out.value("kinds", sorted({str(p.dtype) for p in model.parameters()}))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def on_the_cpu_and_on(smp: Any, out: Any) -> None:
    """model.cpu() after a step, as before saving; then weights are clipped and training goes on."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.05))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 1:
            model.cpu()
            out.value("sum", sum(p.double().sum() for p in net.parameters()))
            with torch.no_grad():
                for p in net.parameters():
                    p.clamp_(-0.2, 0.2)
    out.model(model)
