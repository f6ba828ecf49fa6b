"""What :mod:`.test_split_reads` runs on ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from tests.tensor.smp_api.cases import loss_of

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers that are alike, an embedding, and a parameter that is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.kept = nn.Parameter(torch.zeros(8, 8), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(self.embed(ids)))))


class Scaled(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) / self.up.weight.shape[0]


class Bytes(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) / self.up.weight.nbytes


class Stated(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.up.state_dict()["weight"].sum()


class Transformed(Net):
    """A gradient by torch.func, in which parameters are no parameters."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        gradient = torch.func.grad(lambda weight: weight.pow(2).sum())(self.up.weight)
        return super().forward(ids) + gradient.sum()


class Borrowed(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + F.linear(self.embed(ids), self.up.weight)


class Branching(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.norm(self.up(x) if float(ids.sum()) < 30 else self.down(x))


class Shortened(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(self.embed(ids[ids > 3]))).mean(0, keepdim=True)


def penalty(net: Any, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(net(ids), ids) + 0.01 * net.module.up.weight.pow(2).sum()


def norm(net: Any, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(net(ids), ids) + 0.01 * torch.norm(input=net.module.up.weight)


def joined(net: Any, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(net(ids), ids) + torch.stack([net.module.up.weight]).sum()


def by_size(net: Any, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(net(ids), ids) / net.module.up.weight.numel()


def plainly(net: Any, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(net(ids), ids)


def _made(kind: type[nn.Module], parameters: dict[str, Any]) -> smp.DistributedModel:
    smp.reset()
    smp.init(parameters)
    torch.manual_seed(0)
    net = kind()
    smp.set_tensor_parallelism(net)
    return smp.DistributedModel(net)


def _told(model: smp.DistributedModel, loss: Loss, ids: torch.Tensor) -> str:
    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        found = loss(model, ids)
        model.backward(found)
        return found

    try:
        step(ids)
    except smp.SMPError as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def refused_in_a_plain_loop(parameters: dict[str, Any], names: list[str]) -> dict[str, str]:
    told = {}
    for name in names:
        model = _made(WAYS[name][0], parameters)
        try:
            model(torch.arange(24).reshape(4, 6) % 11).sum().backward()
        except smp.SMPError as error:
            told[name] = str(error)
        else:
            told[name] = "ran"
    return told


def refused(parameters: dict[str, Any], names: list[str]) -> dict[str, str]:
    ids = torch.arange(24).reshape(4, 6) % 11
    told = {}
    for name in names:
        kind, loss = WAYS[name]
        told[name] = _told(_made(kind, parameters), loss, ids)
    return told


def detached(net: Any, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(net(ids), ids) * net.module.up.weight.detach().norm()


def data_of(net: Any, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(net(ids), ids) * net.module.up.weight.data.abs().mean()


def without_gradients(net: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = (net.module.up.weight * net.module.up.weight).sum()
    return loss_of(net(ids), ids) * factor


def of_no_numbers(net: Any, ids: torch.Tensor) -> torch.Tensor:
    assert net.module.up.weight.dtype is torch.float32 and net.module.up.weight.requires_grad
    assert net.module.kept.numel() == 64
    return loss_of(net(ids), ids) + net.module.norm.weight.pow(2).sum()


WAYS: dict[str, tuple[type[nn.Module], Loss]] = {
    "a penalty": (Net, penalty),
    "a penalty of some": (Net, norm),
    "a list of weights": (Net, joined),
    "detached": (Net, detached),
    "its data": (Net, data_of),
    "without gradients": (Net, without_gradients),
    "a size in the step": (Net, by_size),
    "a shape in the forward": (Scaled, plainly),
    "its state in the forward": (Stated, plainly),
    "its bytes in the forward": (Bytes, plainly),
    "a gradient by torch.func": (Transformed, plainly),
    "a weight of another layer": (Borrowed, plainly),
}


def right_on_parts(parameters: dict[str, Any]) -> str:
    return _told(_made(Net, parameters), of_no_numbers, torch.arange(24).reshape(4, 6) % 11)


def apart(parameters: dict[str, Any]) -> tuple[str, str, str]:
    """Each rank's batch sends it elsewhere, then has another length; then neither."""
    branching = _made(Branching, parameters)
    ids = torch.full((4, 6), 1 if smp.rank() == 0 else 9)
    ids[:, : 1 + smp.rank()] = 5
    branched = _told(branching, plainly, ids)
    shortened = _told(_made(Shortened, parameters), lambda net, ids: net(ids).sum(), ids)
    return branched, shortened, _told(_made(Net, parameters), plainly, ids)


def saved(parameters: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What is warned of when the module's own state is asked for, and when the model's is."""
    model = _made(Net, parameters)
    _told(model, plainly, torch.arange(24).reshape(4, 6) % 11)
    told = []
    for ask in (model.module.state_dict, lambda: (model.state_dict(), model.local_state_dict())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ask()
        told.append([str(each.message) for each in caught])
    return told[0], told[1]
