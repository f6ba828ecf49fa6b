"""What the tests of stages of several ranks run in the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.nn.layout import layout_of, whole_of
from smp_lite.nn.one_d import ColumnParallelLinear, RowParallelLinear
from smp_lite.session import current

WIDTH, CLASSES, BATCH = 8, 5, 8


class Block(nn.Module):
    """A residual block with something replicated in it, and something split."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, num_blocks: int = 4, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(WIDTH, dropout) for _ in range(num_blocks)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.head(x))


def split(net: nn.Module, axis: Any) -> None:
    """Every block's pair of layers, over the axis."""
    for module in net.modules():
        if isinstance(module, Block):
            module.up = ColumnParallelLinear.from_dense(module.up, axis)
            module.down = RowParallelLinear.from_dense(module.down, axis)


def batches(num_steps: int, replica: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + replica)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def train(
    parameters: dict[str, Any],
    *,
    num_steps: int = 3,
    is_split: bool = True,
    tied: bool = False,
    dropout: float = 0.0,
    optimizer: str = "AdamW",
    clip: float | None = None,
) -> dict[str, Any]:
    """Losses, and at the end all parameters, whole, with the last step's gradients and the norm."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Net(tied=tied, dropout=dropout)
    if is_split:
        split(net, current().axis("tp"))
    model = smp.DistributedModel(net)
    optim = smp.DistributedOptimizer(getattr(torch.optim, optimizer)(model.parameters(), lr=0.05))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    shared = parameters.get("prescaled_batch", False)
    replica = smp.rdp_rank() if shared else smp.dp_rank()
    losses, norms = [], []
    for x, y in batches(num_steps, replica):
        optim.zero_grad()
        losses.append(step(x, y).reduce_mean().item())
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optim.step()
    found = {}
    gradients = {}
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        found[name] = whole_of(parameter, layout) if layout is not None else parameter.detach()
        if parameter.grad is not None:
            grad = parameter.grad
            gradients[name] = whole_of(grad, layout) if layout is not None else grad
    return {
        "losses": losses,
        "parameters": found,
        "gradients": gradients,
        "norms": norms,
        "state": model.state_dict(),
        "optimizer": optim.state_dict(),
        "replica": replica,
        "coordinate": (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()),
    }
