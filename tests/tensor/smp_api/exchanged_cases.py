"""What :mod:`.test_exchanged` runs on ranks: layers made by hand whose parameters a script changes, or
exchanges, before they train."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import smp_lite as smp
from tests.tensor.smp_api.beginning_cases import SEED, Net, by_hand, trained_by


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def _anew(net: Net) -> None:
    net.up.weight = nn.Parameter(net.up.weight.detach() * 0.5)


def _of_another_shape(net: Net) -> None:
    net.up.weight = nn.Parameter(torch.ones(20, 12))


def _in_place(net: Net) -> None:
    with torch.no_grad():
        net.up.weight.mul_(0.5)
        net.up.weight.data = net.up.weight.data * 0.5


def _whole_one_anew(net: Net) -> None:
    """A split layer by input features has its bias whole."""
    net.up.bias = nn.Parameter(net.up.bias.detach() * 0.5)


def _without_bias(net: Net) -> None:
    net.down.bias = None


def _frozen(net: Net) -> None:
    net.up.weight.requires_grad_(False)


EXCHANGES: dict[str, Callable[[Net], Any]] = {
    "anew": _anew,
    "of another shape": _of_another_shape,
    "weight_norm": lambda net: parametrizations.weight_norm(net.up),
    "an old weight_norm": lambda net: nn.utils.weight_norm(net.up),
    "spectral_norm": lambda net: parametrizations.spectral_norm(net.up),
    "an old spectral_norm": lambda net: nn.utils.spectral_norm(net.up),
    "a parametrization": lambda net: parametrize.register_parametrization(net.up, "weight", Halved()),
    "prune": lambda net: prune.l1_unstructured(net.up, "weight", 0.5),
}
RIGHT: dict[str, Callable[[Net], Any]] = {
    "nothing": lambda net: None,
    "in place": _in_place,
    "a whole one anew": _whole_one_anew,
    "without a bias": _without_bias,
    "frozen": _frozen,
}


def exchange(parameters: dict[str, Any], *, late: bool) -> dict[str, str]:
    """The error of each; ``late``: after the model was wrapped, before its first step."""
    told = {}
    for name, change in EXCHANGES.items():
        smp.reset()
        smp.init(parameters)
        net = by_hand(SEED)
        try:
            if not late:
                change(net)
            trained_by(smp.DistributedModel(net), before=functools.partial(change, net) if late else None)
        except smp.SMPError as error:
            told[name] = f"{type(error).__name__}: {error}"
        else:
            told[name] = "ran"
    return told


def change(parameters: dict[str, Any]) -> dict[str, Any]:
    """Losses and weights after changes that are right on parts."""
    found = {}
    for name, change in RIGHT.items():
        smp.reset()
        smp.init(parameters)
        net = by_hand(SEED)
        change(net)
        found[name] = trained_by(smp.DistributedModel(copy.deepcopy(net)))
    return found
