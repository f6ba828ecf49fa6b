"""What tensor-parallel ranks run in evaluation; called by name through `tests.harness`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp

__all__ = ["encoder", "padded", "reading"]

_PARAMETERS = {
    "partitions": 1,
    "ddp": True,
    "tensor_parallel_degree": 2,
    "prescaled_batch": True,
    "microbatches": 2,
}


class _Encoder(nn.Module):
    """Torch has one kernel for its layers in evaluation, which is given their weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class _Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(x))) / self.up.weight.shape[1]


@smp.step
def _evaluate(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


@smp.step
def _train(model: Any, x: Tensor) -> None:
    model.backward(model(x).square().mean())


def encoder(trains_first: bool) -> tuple[list[Tensor], Tensor]:
    """Results in a step, outside of one, and of the module inside; and of one process."""
    smp.init(_PARAMETERS)
    torch.manual_seed(0)
    net = _Encoder()
    plain = copy.deepcopy(net).eval()
    smp.parallelize(net)
    model = smp.DistributedModel(net)
    x = torch.randn(4, 6, 16)
    if trains_first:
        _train(model, x)
    model.eval()
    with torch.no_grad():
        inside = net(x)
        return [inside, _evaluate(model, x).concat(), model(x), net(x)], plain(x)


class _Padded(nn.Module):
    """Torch takes the padding out of what the encoder gets, unless somebody wants gradients of it."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.encoder.eval().requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


@smp.step
def _evaluate_padded(model: Any, x: Tensor, padding: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x, padding)


@smp.step
def _train_padded(model: Any, x: Tensor, padding: Tensor) -> Tensor:
    found = model(x, padding)
    model.backward(found.sum())
    return found


def padded(how: str, nested: bool, splits: bool) -> tuple[str, Tensor | None, Tensor]:
    """A whole encoder beside a split layer: the error, the result, and that of one process."""
    smp.init({**_PARAMETERS, "microbatches": 1})
    torch.manual_seed(0)
    net = _Padded(nested)
    plain = copy.deepcopy(net)
    if splits:
        smp.set_tensor_parallelism(net.head)
    model = smp.DistributedModel(net)
    x, padding = torch.randn(4, 6, 8), torch.zeros(4, 6, dtype=torch.bool)
    padding[1:, 4:] = True
    expected = plain(x, padding).detach()
    try:
        if how == "plain call":
            with torch.no_grad():
                return "", model(x, padding), expected
        step = _train_padded if how == "training" else _evaluate_padded
        return "", step(model, x, padding).concat().detach(), expected
    except smp.SMPError as error:
        return str(error), None, expected


def reading(how: str) -> str:
    """The error of an evaluation by a forward that reads a split weight; "": there is none."""
    smp.init(_PARAMETERS)
    torch.manual_seed(0)
    net = _Reading()
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    model.eval()
    x = torch.randn(4, 8)
    try:
        if how == "step":
            _evaluate(model, x)
        elif how == "plain call":
            with torch.no_grad():
                model(x)
        else:
            with torch.inference_mode():
                model(x)
    except smp.SMPError as error:
        return str(error)
    return ""
