"""`smp.nn`: layers under SMP v1's names that are torch's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from smp_lite.nn import FusedLayerNorm
from tests.api_support import same


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((6,), {}),
        (([5, 6],), {}),
        ((torch.Size([5, 6]),), {}),
        (((6,), 1e-2), {}),
        ((6, 1e-5, False), {}),
        ((), {"normalized_shape": 6, "eps": 0.5, "elementwise_affine": True}),
        ((6,), {"bias": False}),
        ((6,), {"device": "cpu", "dtype": torch.float64}),
    ],
)
def test_it_computes_what_torchs_does(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    torchs, fused = nn.LayerNorm(*arguments, **options), FusedLayerNorm(*arguments, **options)
    assert same(fused.state_dict(), torchs.state_dict())
    assert fused.extra_repr() == torchs.extra_repr()
    torch.manual_seed(0)
    for parameter in torchs.parameters():
        nn.init.normal_(parameter)
    fused.load_state_dict(torchs.state_dict())
    x = torch.randn(4, 5, 6, dtype=options.get("dtype"))
    results = []
    for layer in (torchs, fused):
        given = x.clone().requires_grad_()
        (layer(given) ** 3).sum().backward()
        results.append([layer(x).detach(), given.grad, *[p.grad for p in layer.parameters()]])
    assert same(*results)


def test_filters_that_ask_for_either_class_find_it() -> None:
    layer = FusedLayerNorm(3)
    assert isinstance(layer, FusedLayerNorm)
    assert isinstance(layer, nn.LayerNorm)


def test_apexs_arguments_go_by_position_and_no_others() -> None:
    parameters = list(inspect.signature(FusedLayerNorm).parameters.values())
    by_position = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert by_position == {
        "normalized_shape": inspect.Parameter.empty,
        "eps": 1e-5,
        "elementwise_affine": True,
    }
    # In fourth place apex has memory_efficient and torch bias.
    with pytest.raises(TypeError, match="positional"):
        FusedLayerNorm(3, 1e-5, True, False)  # type: ignore[misc]
