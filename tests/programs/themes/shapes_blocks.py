"""Blocks, each on one stage, that do more than map tensors: they fill lists, hold state, loop over data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program

MANUAL = {"auto_partition": False, "default_partition": 0}


def data(seed: int, batch: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, generator=g), torch.randint(0, 3, (batch,), generator=g)


def train(smp: Any, out: Any, net: nn.Module, steps: int = 3) -> None:
    """The loop that all programs here share."""
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Any:
        logits, extra = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss, extra

    for i in range(steps):
        optimizer.zero_grad()
        loss, extra = train_step(model, *data(i))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("extra", extra)
    out.model(model)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(12, 12), nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Body(nn.Module):
    """A stem, four blocks and a head, on stages 0 and 1 in halves."""

    def __init__(self, smp: Any, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList()
        for i in range(4):
            with smp.partition(i // 2):
                self.blocks.append(block())
        with smp.partition(1):
            self.head = nn.Linear(12, 3)


class Collecting(Layer):
    def forward(self, x: Tensor, hidden_states: list[Tensor]) -> Tensor:
        x = super().forward(x)
        hidden_states.append(x)
        return x


class CollectingBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x, hidden_states = self.stem(x), []
        for block in self.blocks:
            x = block(x, hidden_states)
        return self.head(x + sum(hidden_states)), len(hidden_states)


@program(stages=(2,), ranks=(2,), parameters=MANUAL)
def list_filled_by_blocks(smp: Any, out: Any) -> None:
    """Each block appends its hidden state to a list that it is given; the container sums them."""
    train(smp, out, CollectingBody(smp, Collecting))


@program(stages=(2, 3))
def list_filled_by_blocks_auto(smp: Any, out: Any) -> None:
    """The same, cut by the library."""
    train(smp, out, CollectingBody(smp, Collecting))


class Writing(Layer):
    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        y = super().forward(x)
        cache["residual"] = cache.get("residual", 0) + x
        return y


class WritingBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x, cache = self.stem(x), {}
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x + cache["residual"]), None


@program(stages=(2,), ranks=(2,), parameters=MANUAL)
def dict_filled_by_blocks(smp: Any, out: Any) -> None:
    """Each block adds its input to an entry of a dict that it is given."""
    train(smp, out, WritingBody(smp, Writing))


@dataclass
class State:
    hidden: Tensor
    total: Any = 0


class Mutating(Layer):
    def forward(self, state: State) -> State:
        state.hidden = super().forward(state.hidden)
        state.total = state.total + state.hidden.mean()
        return state


class MutatingBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        state = State(self.stem(x))
        for block in self.blocks:
            block(state)
        return self.head(state.hidden), state.total


@program(stages=(2,), ranks=(2,), parameters=MANUAL)
def dataclass_changed_by_blocks(smp: Any, out: Any) -> None:
    """A dataclass is changed by each block, whose result the container ignores."""
    train(smp, out, MutatingBody(smp, Mutating))


class Box:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Boxing(Layer):
    def forward(self, box: Box) -> Box:
        return Box(super().forward(box.hidden))


class BoxBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        box = Box(self.stem(x))
        for block in self.blocks:
            box = block(box)
        return self.head(box.hidden), None


@program(stages=(2,), ranks=(2,), parameters=MANUAL)
def objects_through_blocks(smp: Any, out: Any) -> None:
    """Features travel in an object of a plain class, as DETR's NestedTensor or Detectron2's Instances."""
    train(smp, out, BoxBody(smp, Boxing))


class Summing(Layer):
    def forward(self, parts: Iterator[Tensor]) -> Tensor:
        return super().forward(sum(parts))


class SummingBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(part * k for k, part in enumerate((x, x, -x), start=1))
        return self.head(x), None


@program(stages=(2,), ranks=(2,), parameters=MANUAL)
def generator_into_block(smp: Any, out: Any) -> None:
    """A generator expression is the argument of a block."""
    train(smp, out, SummingBody(smp, Summing))


SHARED: dict[str, Any] = {}


class Publishing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        skip = SHARED.get("skip")
        SHARED["skip"] = x
        y = super().forward(x)
        return y if skip is None or skip.shape != y.shape else y + 0.1 * skip


class PublishingBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        SHARED.clear()
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x), None


@program(stages=(2,), ranks=(2,), parameters=MANUAL)
def skips_through_a_global(smp: Any, out: Any) -> None:
    """Blocks hand a skip to the next by a global dict, emptied at the start of each forward."""
    SHARED.clear()
    train(smp, out, PublishingBody(smp, Publishing))
    SHARED.clear()


class Sums:
    total: Any = 0.0
    calls = 0


class Measuring(Layer):
    def forward(self, x: Tensor) -> Tensor:
        Sums.calls += 1
        Sums.total = Sums.total + x.detach().abs().mean()
        return super().forward(x)


class MeasuringBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x), None


@program(stages=(2,), parameters=MANUAL)
def blocks_measure_into_a_class(smp: Any, out: Any) -> None:
    """Blocks count their calls and sum the size of their inputs in class attributes of a global."""
    Sums.total, Sums.calls = 0.0, 0
    train(smp, out, MeasuringBody(smp, Measuring))
    out.value("calls", Sums.calls)
    out.value("total", float(Sums.total))


class Stateful(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None
        self.ages: list[int] = []

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        self.ages.append(len(self.ages))
        h = x if self.memory is None else x + self.memory
        steps = 0
        while h.norm() > 4 and steps < 4:
            h = super().forward(h) * 0.9
            steps += 1
        self.memory = h.detach().mean(0)
        return h[h.sum(-1) > -1e9], float(steps + len(self.ages))


class StatefulBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:
        x, counts = self.stem(x), []
        for block in self.blocks:
            x, count = block(x)
            counts.append(count)
        return self.head(x), counts


@program(stages=(2,), ranks=(2,), pipelines=("interleaved", "simple"), parameters=MANUAL)
def stateful_blocks(smp: Any, out: Any) -> None:
    """Blocks remember the last batch, loop until a norm is small, and return a Python float."""
    train(smp, out, StatefulBody(smp, Stateful))


class GraphConvolution(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(before, after) * 0.3),
            nn.Parameter(torch.zeros(after)),
        )

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return torch.spmm(adj, torch.mm(x, self.weight)) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2, self.gc3 = (
            GraphConvolution(6, 12),
            GraphConvolution(12, 12),
            GraphConvolution(12, 3),
        )

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.relu(self.gc1(x, adj))
        return F.log_softmax(self.gc3(F.relu(self.gc2(x, adj)), adj), dim=1)


@program(stages=(2, 3), ranks=(2,), microbatches=1)
def gcn_sparse(smp: Any, out: Any) -> None:
    """Kipf's GCN on the whole graph as one batch: a sparse adjacency matrix, torch.spmm in the blocks."""
    model = smp.DistributedModel(GCN())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4))
    x, y = data(0)
    dense = torch.eye(8) + torch.eye(8).roll(1, 0) + torch.eye(8).roll(-1, 0)
    adj = (dense / dense.sum(1, keepdim=True)).to_sparse()

    @smp.step(non_split_inputs=["adj", "idx"])
    def train_step(x: Tensor, y: Tensor, adj: Tensor, idx: Tensor) -> Tensor:
        output = model(x, adj)
        loss = F.nll_loss(output[idx], y[idx])
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(x, y, adj, torch.arange(5)).reduce_mean())
        optimizer.step()
    out.model(model)


class SkippingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(x) + super().forward(x)


class InplaceBody(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x) * 1.0
        first = x
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return self.head(x + first), first.min()


@program(stages=(2,), ranks=(2,), parameters=MANUAL)
def inplace_across_stages(smp: Any, out: Any) -> None:
    """A block changes its argument in place (relu_), and the container uses that tensor again later."""
    train(smp, out, InplaceBody(smp, SkippingLayer))
