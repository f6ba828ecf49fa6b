"""What ranks run whose marked layers cannot be split without a loss; called through `tests.harness`."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import smp_lite as smp

__all__ = ["LOSSES", "train"]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.head(self.up(self.embed(ids)) * getattr(self.up, "gain", 1.0))
        return y * (1 + self.seen.sum()) if "seen" in self._buffers else y


def _tie(net: _Net) -> None:
    net.head.weight.data = net.embed.weight.data


def _tie_a_part(net: _Net) -> None:
    net.register_buffer("seen", net.up.weight.data[2:4])


def _set(net: _Net) -> None:
    net.up.gain = 0.25  # type: ignore[assignment]


#: What a script does, and what the warning says of it.
LOSSES: dict[str, tuple[Callable[[_Net], None], str]] = {
    "data": (_tie, "shares memory with a tensor outside"),
    "a buffer": (_tie_a_part, "shares memory with a tensor outside"),
    "attribute": (_set, "the attribute 'gain' that it was given"),
}


def _made(what: str) -> _Net:
    """Not by ``copy.deepcopy``, which gives each parameter memory of its own."""
    torch.manual_seed(0)
    net = _Net()
    LOSSES[what][0](net)
    return net


def train(what: str) -> tuple[list[float], list[float], list[str]]:
    """Losses of three steps, those of one process, and what was warned of."""
    smp.init({"partitions": 1, "ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
    net, plain = _made(what), _made(what)
    smp.set_tensor_parallelism(net)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    ids = torch.arange(8)

    @smp.step
    def step(model: smp.DistributedModel, ids: Tensor) -> Tensor:
        loss = model(ids).square().mean()
        model.backward(loss)
        return loss

    ours, theirs = [], []
    for _ in range(3):
        optimizer.zero_grad()
        ours.append(step(model, ids).reduce_mean().item())
        optimizer.step()
        inner.zero_grad()
        loss = plain(ids).square().mean()
        loss.backward()
        theirs.append(loss.item())
        inner.step()
    return ours, theirs, [str(warning.message) for warning in found]
