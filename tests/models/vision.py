"""Models of images and signals: long skips, batch statistics, root parameters, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Batch, Case
from tests.models.layers import LENGTH, WIDTH, Attention, random_generator

__all__ = ["CASES"]


def image_batch(num_samples: int) -> Batch:
    """Images ``x`` and ``target``, both ``[num_samples, 3, 8, 8]``."""
    generator = random_generator()
    shape = (num_samples, 3, 8, 8)
    return {
        "x": torch.randn(shape, generator=generator),
        "target": torch.randn(shape, generator=generator),
    }


def conv_block(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1),
        nn.GroupNorm(4, out_channels),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Three resolutions; what the way down keeps is joined on the way up in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_block(3, 8)
        self.down = nn.ModuleList([conv_block(8, 12, stride=2), conv_block(12, 16, stride=2)])
        self.middle = conv_block(16, 16)
        self.up = nn.ModuleList([conv_block(16 + 12, 12), conv_block(12 + 8, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, 3, H, W]`` to the same shape; H and W are multiples of 4."""
        x = self.stem(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(x)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x)


class BatchNormNet(nn.Module):
    """Buffers that each microbatch updates in turn: running mean, variance and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            for in_channels in (3, 8, 8, 8)
        )
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RootParameters(nn.Module):
    """The root itself holds parameters and a buffer, and uses them between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        angles = torch.arange(LENGTH + 1)[:, None] / 10.0 ** torch.arange(WIDTH)
        self.register_buffer("positions", torch.sin(angles))
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        """Maps ``[B, T, W]`` and a shift ``[B]`` to ``[B, W]``."""
        class_tokens = self.class_token.expand(x.shape[0], -1, -1)
        x = torch.cat([class_tokens, x + shift[:, None, None]], dim=1) + self.positions
        for block_index, block in enumerate(self.blocks):
            x = block(x)
            if block_index == 1:
                x = x * self.scale
        return self.head(x[:, 0])


def patch_batch(num_samples: int) -> Batch:
    generator = random_generator()
    return {
        "x": torch.randn(num_samples, LENGTH, WIDTH, generator=generator),
        "shift": torch.randn(num_samples, generator=generator),
        "target": torch.randn(num_samples, WIDTH, generator=generator),
    }


def patch_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], shift=batch["shift"]), batch["target"])


class ComplexFilter(nn.Module):
    """Multiplies a spectrum by learned complex weights and mixes it; complex in, complex out."""

    def __init__(self, num_frequencies: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_frequencies, dtype=torch.complex64))
        self.mix = nn.Linear(num_frequencies, num_frequencies, dtype=torch.complex64)

    def forward(self, spectrum: Tensor) -> Tensor:
        return self.mix(spectrum * self.weight)


class FourierNet(nn.Module):
    """Complex activations travel between the blocks and complex gradients back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ComplexFilter(WIDTH // 2 + 1) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.stem(x))
        for block in self.blocks:
            spectrum = spectrum + block(spectrum)
        return self.head(torch.fft.irfft(spectrum, n=x.shape[-1]))


def signal_batch(num_samples: int) -> Batch:
    batch = patch_batch(num_samples)
    return {"x": batch["x"][:, 0], "target": batch["target"]}


CASES = (
    Case("unet", UNet, image_batch, "long skips: values live across many stages, last in first out"),
    Case("batchnorm", BatchNormNet, image_batch, "buffers change in forward: compare them as well"),
    Case(
        "multi_input",
        RootParameters,
        patch_batch,
        "the root's own parameters and buffer in its glue; two inputs, one by keyword",
        patch_loss,
    ),
    Case("complex64", FourierNet, signal_batch, "complex values, gradients and parameters"),
)
