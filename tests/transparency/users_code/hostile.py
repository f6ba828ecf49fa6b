"""Models and step functions written to break a recorder: legal torch that nobody would write for
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.models import Batch, Case
from tests.models.case import regression_loss
from tests.models.layers import (
    LENGTH,
    WIDTH,
    Chain,
    MLPBlock,
    mlp_blocks,
    random_generator,
    regression_batch,
)

__all__ = ["CASES"]


class Nested(nn.Module):
    """Containers in containers, a ModuleDict, and a list walked from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"a": mlp_blocks(2), "b": nn.ModuleList([mlp_blocks(2)])})
        self.heads = nn.ParameterDict({"scale": nn.Parameter(torch.ones(WIDTH))})
        self.biases = nn.ParameterList([torch.zeros(WIDTH), torch.ones(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.towers["a"]):
            x = x + block(x)
        for _, tower in sorted(self.towers["b"].named_children()):
            for block in tower[::-1]:
                x = x + block(x)
        return x * self.heads["scale"] + sum(bias for bias in self.biases)


class DirectForward(Chain):
    """Calls ``.forward`` instead of the module."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.forward(x)
        return self.head.forward(x)


class BorrowedWeight(nn.Module):
    """The root applies weights of blocks that lie on other stages, as tied decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = F.linear(x, self.blocks[0].contract.weight @ self.blocks[1].expand.weight)
        return x @ self.blocks[3].contract.weight[:, :WIDTH].T + self.blocks[2].norm.bias


class ViewAcrossStages(nn.Module):
    """Changes a view of what another stage made, and reads the base afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        left, right = x.chunk(2, dim=-1)
        x = self.blocks[1](torch.cat([right, left], dim=-1)) + 0
        part = x[:, 2:5]
        part *= 2.0
        part.transpose(0, 1)[0] = 1.5
        y = self.blocks[2](x)
        y.clamp_(min=-1.0)
        y[y > 0.5] = 0.25
        y.masked_fill_(x > 0, 0.125)
        return y + x


class TorchCombinators(nn.Module):
    """torch functions that take lists, generators and strings, and return named tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)
        self.head = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(block(x) for block in self.blocks)  # noqa: C400
        stacked = torch.stack(parts)
        mixed = torch.einsum("kbw,bw->kbw", stacked, x)
        values, _ = mixed.sort(dim=-1, descending=True)
        mean, std = torch.std_mean(values, dim=0)[::-1]
        best = values.max(dim=0)
        total = sum(p.sum() for p in parts) + best.values.sum() + std.mean()
        joined = torch.cat([*parts[:3], mean], -1)
        return self.head(joined) * torch.where(x > 0, x, x.new_zeros(())) + total


class Checkpointed(nn.Module):
    """torch.utils.checkpoint around blocks, called by the root."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = mlp_blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedBlock(nn.Module):
    """torch.utils.checkpoint inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


def build_checkpoint_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(CheckpointedBlock() for _ in range(4)))


def build_parametrized() -> nn.Module:
    """Weights that are computed at each use, by modules hidden inside the layer."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        MLPBlock(),
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
        MLPBlock(),
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    )


class AttentionNet(nn.Module):
    """torch's own attention and encoder layers, called with masks by keyword, one result unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
        x = self.embed(x)
        y, weights = self.attention(x, x, x, attn_mask=mask, need_weights=True)
        x = self.encoder(x + y, mask=mask)
        return self.head(x) * weights.sum(-1, keepdim=True)


class SplitRecurrent(nn.Module):
    """An LSTM, a GRU cell in a Python loop, and packed state handed around."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, (hidden, _) = self.lstm(x)
        state = hidden[-1]
        for step in y.unbind(1):
            state = self.cell(step, state)
        return self.head(y + state[:, None])


class TwoDtypes(nn.Module):
    """Activations pass from float32 to float64 to bfloat16 and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MLPBlock()
        self.second = MLPBlock().double()
        self.third = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.fourth = MLPBlock()

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).double())
        x = self.third(x.to(torch.bfloat16))
        return self.fourth(x.to(torch.float32, copy=True))


class ZeroSize(nn.Module):
    """Empty tensors and a dimension of size one go through blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        empty = self.blocks[1](x[:0])
        more = self.blocks[2](torch.cat([empty, x]))
        return more + empty.sum()


class Pair(NamedTuple):
    value: Tensor
    count: int


class Structures(nn.Module):
    """Lists of namedtuples, ints, strings and slices between the blocks."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLPBlock()

        def forward(self, pairs: list[Pair], mode: str, rows: slice) -> list[Pair]:
            last = pairs[-1]
            value = self.inner(last.value)
            if mode == "odd":
                value = -value
            value = torch.cat([value[rows], value[rows.stop :]])
            return [*pairs, Pair(value + last.value, last.count + 1)]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pairs = [Pair(x, 0)]
        for index, block in enumerate(self.blocks):
            pairs = block(pairs, mode="odd" if index % 2 else "even", rows=slice(0, 1))
        assert pairs[-1].count == 4
        assert len(pairs) == 5
        return pairs[-1].value + pairs[2].value


class NoParametersOnAStage(nn.Module):
    """Most of the model has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.ModuleList([nn.GELU(), nn.Softmax(-1), nn.Flatten(), nn.Unflatten(1, (4, -1))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for module in self.rest:
            x = module(x)
        return x.flatten(1)


class CachesOnItself(Chain):
    """The root stores activations on itself and on a block, and reads them again."""

    def forward(self, x: Tensor) -> Tensor:
        self.trail = []
        for block in self.blocks:
            x = x + block(x)
            block.seen = x
            self.trail.append(x.detach().mean())
        x = x + self.blocks[0].seen
        return self.head(x) + torch.stack(self.trail).sum()


class ClosureAndInit(nn.Module):
    """Fresh tensors of factory functions, ``*_like`` and ``new_*`` take activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        table = x.new_zeros(len(self.blocks), *x.shape)
        count = torch.zeros(1)
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            table[index] = x
            count += 1
        like = torch.zeros_like(x).scatter_(1, torch.zeros(x.shape[0], 1, dtype=torch.long), 1.0)
        noise = torch.arange(WIDTH).to(x) / WIDTH
        return (table * noise).sum(0) / count + like * x


class SharedSubmodule(nn.Module):
    """One module under two names in two blocks, and a parameter tied by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(3)
        self.blocks[2].expand = self.blocks[0].expand
        self.blocks[1].contract.weight = self.blocks[0].contract.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class LossInside(nn.Module):
    """The loss module has weights; labels are made integer by argmax of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(3)
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            labels = self.blocks[2](x).argmax(-1)
        return self.criterion(self.blocks[1](self.blocks[0](x)), labels)


class Decorated(Chain):
    """Forward under ``set_grad_enabled`` as a decorator, and ``enable_grad`` inside ``no_grad``."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.blocks[0](x)
            with torch.enable_grad():
                live = self.blocks[1](frozen)
        with torch.set_grad_enabled(self.training):
            x = self.blocks[2](live) + frozen
        return self.head(self.blocks[3](x))


class InPlaceOnBatch(Chain):
    """Changes the input batch itself."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x + 0)
        x.mul_(0.5)
        x[:, 0] = 0.0
        y = self.blocks[1](x * 2) + first
        x += 1.0
        return self.head(y + self.blocks[2](x))


class PythonSideEffects(Chain):
    """Counts and branches on its own Python attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        order = list(self.blocks)
        if self.num_calls % 2:
            order.reverse()
        for block in order:
            x = x + block(x) / self.num_calls
        return self.head(x)


def sequence_batch(num_samples: int) -> Batch:
    """``x`` and ``target`` ``[num_samples, LENGTH, WIDTH]``."""
    generator = random_generator()
    shape = (num_samples, LENGTH, WIDTH)
    return {
        "x": torch.randn(shape, generator=generator),
        "target": torch.randn(shape, generator=generator),
    }


def double_batch(num_samples: int) -> Batch:
    return {name: tensor.double() for name, tensor in regression_batch(num_samples).items()}


def bfloat16_batch(num_samples: int) -> Batch:
    return {name: tensor.bfloat16() for name, tensor in regression_batch(num_samples).items()}


def copying_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """The model changes its input: it gets a copy, for plain torch takes the same batch."""
    x = batch["x"].clone()
    return F.mse_loss(model(x), batch["target"]) + x.mean()


def own_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    return model(batch["x"])


def metric_loss(model: Callable[..., Any], batch: Batch) -> dict[str, Any]:
    """Metrics under no_grad, integers, parameters and strings among the results."""
    output = model(batch["x"])
    loss = F.mse_loss(output, batch["target"])
    with torch.no_grad():
        hits = (output > 0).eq(batch["target"] > 0)
        correct = hits.sum()
    return {
        "loss": loss,
        "correct": correct,
        "argmax": output.argmax(-1),
        "hits": hits,
        "shape": tuple(output.shape),
        "name": "metrics",
        "batch": batch["x"],
        "list": [output[0], None, (output[-1], 3)],
    }


def gan_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Calls the model twice in one microbatch, the second time on its own output."""
    first = model(batch["x"])
    second = model(first.roll(1, 0))
    return F.mse_loss(first, batch["target"]) - 0.1 * F.cosine_similarity(first, second).mean()


def _case(name: str, build: Callable[[], nn.Module], notes: str, **options: Any) -> Case:
    return Case(name, build, options.pop("batch", regression_batch), notes, **options)


CASES = {
    case.name: case
    for case in (
        _case("nested", Nested, "ModuleDict, ParameterList, reversed lists"),
        _case("direct_forward", DirectForward, ".forward called directly"),
        _case("borrowed_weight", BorrowedWeight, "weights of other stages in glue"),
        _case("view_across_stages", ViewAcrossStages, "in-place on views of other stages' values"),
        _case("combinators", TorchCombinators, "lists, generators, structseq results"),
        _case("checkpointed", Checkpointed, "checkpoint in the root"),
        _case("checkpointed_reentrant", lambda: Checkpointed(True), "the older kind of checkpoint"),
        _case("checkpoint_inside", build_checkpoint_inside, "checkpoint in blocks"),
        _case("parametrized", build_parametrized, "weight_norm, orthogonal, spectral_norm"),
        _case(
            "attention",
            AttentionNet,
            "MultiheadAttention, TransformerEncoder",
            batch=sequence_batch,
        ),
        _case(
            "recurrent",
            SplitRecurrent,
            "LSTM and a cell in a loop",
            batch=sequence_batch,
        ),
        _case("two_dtypes", TwoDtypes, "float64 and bfloat16 on the way"),
        _case("zero_size", ZeroSize, "empty tensors"),
        _case("structures", Structures, "namedtuples, slices and strings"),
        _case("no_parameters", NoParametersOnAStage, "stages without parameters"),
        _case("caches_on_itself", CachesOnItself, "activations kept as attributes"),
        _case("factories", ClosureAndInit, "new tensors filled with activations"),
        _case("shared_submodule", SharedSubmodule, "one submodule in two blocks", exact=False),
        _case("loss_inside", LossInside, "loss module with a buffer", forward_loss=own_loss),
        _case("grad_modes", Decorated, "grad modes nested"),
        _case("in_place_on_batch", InPlaceOnBatch, "the batch changes", forward_loss=copying_loss),
        _case("side_effects", PythonSideEffects, "Python counters"),
        _case(
            "metrics",
            Chain,
            "metrics and odd results",
            forward_loss=metric_loss,
            loss_of=lambda o: o["loss"],
        ),
        _case("gan", Chain, "the model called on its own output", forward_loss=gan_loss),
        _case("float64", lambda: Chain().double(), "float64 all through", batch=double_batch),
        _case("bfloat16", lambda: Chain().bfloat16(), "bfloat16 all through", batch=bfloat16_batch),
        _case(
            "plain_loss",
            lambda: nn.Sequential(*mlp_blocks(3)),
            "a bare Sequential",
            forward_loss=regression_loss,
        ),
    )
}
