"""Which modules run, how often and on what, is decided by data."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program
from tests.programs.themes.side_state import Block, Stack, batches, fit

# Decided by data ----------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def branch_on_a_maximum(smp: Any, out: Any) -> None:
    """if x.max() > t: in blocks and in the container; microbatches take different ways."""

    class Guarded(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.abs().max() > 2.2:
                y = y / y.abs().max().detach()
            return y

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                if x.mean() > 0:
                    x = x - x.mean()
            return self.head(x)

    fit(smp, out, Model(Guarded), lr=0.3)


@program(stages=(2,), ranks=(2,))
def early_exit(smp: Any, out: Any) -> None:
    """BranchyNet: samples that are sure leave early, the rest goes on; logits are put together by masks."""

    class Branchy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.exits = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = x.new_zeros(x.shape[0], 4)
            depth = torch.zeros(x.shape[0], dtype=torch.long)
            alive = torch.arange(x.shape[0])
            for i, (block, leave) in enumerate(zip(self.blocks, self.exits, strict=True)):
                x = block(x)
                scores = leave(x)
                sure = scores.softmax(-1).amax(-1) > 0.45
                if i == len(self.blocks) - 1:
                    sure = torch.ones_like(sure)
                logits = logits.index_put((alive[sure],), scores[sure])
                depth[alive[sure]] = i
                alive, x = alive[~sure], x[~sure]
                if len(alive) == 0:
                    break
            return logits, depth

    model = smp.DistributedModel(Branchy())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Any:
        logits, depth = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss, depth

    for x, y in batches(smp):
        optimizer.zero_grad(set_to_none=False)
        loss, depth = train_step(model, x, y)
        out.value("loss", loss.reduce_mean())
        out.value("depth", depth.concat())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def adaptive_computation_time(smp: Any, out: Any) -> None:
    """ACT: a shared block runs till the halting probabilities of all samples are spent (while ... .any())."""

    class ACT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 8)
            self.block = Block()
            self.halt = nn.Linear(8, 1)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
            h = self.embed(x)
            total = x.new_zeros(x.shape[0])
            mean = torch.zeros_like(h)
            steps = 0
            while (total < 0.99).any() and steps < 5:
                h = self.block(h)
                p = torch.minimum(self.halt(h).sigmoid().squeeze(-1), 1 - total)
                mean = mean + p[:, None] * h
                total = total + p
                steps += 1
            return self.head(mean), total, steps

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, total, steps = model(x)
        return F.cross_entropy(logits, y) + 0.01 * total.mean() * steps

    fit(smp, out, ACT(), loss)


@program(stages=(2,), ranks=(2,))
def mixtral_experts(smp: Any, out: Any) -> None:
    """Mixtral's block: one_hot masks, torch.where, index_add_ per expert, router logits for the loss."""

    class Experts(nn.Module):
        def __init__(self, count: int = 4) -> None:
            super().__init__()
            self.gate = nn.Linear(8, count, bias=False)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.gate(x)
            weights, chosen = logits.softmax(-1).topk(2, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            y = torch.zeros_like(x)
            mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
            for i, expert in enumerate(self.experts):
                slot, row = torch.where(mask[i])
                if row.numel() == 0:
                    continue
                y.index_add_(0, row, torch.tanh(expert(x[row])) * weights[row, slot, None])
            return x + y, logits

    class Model(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # type: ignore[override]
            routers = []
            for block in self.blocks:
                x, logits = block(x)
                routers.append(logits)
            return self.head(x), tuple(routers)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, routers = model(x)
        every = torch.cat(routers).softmax(-1)
        used = F.one_hot(every.argmax(-1), 4).float().mean(0)
        return F.cross_entropy(logits, y) + 0.02 * 4 * (used * every.mean(0)).sum()

    fit(smp, out, Model(Experts), loss)


@program(stages=(2,), ranks=(2,))
def experts_with_a_capacity(smp: Any, out: Any) -> None:
    """Switch: experts are cut from one ModuleList over stages, tokens over a capacity are dropped."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.router = nn.Linear(8, 6)
            self.experts = nn.ModuleList(Block() for _ in range(6))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            gate, expert = self.router(x).softmax(-1).max(-1)
            order = torch.argsort(expert, stable=True)
            y = x.clone()
            for i in expert[order].unique().tolist():
                rows = order[expert[order] == i][:2]
                y[rows] = gate[rows, None] * self.experts[i](x[rows])
            return self.head(y)

    fit(smp, out, Switch(), lambda m, x, y: F.cross_entropy(m(x), y), steps=4)


@program(stages=(2,), ranks=(2,))
def sizes_out_of_tensors(smp: Any, out: Any) -> None:
    """Packed sequences: lengths.max().item() cuts the batch, pack_padded_sequence, last states gathered."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 8, padding_idx=0)
            self.first = nn.LSTM(8, 8, batch_first=True)
            self.second = nn.GRU(8, 8, batch_first=True, bidirectional=True)
            self.head = nn.Linear(16, 4)

        def forward(self, ids: Tensor) -> Tensor:
            lengths = (ids != 0).sum(1)
            ids = ids[:, : int(lengths.max())]
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(ids), lengths, batch_first=True, enforce_sorted=False
            )
            x, _ = nn.utils.rnn.pad_packed_sequence(self.first(packed)[0], batch_first=True)
            y, _ = self.second(x)
            last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, y.shape[-1])
            return self.head(y.gather(1, last).squeeze(1))

    model = smp.DistributedModel(Tagger())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))

    @smp.step
    def train_step(model: Any, ids: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids), y)
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        ids = torch.randint(1, 9, (6, 7), generator=generator)
        lengths = torch.randint(1, 8, (6,), generator=generator)
        ids = ids * (torch.arange(7) < lengths[:, None])
        optimizer.zero_grad()
        out.value("loss", train_step(model, ids, lengths % 4).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def dispatch_by_name(smp: Any, out: Any) -> None:
    """A ModuleDict of towers picked by a string; in a step, unused ones get no gradient."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(Block(), Block())
            self.towers = nn.ModuleDict({name: nn.Sequential(Block(), nn.Linear(8, 4)) for name in "abc"})

        def forward(self, x: Tensor, *, task: str, **ignored: Any) -> dict[str, Tensor]:
            return {task: self.towers[task](self.trunk(x))}

    model = smp.DistributedModel(Towers())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor, task: str) -> Any:
        logits = model(x, task=task, epoch=1)
        loss = F.cross_entropy(logits[task], y)
        model.backward(loss)
        return {"loss": loss, **logits}

    for task, (x, y) in zip("abca", batches(smp, steps=4), strict=True):
        optimizer.zero_grad()
        result = train_step(model, x, y, task)
        out.value("keys", sorted(result))
        out.value("loss", result["loss"].reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def recursion_over_trees(smp: Any, out: Any) -> None:
    """A tree network: the model calls its cell for nested tuples of words, recursively (gradients meet)."""

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = nn.Embedding(8, 8)
            self.cell = nn.Sequential(nn.Linear(16, 8), nn.Tanh())
            self.head = nn.Linear(8, 4)

        def encode(self, node: Any, x: Tensor) -> Tensor:
            if isinstance(node, int):
                return self.leaf(x[:, node])
            left, right = (self.encode(child, x) for child in node)
            return self.cell(torch.cat([left, right], -1))

        def forward(self, x: Tensor, tree: Any) -> Tensor:
            return self.head(self.encode(tree, x))

    model = smp.DistributedModel(Tree())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor, tree: Any) -> Tensor:
        loss = F.cross_entropy(model(x, tree), y)
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(9)
    for tree in (((0, 1), (2, 3)), (0, (1, (2, 3))), (((3, 2), 1), (0, 4))):
        x = torch.randint(0, 8, (4, 5), generator=generator)
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, x[:, 0] % 4, repr_free(tree)).reduce_mean())
        optimizer.step()
    out.model(model)


class Shape:
    """Holds what must not be split."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __iter__(self) -> Any:
        return iter(Shape(t) if isinstance(t, tuple) else t for t in self.tree)


def repr_free(tree: Any) -> Shape:
    return Shape(tree)


@program(stages=(2,), ranks=(2,))
def equilibrium_model(smp: Any, out: Any) -> None:
    """DEQ: a fixed point is sought under no_grad till the residual is small, then one step with gradient."""

    class DEQ(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject = nn.Linear(8, 8)
            self.f = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 4)
            self.iterations: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            u = self.inject(x)
            z = torch.zeros_like(u)
            with torch.no_grad():
                for i in range(12):  # noqa: B007
                    new = torch.tanh(0.5 * self.f(z) + u)
                    residual = (new - z).norm() / (new.norm() + 1e-8)
                    z = new
                    if residual < 1e-2:
                        break
            self.iterations.append(i)
            z = torch.tanh(0.5 * self.f(z.requires_grad_()) + u)
            return self.head(self.norm(z))

    net = DEQ()
    fit(smp, out, net)
    out.value("iterations", net.iterations)


@program(stages=(2,), ranks=(2,))
def layers_dropped_by_random(smp: Any, out: Any) -> None:
    """LayerDrop and stochastic depth by random.random() and torch.rand in the model's own forward."""

    class Dropping(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                if self.training and random.random() < 0.3:
                    continue
                keep = (torch.rand(x.shape[0], 1) > 0.1 * i).to(x.dtype)
                x = x + keep * (block(x) - x)
            return self.head(x)

    fit(smp, out, Dropping(), steps=4)
