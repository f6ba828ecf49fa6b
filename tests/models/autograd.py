"""Models that lean on autograd and torch's modes: frozen parts, in-place ops, hooks, dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.case import Case, HookRecord
from tests.models.layers import WIDTH, Chain, MLPBlock, mlp_blocks, regression_batch

__all__ = ["CASES"]


def build_frozen() -> nn.Module:
    """Frozen at the start, where nothing needs a gradient, and in the middle, where one passes."""
    model = Chain(num_blocks=6)
    for block_index in (0, 1, 3):
        model.blocks[block_index].requires_grad_(False)
    return model


class InPlaceNet(nn.Module):
    """Activations changed in place between the blocks: whole, in part, and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.blocks = mlp_blocks(4)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.stem(inputs)
        x += self.side(inputs)
        y = self.blocks[0](x)
        y += x
        y.relu_()
        z = self.blocks[1](y)
        z[:, 0] = y[:, 1] * 0.5
        z.add_(1.0).mul_(0.5)
        w = self.blocks[2](z)
        w.add_(z, alpha=0.5)
        left_half = w[:, : WIDTH // 2]
        left_half.mul_(2.0)  # changes w
        out = self.blocks[3](w)
        out.view(-1, 2, WIDTH // 2)[:, 1].sub_(left_half)
        return out


def install_hooks(model: nn.Module) -> HookRecord:
    """Puts hooks on every block: each counts its calls and changes the value that it sees."""
    record = HookRecord()

    def hook_block(name: str, block: nn.Module) -> None:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
            return (args[0] * 0.9,)

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
            record.forward_calls[name] += 1
            return output * 1.1

        def after_backward(
            _module: nn.Module, grad_input: tuple[Tensor, ...], _grad_output: tuple[Tensor, ...]
        ) -> tuple[Tensor, ...]:
            record.backward_calls[name] += 1
            return tuple(gradient * 0.5 for gradient in grad_input)

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
        block.register_full_backward_hook(after_backward)

    for name, block in model.blocks.named_children():
        hook_block(f"blocks.{name}", block)
    return record


class HookedNet(Chain):
    """A stem in front: the first block's input needs a gradient, so its backward hook gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class ScaleGradient(torch.autograd.Function):
    """Forward leaves values alone; backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class ProductAndSum(torch.autograd.Function):
    """Two inputs, two outputs, saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, grad_product: Tensor, grad_sum: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad_product * y + grad_sum, grad_product * x + grad_sum


class CustomFunctionNet(nn.Module):
    """The root applies autograd functions of its own to activations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = ScaleGradient.apply(x, -0.5)
        y = self.blocks[1](x)
        product, total = ProductAndSum.apply(self.blocks[2](y), y)
        return self.blocks[3](product) + total


class NoGradNet(nn.Module):
    """A teacher under ``no_grad``, and activations detached on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp_blocks(2)
        self.blocks = mlp_blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            guide = x
            for block in self.teacher:
                guide = guide + block(guide)
            guide = guide / guide.norm(dim=-1, keepdim=True)
        for block in self.blocks[:2]:
            x = x + block(x)
        x = x + guide * x.detach().square()
        for block in self.blocks[2:]:
            x = x + block(x)
        return x


class AutocastNet(nn.Module):
    """The middle blocks run under bfloat16 autocast, which the root switches on around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mixing", torch.eye(WIDTH).roll(1, dims=0))
        self.head = MLPBlock()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = torch.tanh(block(x))
            x = x @ self.mixing  # glue, in bfloat16 as well
        return self.head(x.float())


def build_dropout() -> nn.Module:
    """Each block ends in a dropout of its own."""
    model = Chain()
    model.blocks = nn.ModuleList(nn.Sequential(b, nn.Dropout(0.25)) for b in model.blocks)
    return model


class CountingBlock(nn.Module):
    """Changes its own attributes and buffers whenever it runs: a run too many shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()
        self.num_calls = 0
        self.last_mean: Tensor | None = None
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("total_samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.last_mean = x.detach().mean(dim=0)
        self.running_mean.lerp_(self.last_mean, 0.1)
        self.total_samples += x.shape[0]
        return x + self.inner(x) / self.num_calls - self.running_mean.clone()


class StatefulNet(nn.Module):
    """Blocks whose output depends on how often they have run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


CASES = (
    Case("frozen", build_frozen, regression_batch, "frozen blocks at the start and in the middle"),
    Case("inplace", InPlaceNet, regression_batch, "in-place ops on activations and on views"),
    Case(
        "hooks",
        HookedNet,
        regression_batch,
        "pre-forward, forward and full-backward hooks that count and change values",
        install_hooks=install_hooks,
    ),
    Case(
        "custom_function",
        CustomFunctionNet,
        regression_batch,
        "torch.autograd.Function applied by the root",
    ),
    Case(
        "no_grad_part",
        NoGradNet,
        regression_batch,
        "no_grad around blocks and glue, detach on activations",
        unused_parameters=frozenset(
            f"teacher.{index}.{name}" for index in range(2) for name, _ in MLPBlock().named_parameters()
        ),
    ),
    Case("autocast_part", AutocastNet, regression_batch, "autocast around some blocks"),
    Case(
        "dropout",
        build_dropout,
        regression_batch,
        "random numbers drawn inside blocks",
        random_in_blocks=True,
    ),
    Case(
        "stateful",
        StatefulNet,
        regression_batch,
        "attributes and buffers that every real run changes: compare buffers as well",
    ),
)
