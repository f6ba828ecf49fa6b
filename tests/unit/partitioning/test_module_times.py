"""Times of modules that are alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smp_lite.record.describe.metadata import MetadataInference
from smp_lite.record.describe.module_times import measured_trace


class Model(nn.Module):
    """Three equal layers and one that is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.large = nn.Linear(64, 4096)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.large(x)


def test_what_is_alike_takes_the_same_time() -> None:
    """What is measured of each by itself never is."""
    trace = measured_trace(Model(), (torch.randn(32, 64),), {}, MetadataInference())
    seconds = [trace.of(f"layers.{number}").seconds for number in range(3)]
    assert seconds[0] > 0
    assert seconds == [seconds[0]] * 3
    assert trace.of("large").seconds != seconds[0]
