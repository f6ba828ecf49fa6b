"""The dense side of the tests: a small transformer, and what a split module is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp_lite.nn.layout import layout_of, sum_partial_gradients, whole_of
from smp_lite.nn.one_d import Attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def assert_near(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal up to rounding, relative to the largest number."""
    assert found.shape == expected.shape, f"{what}: {list(found.shape)} for {list(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} for {expected.dtype}"
    found, expected = found.detach(), expected.detach()
    limit = TOLERANCE[expected.dtype] * max(1.0, float(expected.abs().max()))
    error = float((found - expected).abs().max())
    assert error <= limit, f"{what}: differs by {error}, more than {limit}"


def assert_gradients_near(split: nn.Module, dense: nn.Module) -> None:
    """Of all parameters, made whole; sums those that are partial first."""
    sum_partial_gradients(split)
    of_dense = dict(dense.named_parameters(remove_duplicate=False))
    names = [name for name, _ in split.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(of_dense)
    for name, parameter in split.named_parameters():
        layout = layout_of(parameter)
        assert layout is not None, name
        assert parameter.grad is not None, name
        expected = of_dense[name].grad
        assert expected is not None, name
        assert_near(whole_of(parameter.grad, layout), expected, f"gradient of {name}")


def compare(
    dense: nn.Module,
    layer: nn.Module,
    inputs: Iterable[torch.Tensor],
    split: Callable[[torch.Tensor], torch.Tensor],
    gather: Callable[[torch.Tensor], torch.Tensor],
    **options: Any,
) -> None:
    """Output, and gradients of inputs and parameters, of a layer and its dense form on the same whole inputs.

    Args:
        inputs: whole, the same on all ranks; those of floats get gradients.
        split, gather: of the mesh.
        options: (of the layer's call, of the dense layer's call) by name.
    """
    whole = [_leaf(x) for x in inputs]
    expected = dense(*whole, **{name: pair[1] for name, pair in options.items()})
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5)).to(expected.dtype)
    expected.backward(grad)
    mine = [_leaf(x) for x in whole]
    found = gather(layer(*map(split, mine), **{name: pair[0] for name, pair in options.items()}))
    assert_near(found, expected, "output")
    found.backward(grad)
    for place, (x, y) in enumerate(zip(mine, whole, strict=True)):
        if y.grad is not None:
            assert x.grad is not None
            assert_near(x.grad, y.grad, f"gradient of input {place}")
    assert_gradients_near(layer, dense)
    again = layer.to_dense()
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(dense.named_parameters())[name]), name
    with torch.no_grad():
        assert torch.equal(again(*whole, **{name: pair[1] for name, pair in options.items()}), expected)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def converted(dense: nn.Module, convert: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """A copy of a module with what ``convert`` makes of those inside, by name and type; None: nothing."""
    # Parameters are shared: all of them are replaced, and fake ones cannot be copied.
    result = copy.deepcopy(dense, {id(parameter): parameter for parameter in dense.parameters()})

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            made = convert(prefix + name, child)
            if made is None:
                walk(child, f"{prefix}{name}.")
            else:
                setattr(module, name, made)

    walk(result, "")
    return result


class Block(nn.Module):
    """One layer of a transformer, normalized before."""

    def __init__(self, features: int, heads: int, kv_heads: int, **kind: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features, **kind)
        self.attention = Attention(features, heads, kv_heads, causal=True, **kind)
        self.norm2 = nn.RMSNorm(features, **kind)
        self.up = nn.Linear(features, 4 * features, **kind)
        self.down = nn.Linear(4 * features, features, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two blocks, which the input goes through twice: their parameters are used twice."""

    recompute: str = "nothing"

    def __init__(
        self, words: int, tokens: int, features: int, heads: int, kv_heads: int, **kind: Any
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, features, **kind)
        self.positions = nn.Embedding(tokens, features, **kind)
        self.blocks = nn.ModuleList(Block(features, heads, kv_heads, **kind) for _ in range(2))
        self.norm = nn.LayerNorm(features, **kind)
        self.head = nn.Linear(features, words, bias=False, **kind)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(positions)
        for block in [*self.blocks, self.blocks[0]]:
            if self.recompute == "nothing":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        result: torch.Tensor = self.head(self.norm(x))
        return result
