"""A parallel layer against the dense one that every rank holds too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smp_lite.comm.groups.axis import Axis, elements_received
from smp_lite.nn.layout import layout_of, sum_partial_gradients, whole_of

__all__ = ["assert_close", "compare", "received_by"]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 6e-3}
"""Of the largest difference, over the largest expected number."""


def assert_close(
    found: Tensor, expected: Tensor, what: str, *, least: float = 1e-30, tolerance: float | None = None
) -> None:
    """Same dtype, same shape, and equal as far as the dtype's sums can be.

    Args:
        least: differences are compared with this, where no expected number is larger.
    """
    assert found.dtype == expected.dtype, (what, found.dtype, expected.dtype)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    scale = max(float(expected.detach().abs().max()), least) if expected.numel() else 1.0
    error = float((found.detach() - expected.detach()).abs().max()) / scale if expected.numel() else 0.0
    assert error <= (tolerance or TOLERANCES[expected.dtype]), f"{what}: relative error {error:.3g}"


def compare(
    dense: nn.Module,
    layer: nn.Module,
    x: Tensor,
    *,
    mine: Callable[[Tensor], Tensor] = lambda x: x,
    output: Callable[[Tensor], Tensor] = lambda y: y,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
    repeat: int = 1,
) -> None:
    """Outputs and all gradients, for a loss that weighs every element of the output differently.

    Args:
        mine: this rank's part of the input, and of its gradient.
        output: this rank's part of the dense output.
        repeat: how often the layer is used before backward, each time on what it gave before.
    """

    def run(module: nn.Module, inner: Tensor) -> Tensor:
        for _ in range(repeat):
            inner = call(module, inner)
        return inner

    inner = x.detach().clone().requires_grad_(x.is_floating_point())
    my_inner = mine(x.detach()).clone().requires_grad_(x.is_floating_point())
    y, my_y = run(dense, inner), run(layer, my_inner)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    (y * weights).sum().backward()
    (my_y * output(weights)).sum().backward()
    assert_close(my_y, output(y), "output")
    if inner.grad is not None:
        assert my_inner.grad is not None
        assert_close(my_inner.grad, mine(inner.grad), "gradient of the input")
    sum_partial_gradients(layer)
    expected = dict(dense.named_parameters())
    found = dict(layer.named_parameters())
    assert found.keys() == expected.keys()
    # Some gradients are zero but for rounding (a key's bias, which softmax does not see).
    largest = max(float(parameter.grad.abs().max()) for parameter in expected.values())
    for name, parameter in found.items():
        layout = layout_of(parameter)
        values = [parameter.data, parameter.grad]
        assert values[1] is not None, name
        if layout is not None:
            values = [whole_of(value, layout) for value in values]
        assert_close(values[0], expected[name].data, f"{name}")
        assert_close(values[1], expected[name].grad, f"gradient of {name}", least=largest / 10)


@contextmanager
def received_by(axis: Axis) -> Iterator[dict[str, int]]:
    """Elements received over the axis in this block, by kind of collective."""
    before = elements_received(axis)
    found: dict[str, int] = {}
    yield found
    for kind, n in elements_received(axis).items():
        if n != before.get(kind, 0):
            found[kind] = n - before.get(kind, 0)
