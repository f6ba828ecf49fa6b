"""What ranks run whose marked layers cannot be split without a loss, or are asked what they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp

__all__ = ["LOSSES", "drawn_anew", "train", "train_by_class"]


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


class _Asking(_Net):
    """Other layers are scaled by what their class is."""

    def forward(self, ids: Tensor) -> Tensor:
        x = ids
        for layer in self.children():
            x = layer(x) * (0.5 if isinstance(layer, nn.Linear) else 2.0)
        return x


def _as_it_is(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(net.parameters())}]


def _by_class(net: nn.Module) -> list[dict[str, Any]]:
    decayed = [layer.weight for layer in net.modules() if isinstance(layer, nn.Linear)]
    others = [p for p in net.parameters() if not any(p is each for each in decayed)]
    return [{"params": decayed, "weight_decay": 0.5}, {"params": others}]


def train(what: str) -> tuple[list[float], list[float], list[str]]:
    """Losses of three steps, those of one process, and what was warned of."""
    return _train(_made(what), _made(what), _as_it_is)


def train_by_class() -> tuple[list[float], list[float], list[str]]:
    """The same of a model, and an optimizer, that ask layers for their class."""

    def made() -> Iterator[nn.Module]:
        while True:
            torch.manual_seed(0)
            yield _Asking()

    models = made()
    return _train(next(models), next(models), _by_class)


def drawn_anew() -> list[str]:
    """What layers say whose parameters a script draws anew."""
    smp.init({"partitions": 1, "ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
    net = _Net()
    smp.set_tensor_parallelism(net)
    said = []
    for layer in smp.DistributedModel(net).module.children():
        try:
            layer.reset_parameters()
        except smp.SMPError as error:
            said.append(str(error))
        else:
            said.append("drawn")
    return said


def _train(
    net: nn.Module, plain: nn.Module, groups: Callable[[nn.Module], list[dict[str, Any]]]
) -> tuple[list[float], list[float], list[str]]:
    smp.init({"partitions": 1, "ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
    smp.set_tensor_parallelism(net)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(groups(model), lr=0.1))
    inner = torch.optim.SGD(groups(plain), lr=0.1)
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
