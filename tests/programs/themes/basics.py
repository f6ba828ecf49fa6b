"""Training loops as in a tutorial."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.programs import program


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@program(stages=(1, 2, 3), ranks=(2,), replicas=(1, 2), pipelines=("interleaved", "simple"), static=True)
def classifier(smp: Any, out: Any) -> None:
    """A classifier with Adam and a schedule of the learning rate."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    @smp.step
    def train_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss, logits

    generator = torch.Generator().manual_seed(3 + smp.dp_rank())
    for _ in range(3):
        x = torch.randn(8, 8, generator=generator)
        y = torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        loss, logits = train_step(model, x, y)
        optimizer.step()
        schedule.step()
        out.value("loss", loss.reduce_mean())
        out.value("accuracy", (logits.concat().argmax(-1) == y).float().mean().item())
        out.value("rate", schedule.get_last_lr())
    out.model(model)
