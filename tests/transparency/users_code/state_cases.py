"""Models whose Python state matters: what is set between two calls, stored by a call, or collected by a hook.

A recorded call runs later than it stands in the script. Whatever it reads must then be as it was, whatever it
leaves behind must be there for the next line, and everything must happen once.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Batch, Case
from tests.models.layers import WIDTH, Chain, MLPBlock, mlp_blocks, regression_batch

__all__ = ["CASES"]


class Scaled(nn.Module):
    """A block with a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()
        self.scale = 1.0
        self.config = types.SimpleNamespace(scale=1.0)
        self.table = {"scale": 1.0}
        self.shift: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.config.scale * self.table["scale"] * self.inner(x)
        return y if self.shift is None else y + self.shift


class Blocks(nn.Module):
    """A container of four blocks of one kind."""

    block: type[nn.Module] = Scaled

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))


class AttributeBetweenCalls(Blocks):
    """Every block runs twice, with another value of an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.scale = 0.5
            y = block(x)
            block.scale = 2.0
            x = y + block(x)
        return x


class AttributesOfAllKinds(Blocks):
    """A tensor, an entry of a dict, and an attribute of a config change between two calls."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.table["scale"] = 0.5 + number
            y = block(x)
            block.config.scale = 0.25
            block.table["scale"] = 2.0
            z = block(x)
            block.config.scale = 1.0
            block.shift = torch.full((WIDTH,), float(number))
            x = y + z + block(x)
            block.shift = x.detach() * 0.1
            x = x + block(x)
            del block.shift
            block.shift = None
        return x


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()

    def forward(self, x: Tensor, trail: list[Tensor], notes: dict[str, Tensor]) -> Tensor:
        y = x + self.inner(x)
        trail.append(y)
        notes["last"] = y * 0.5
        return y


class MutableArguments(Blocks):
    """Blocks append to a list that they are given, and fill a dict."""

    block = Appending

    def forward(self, x: Tensor) -> Tensor:
        trail: list[Tensor] = []
        notes: dict[str, Tensor] = {}
        for block in self.blocks:
            x = block(x, trail, notes)
        assert len(trail) == 4
        return x + trail[0] + trail[1] + notes["last"]


class FunctionalCall(Blocks):
    """Blocks are called with parameters made on the spot."""

    block = MLPBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weights = {name: parameter * 0.5 for name, parameter in block.named_parameters()}
            x = x + torch.func.functional_call(block, weights, (x,)) + block(x)
        return x


_flag = False
_variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)
_local = threading.local()
_settings = {"scale": 1.0}


@contextlib.contextmanager
def flags(value: float) -> Iterator[None]:
    global _flag
    _flag = True
    token = _variable.set(value)
    _local.scale = value
    _settings["scale"] = value
    Flagged.mode = "on"
    try:
        yield
    finally:
        _flag = False
        _variable.reset(token)
        _local.scale = 1.0
        _settings["scale"] = 1.0
        Flagged.mode = "off"


def helper(x: Tensor) -> Tensor:
    return x * _settings["scale"]


class Flagged(nn.Module):
    mode = "off"

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if _flag:
            y = -y
        if self.mode == "on":
            y = y + 1
        return helper(y) * _variable.get() * getattr(_local, "scale", 1.0)


class FlagsAround(Blocks):
    """Blocks read flags that a context manager sets around some of their calls."""

    block = Flagged

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            with flags(0.5 + number):
                y = block(x)
            x = x + y + block(x)
        return x


class ForwardReplaced(Blocks):
    """``forward`` is replaced on the instance for one call."""

    block = MLPBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            original = block.forward
            block.forward = lambda x, original=original: 3 * original(x)  # type: ignore[method-assign]
            y = block(x)
            del block.forward
            x = x + y + block(x)
        return x


class Router(nn.Module):
    """Stores an auxiliary loss, counts, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()
        self.gate = nn.Linear(WIDTH, 4)
        self.num_calls = 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        logits = self.gate(x)
        self.aux_loss = logits.softmax(-1).square().mean() * self.num_calls
        self.seen.append(logits.detach().mean())
        return x + self.inner(x) * logits.amax(-1, keepdim=True)


class AuxiliaryLoss(Blocks):
    """A loss that blocks leave on themselves is summed by the step."""

    block = Router

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def auxiliary_loss(model: Any, batch: Batch) -> dict[str, Any]:
    output = model(batch["x"])
    root = getattr(model, "module", model)
    aux = sum(block.aux_loss for block in root.blocks)
    return {
        "loss": F.mse_loss(output, batch["target"]) + 0.1 * aux,
        "aux": aux,
        "calls": [block.num_calls for block in root.blocks],
        "seen": [block.seen[-1] for block in root.blocks],
    }


class HookedByForward(nn.Module):
    """Forward puts hooks on, collects features with them, and takes them off again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        features: list[Tensor] = []
        handles = [
            block.contract.register_forward_hook(lambda m, args, out: features.append(out))
            for block in self.blocks
        ]
        handles.append(self.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)))
        handles.append(self.blocks[2].register_forward_hook(lambda m, args, out: out * 0.5))
        for block in self.blocks:
            x = x + block(x)
        for handle in handles:
            handle.remove()
        assert len(features) == 4
        return x + torch.stack(features).sum(0)


class HooksInsideABlock(nn.Module):
    """The same within a block."""

    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = mlp_blocks(2)

        def forward(self, x: Tensor) -> Tensor:
            kept: list[Tensor] = []
            handle = self.parts[0].register_forward_hook(lambda m, args, out: kept.append(out))
            y = self.parts[1](self.parts[0](x))
            handle.remove()
            return x + y + kept[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Collecting() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counting(nn.Module):
    """Looks at its data, and binds a buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("range", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 0.1:
            self.count = self.count + 1
        if self.range.abs().sum() == 0:
            self.range = torch.stack([x.detach().min(), x.detach().max()])
        else:
            self.range = self.range * 0.9 + 0.1 * torch.stack([x.detach().min(), x.detach().max()])
        return x + self.inner(x) * (1 + 0.01 * self.range[1])


class BuffersAnew(Blocks):
    """Each counting block runs once."""

    block = Counting

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class BuffersAnewTwice(Blocks):
    """Each counting block runs twice a microbatch, far apart."""

    block = Counting

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class Moving(nn.Module):
    """Statistics that depend on the order of calls, without a look at data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x + self.inner(x - self.mean.clone())


class MovingTwice(Blocks):
    """The same, called twice a microbatch."""

    block = Moving

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks[::-1]]:
            x = block(x)
        return x


class StatisticsReadElsewhere(nn.Module):
    """The root reads the running statistics of its batch norms, and one counter is changed from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(MLPBlock(), nn.BatchNorm1d(WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            x = x + block[1].running_mean
        self.blocks[1][1].num_batches_tracked += 2
        return x * self.blocks[3][1].running_var.sum()


class Experts(nn.Module):
    """Routing by data: rows that a mask chooses, and index_add_ into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = mlp_blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = best == number
            if mask.any():
                y[mask] = expert(x[mask]) * scores[mask, number, None]
        z = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(best == number)
            z.index_add_(0, rows, expert(x[rows]))
        return y + z


class ExpertsInTheRoot(Experts):
    """Experts on several stages."""


class ExpertsInBlocks(nn.Module):
    """Blocks that route within."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Sizes(nn.Module):
    """Numbers out of an integer input become sizes, places and slices."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        y = self.blocks[0](x)
        first = y[:, : n[0, 0]].sum(-1, keepdim=True)
        y = self.blocks[1](y + first)
        parts = torch.split(y, [k for k in n[0]], dim=-1)  # noqa: C416
        y = torch.cat([part * (1 + i) for i, part in enumerate(parts)], -1)
        y = self.blocks[2](y).view(-1, n[0].sum() // 2, 2).flatten(1)
        y = y + y.narrow(1, n[0, 0], 1) + y[:, n[0, 1]].unsqueeze(1)
        y = y.roll(n[0, 0].item(), -1).expand(n.shape[0], -1)
        return self.blocks[3](y) + y.repeat(1, n[0, 0] // n[0, 0]).chunk(1)[0]


def sizes_batch(num_samples: int) -> Batch:
    return {
        **regression_batch(num_samples),
        "n": torch.tensor([[6, 10]]).repeat(num_samples, 1),
    }


def sizes_loss(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["n"]), batch["target"])


class Shifted(nn.Module):
    """A language model's shifted loss by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = mlp_blocks(3)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x)


def shifted_loss(model: Any, batch: Batch) -> Tensor:
    logits = model(batch["tokens"])
    shifted = logits[:, :-1, :].contiguous()
    wrapped = logits.transpose(0, 1).contiguous().view(-1)
    return (
        F.cross_entropy(shifted.view(-1, shifted.size(-1)), batch["tokens"][:, 1:].contiguous().view(-1))
        + 0.01 * wrapped.square().mean()
    )


def token_rows(num_samples: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return {"tokens": torch.randint(0, 32, (num_samples, 7), generator=generator)}


class Generators(nn.Module):
    """A block takes its scale from an iterator, another from a random generator of its own."""

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLPBlock()
            self.scales = iter(range(1, 1000))
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(WIDTH, generator=self.generator)
            return x + self.inner(x) * noise / next(self.scales)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Stepping() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


LOG: list[int] = []


class GlobalLog(nn.Module):
    """Blocks append to a list of the module's and scale by its length."""

    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLPBlock()

        def forward(self, x: Tensor) -> Tensor:
            LOG.append(1)
            return x + self.inner(x) / len(LOG)

    def __init__(self) -> None:
        super().__init__()
        LOG.clear()
        self.blocks = nn.ModuleList(self.Logging() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ReentrantWithoutGradient(Chain):
    """Reentrant checkpointing of the first block, whose input needs no gradient: it does not train."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        first, *others = self.blocks
        x = checkpoint(first, x, use_reentrant=True)
        for block in others:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class DefaultDtype(Chain):
    """The default dtype is another one around a block's call."""

    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLPBlock()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + torch.ones(WIDTH).mul(1 / 3).sum().float()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Making() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            torch.set_default_dtype(torch.float64)
            try:
                y = block(x)
            finally:
                torch.set_default_dtype(torch.float32)
            x = x + y + block(x)
        return self.head(x)


class TensorsInPlace(Blocks):
    """Plain tensor and numpy attributes of a block change in place between two calls."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLPBlock()
            self.mask = torch.ones(WIDTH)
            self.kept = [torch.ones(WIDTH)]
            self.table = np.ones(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + self.mask + self.kept[0]) * float(self.table[1])

    block = Masked

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            block.mask.mul_(0.5)
            z = block(x)
            block.kept[0][2] = 0.25
            block.table[1] = 3.0
            x = y + z + block(x)
            block.table[1] = 1.0
        return x


class Seeding(Blocks):
    """Blocks seed torch's generator, and the root draws."""

    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLPBlock()

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(7)
            return x + self.inner(x) * torch.rand(WIDTH)

    block = Seeded

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + torch.rand(WIDTH)
        return x


class Reverse(torch.autograd.Function):
    """Gradient reversal whose strength is an attribute of the class."""

    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.strength = Reverse.strength
        return x * Reverse.strength

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -ctx.strength * gradient


class GradientReversal(Blocks):
    """The strength changes between two uses in the root."""

    block = MLPBlock

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            Reverse.strength = 0.5 + number
            y = Reverse.apply(block(x))
            Reverse.strength = 2.0
            x = x + y + Reverse.apply(block(x))
        return x


class ModuleArgument(nn.Module):
    """A block is given another block of another stage, and uses its weights and calls it."""

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLPBlock()

        def forward(self, x: Tensor, other: nn.Module) -> Tensor:
            return x + self.inner(x) @ other.expand.weight.T[:, :WIDTH] + other(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Borrowing() for _ in range(2))
        self.others = mlp_blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        for block, other in zip(self.blocks, reversed(self.others)):
            x = block(x, other)
        return x


class ViewsOfChanged(Blocks):
    """A view is made of a tensor that then takes in results, and the view is read."""

    block = MLPBlock

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(len(self.blocks), WIDTH)
        first, rest = table[0], table[1:]
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            table[number] = x.detach().mean(0)
        return x + first + rest.sum(0)


def _case(name: str, build: Any, notes: str, **options: Any) -> Case:
    return Case(name, build, options.pop("batch", regression_batch), notes, **options)


CASES = {
    case.name: case
    for case in (
        _case("attribute", AttributeBetweenCalls, "an attribute between calls"),
        _case("attributes", AttributesOfAllKinds, "attributes of all kinds"),
        _case("mutable_arguments", MutableArguments, "a list filled by blocks"),
        _case("functional_call", FunctionalCall, "torch.func.functional_call"),
        _case("flags", FlagsAround, "flags by context managers"),
        _case("forward_replaced", ForwardReplaced, "forward of the instance"),
        _case(
            "auxiliary",
            AuxiliaryLoss,
            "losses left on blocks",
            forward_loss=auxiliary_loss,
            loss_of=lambda result: result["loss"],
        ),
        _case("hooked_by_forward", HookedByForward, "hooks put on by forward"),
        _case("hooks_inside", HooksInsideABlock, "hooks put on by a block"),
        _case("buffers_anew", BuffersAnew, "buffers bound anew"),
        _case("buffers_anew_twice", BuffersAnewTwice, "the same, twice a microbatch"),
        _case("moving_twice", MovingTwice, "statistics in order of calls"),
        _case("statistics_read", StatisticsReadElsewhere, "running statistics read"),
        _case("experts", ExpertsInTheRoot, "routing over stages"),
        _case("experts_in_blocks", ExpertsInBlocks, "routing in blocks"),
        _case("sizes", Sizes, "numbers out of inputs", batch=sizes_batch, forward_loss=sizes_loss),
        _case("shifted", Shifted, "shifted loss", batch=token_rows, forward_loss=shifted_loss),
        _case("generators", Generators, "iterators and generators"),
        _case("global_log", GlobalLog, "a global list"),
        _case(
            "reentrant",
            ReentrantWithoutGradient,
            "reentrant checkpoint without gradient",
            unused_parameters=frozenset(),
        ),
        _case("tensors_in_place", TensorsInPlace, "plain tensors change in place"),
        _case("seeding", Seeding, "manual_seed in blocks"),
        _case("gradient_reversal", GradientReversal, "an attribute of a function's class"),
        _case("module_argument", ModuleArgument, "a module among the arguments"),
        _case("views_of_changed", ViewsOfChanged, "views of a tensor changed in place"),
        _case("default_dtype", DefaultDtype, "default dtype around a call"),
    )
}
