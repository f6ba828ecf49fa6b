"""What the tests of Colossal-AI's tensor modes run in the ranks: a transformer of split layers, trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.nn.grid import PartDropout
from smp_lite.nn.layout import layout_of, whole_of
from smp_lite.nn.one_d import (
    Attention,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from smp_lite.nn.sequence import cross_entropy_sequence
from smp_lite.nn.three_d import Layout3D, cross_entropy_3d
from smp_lite.nn.two_d import Mesh2D, cross_entropy_2d
from smp_lite.session import current
from smp_lite.systems.colossal import tensor_mesh
from tests.tensor.grid import cases_2d, cases_3d
from tests.tensor.grid.dense import Transformer, converted
from tests.tensor.sequence import cases as cases_sequence

WORDS, TOKENS, FEATURES, HEADS, KV_HEADS, BATCH = 11, 8, 16, 4, 2, 16


def batches(num_steps: int, replica: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and targets, every row other than the rest, of one replica."""
    generator = torch.Generator().manual_seed(7 + replica)
    return [
        torch.randint(0, WORDS, (2, BATCH, TOKENS), generator=generator).unbind() for _ in range(num_steps)
    ]


def dense_model(dtype: torch.dtype) -> Transformer:
    torch.manual_seed(0)
    return Transformer(WORDS, TOKENS, FEATURES, HEADS, KV_HEADS, dtype=dtype)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    # A large eps: Adam divides by gradients that may be nothing but rounding.
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4)


class OfWholeBatches(nn.Module):
    """Takes this rank's part of the ids."""

    def __init__(self, net: nn.Module, split: Callable[..., Any], positions: Callable[[], Any]) -> None:
        super().__init__()
        self.net, self.split, self.positions = net, split, positions

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(self.split(ids), self.positions())


def split_model(dtype: torch.dtype) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """The model in layers of the configuration's mode, and its loss of logits and whole targets."""
    plan = current().plan
    assert plan is not None
    dense, mesh = dense_model(dtype), tensor_mesh()

    def whole_positions() -> torch.Tensor:
        return torch.arange(TOKENS)

    if plan.tensor.mode == "1d":
        model = OfWholeBatches(split_1d(dense, mesh), lambda ids: ids, whole_positions)
        return model, lambda logits, y: vocab_parallel_cross_entropy(logits, y, axis=mesh, vocab_size=WORDS)
    if plan.tensor.mode == "3d":
        net = cases_3d.split_transformer(dense, mesh, Layout3D.IN)
        model = OfWholeBatches(net, lambda ids: mesh.split_batch(ids, "in"), whole_positions)
        return model, lambda logits, y: cross_entropy_3d(
            logits, mesh.split_batch(y, "out"), mesh, "out", WORDS
        )
    if plan.tensor.mode == "sequence":
        net = cases_sequence.split_transformer(dense, mesh, "ring", True)
        model = OfWholeBatches(net, mesh.split_batch, lambda: mesh.positions(TOKENS))
        return model, lambda logits, y: cross_entropy_sequence(
            logits, mesh.split_batch(y), mesh, WORDS, vocabulary_split=True
        )
    net = cases_2d.split_transformer(dense, mesh)
    model = OfWholeBatches(net, mesh.split_batch, whole_positions)
    return model, lambda logits, y: cross_entropy_2d(logits, mesh.split_batch(y), mesh, WORDS)


def split_1d(dense: nn.Module, axis: Any) -> nn.Module:
    def convert(name: str, module: nn.Module) -> nn.Module | None:
        if name == "words":
            return VocabParallelEmbedding.from_dense(module, axis)
        if name == "head":
            return ColumnParallelLinear.from_dense(module, axis, pad=True)
        if isinstance(module, Attention):
            return Attention.from_dense(module, axis)
        if isinstance(module, nn.Linear):
            kind: Any = RowParallelLinear if name.endswith("down") else ColumnParallelLinear
            return kind.from_dense(module, axis)
        return None

    split = converted(dense, convert)
    split.head.weight = split.words.weight
    return split


def train(config: Any, dtype: torch.dtype, num_steps: int = 3) -> dict[str, Any]:
    """Losses of this replica, and whole parameters at the end."""
    smp.init(config)
    net, loss_of = split_model(dtype)
    model = smp.DistributedModel(net)
    optim = smp.DistributedOptimizer(optimizer_of(model.parameters()))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), y)
        model.backward(loss)
        return loss

    losses = []
    for x, y in batches(num_steps, smp.rdp_rank()):
        optim.zero_grad()
        losses.append(step(x, y).reduce_mean().item())
        optim.step()
    found, split = {}, 0
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        split += layout is not None and bool(layout.axes or layout.partial_over)
        whole = whole_of(parameter, layout) if layout is not None else parameter.detach()
        found[name.removeprefix("net.")] = whole
    return {"losses": losses, "parameters": found, "replica": smp.rdp_rank(), "split": split}


def train_dense(num_replicas: int, dtype: torch.dtype, num_steps: int = 3) -> dict[str, Any]:
    """The same in one process: the mean of the replicas' gradients."""
    net = dense_model(dtype)
    optim = optimizer_of(net.parameters())
    losses: list[list[float]] = [[] for _ in range(num_replicas)]
    data = [batches(num_steps, replica) for replica in range(num_replicas)]
    for number in range(num_steps):
        optim.zero_grad()
        for replica in range(num_replicas):
            x, y = data[replica][number]
            loss = F.cross_entropy(net(x, torch.arange(TOKENS)).flatten(0, 1), y.flatten())
            (loss / num_replicas).backward()
            losses[replica].append(loss.item())
        optim.step()
    return {"losses": losses, "parameters": {name: p.detach() for name, p in net.named_parameters()}}


def told(config: Any, kind: str) -> str:
    """What a model or a step that would give other results is told."""
    try:
        smp.init(config)
        if kind == "plain":
            smp.DistributedModel(nn.Sequential(nn.Linear(4, 4)))
            return ""
        net, loss_of = split_model(torch.float32)
        if kind == "dropout":
            net.net.blocks[0].drop = nn.Dropout(0.1)
        if kind == "random activation":
            net.net.blocks[0].drop = nn.RReLU()
        if kind == "other axes":
            world = current().world
            assert world is not None
            group = current().group("TENSOR")
            mesh = Mesh2D.from_ranks(group, current().rank, world.transport.collectives)
            net.net = cases_2d.split_transformer(dense_model(torch.float32), mesh)
        model = smp.DistributedModel(net)

        @smp.step
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
            if kind == "other wholes":
                y = (y + smp.tp_rank()) % WORDS
            if kind == "changed parts":
                mesh = tensor_mesh()
                mine = mesh.split_batch(y).add_(smp.tp_rank()).remainder_(WORDS)
                loss = cross_entropy_2d(model(x), mine, mesh, WORDS)
            else:
                loss = loss_of(model(x), y)
            if kind == "loss of parts":
                loss = model(x).square().mean()
            model.backward(loss)
            return None if kind == "loss of parts" else loss

        step(*batches(1, 0)[0])
    except (smp.SMPError, ValueError) as error:
        return str(error)
    return ""


def dropout(config: Any) -> bool:
    """Whether each rank drops its part of what one process drops."""
    smp.init(config)
    mesh = tensor_mesh()
    layouts = ("in", "out") if current().plan.tensor.mode == "3d" else (None,)
    same = True
    for layout in layouts:
        more = () if layout is None else (layout,)
        torch.manual_seed(4)
        x = torch.randn(8, 16, 8)
        torch.manual_seed(5)
        expected = F.dropout(x, 0.4)
        torch.manual_seed(5)
        layer = PartDropout(0.4, mesh=mesh, layout=layout)
        found = mesh.gather_output(layer(mesh.split_input(x, *more)), *more)
        same = same and torch.equal(found, expected) and torch.equal(layer.eval()(x), x)
    return same
