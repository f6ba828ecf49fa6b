"""What a newer torch can do, or does in another way; what it has not yet is left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from tests.programs import program
from tests.programs.small import TanhBlock as Block
from tests.programs.small import trained


def stages_of(first: nn.Module, second: nn.Module) -> nn.Sequential:
    return nn.Sequential(Block(), first, second, Block())


@program(stages=(2,), ranks=(2,))
def numbers_of_tensors_outside(smp: Any, out: Any) -> None:
    """From 2.14 on, fake tensors of them tell the numbers that they had when they were first met."""
    count, scale = torch.tensor(1), torch.tensor(1.5, dtype=torch.float64)

    class Returns(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), int(count), scale.item()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Returns() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, times, factor = block(x)
                x = x * times / factor
            return x

    def change() -> None:
        count.add_(1)
        scale.mul_(1.1)

    trained(smp, out, Scaled(), steps=3, after_step=change)


@program(stages=(2,), ranks=(2,))
def a_way_by_a_number_outside(smp: Any, out: Any) -> None:
    count = torch.tensor(0)

    class Odd(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if int(count) % 2 else super().forward(x).relu() - 2 * int(count)

    trained(smp, out, nn.Sequential(*(Odd() for _ in range(4))), steps=3, after_step=lambda: count.add_(1))


if hasattr(FunctionCtx, "set_output_grad_dtype"):

    class Wide(torch.autograd.Function):
        """To bfloat16; its gradient may have more bits."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.set_output_grad_dtype(torch.float32)
            return x.bfloat16()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient.float()

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.float() * 1.7

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 1.7

    class To(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Wide.apply(super().forward(x))

    class From(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Back.apply(x))

    class Both(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Back.apply(Wide.apply(super().forward(x)))

    @program(stages=(2,), refused=r"set_output_grad_dtype\(\) asks for gradients of torch.float32")
    def a_gradient_of_more_bits_between_stages(smp: Any, out: Any) -> None:
        trained(smp, out, stages_of(To(), From()))

    @program(stages=(2,), ranks=(2,))
    def a_gradient_of_more_bits_in_a_stage(smp: Any, out: Any) -> None:
        trained(smp, out, stages_of(Both(), Both()))


if hasattr(torch.autograd.graph, "node_creation_hook"):

    @program(stages=(2,), refused=r"node_creation_hook\(\) around calls of several stages")
    def a_hook_on_new_nodes(smp: Any, out: Any) -> None:
        class Hooked(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                with torch.autograd.graph.node_creation_hook(lambda node: None):
                    return super().forward(x)

        trained(smp, out, Hooked(*(Block() for _ in range(4))))

    class Tanh(Block):
        """Doubles the gradients that its nodes give."""

        def forward(self, x: Tensor) -> Tensor:
            def double(node: Any) -> None:
                if node.name() == "TanhBackward0":
                    node.register_prehook(lambda gradients: (2 * gradients[0],))

            with torch.autograd.graph.node_creation_hook(double):
                return super().forward(x)

    @program(stages=(2,), ranks=(2,))
    def a_hook_on_new_nodes_in_a_module(smp: Any, out: Any) -> None:
        trained(smp, out, nn.Sequential(*(Tanh() for _ in range(4))))

    class Decorated(Block):
        @checkpoint(use_reentrant=False)
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(torch.tanh(self.linear(x)))

    @program(stages=(2,), ranks=(2,))
    def a_forward_decorated_by_checkpoint(smp: Any, out: Any) -> None:
        trained(smp, out, nn.Sequential(*(Decorated() for _ in range(4))))

    @program(stages=(2,), refused="inside a checkpoint around calls of several stages")
    def a_root_decorated_by_checkpoint(smp: Any, out: Any) -> None:
        calls: list[int] = []

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(4))

            @checkpoint(use_reentrant=False)
            def forward(self, x: Tensor) -> Tensor:
                calls.append(1)
                for block in self.blocks:
                    x = block(x) / len(calls)
                return x

        trained(smp, out, Net())
