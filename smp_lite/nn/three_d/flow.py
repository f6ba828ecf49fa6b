"""Modules on a 3D mesh one after another, whose layouts are checked when they are put together."""

from __future__ import annotations

import torch
from torch import nn

from .layout import Layout3D, LayoutError

__all__ = ["Residual3D", "Sequential3D"]

_ELEMENTWISE = (
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)


class Sequential3D(nn.Sequential):
    """``torch.nn.Sequential`` of modules that have ``takes`` and ``gives``, or work on each number by itself.

    Raises:
        LayoutError: one gives another layout than the next takes; names both.
        TypeError: a module of which it is not known what it does to the layout.
    """

    takes: Layout3D
    gives: Layout3D

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        last: tuple[str, Layout3D] | None = None
        for place, module in enumerate(self):
            name = f"module {place} ({type(module).__name__})"
            if isinstance(module, _ELEMENTWISE):
                continue
            takes, gives = getattr(module, "takes", None), getattr(module, "gives", None)
            if not isinstance(takes, Layout3D) or not isinstance(gives, Layout3D):
                raise TypeError(
                    f"{type(self).__name__}: {name} does not say what layout it takes and gives; give it the "
                    "attributes takes and gives, or call the modules in a forward of your own"
                )
            if last is None:
                self.takes = takes
            elif last[1] is not takes:
                raise LayoutError(
                    f"{type(self).__name__}: {last[0]} gives layout {last[1].value!r}, and {name} takes "
                    f"{takes.value!r}: every product swaps the layout, so build {name} with "
                    f"layout={last[1].value!r}"
                )
            last = (name, gives)
        if last is None:
            raise ValueError(f"{type(self).__name__} needs a module that has a layout")
        self.gives = last[1]


class Residual3D(Sequential3D):
    """Adds its input to what the modules give, one after another.

    Raises:
        LayoutError: they give another layout than they take, so that the two cannot be added.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        if self.takes is not self.gives:
            raise LayoutError(
                f"Residual3D: the modules take layout {self.takes.value!r} and give {self.gives.value!r}, "
                "which cannot be added: there must be an even number of products between, such as up and down"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(input)
