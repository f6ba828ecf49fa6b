"""Models whose layers can be split, or only seem to be."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, num_blocks: int = 4, classes: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(8, WIDTH)


def net8() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net(8), torch.randn(8, WIDTH)


class Centred(nn.Module):
    """Takes the mean over all features between its two layers, where no reader of the code sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(_FUNCTIONS["centred"](self.up(x)))


_FUNCTIONS: dict[str, Any] = {"centred": lambda h: h - h.mean(-1, keepdim=True)}


def wrong_plan() -> tuple[nn.Module, torch.Tensor]:
    """A plan that splits what must be whole."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Centred())
    model._tp_plan = {"1.up": "colwise", "1.down": "rowwise"}  # type: ignore[assignment]
    return model, torch.randn(8, WIDTH)


def nothing_safe() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), torch.randn(8, WIDTH)


class ByHand(nn.Module):
    """Layers of a grid of ranks with a function of the script's own between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        from smp_lite.nn.two_d import Linear2D
        from smp_lite.systems.colossal import tensor_mesh

        self.mesh, self.between = tensor_mesh("2d"), between
        self.up, self.down = Linear2D(WIDTH, 2 * WIDTH, self.mesh), Linear2D(2 * WIDTH, WIDTH, self.mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.between(self.up(self.mesh.split_input(x)))
        return self.mesh.gather_output(self.down(inside))


def on_a_grid() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return ByHand(torch.tanh), torch.randn(8, WIDTH)


def across_a_grid() -> tuple[nn.Module, torch.Tensor]:
    """The mean over the features of one rank."""
    torch.manual_seed(0)
    return ByHand(_FUNCTIONS["centred"]), torch.randn(8, WIDTH)
