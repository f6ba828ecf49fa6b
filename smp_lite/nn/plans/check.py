"""Whether a split model computes what the dense one does: outputs and all gradients, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...devices import CPU
from ...errors import SMPError
from ..layout import layout_of, sum_partial_gradients, whole_of

__all__ = ["Comparison", "check_parallelized"]


@dataclass(frozen=True)
class Comparison:
    """Largest differences, each over the largest number of what was expected.

    Attributes:
        outputs: of all tensors of the output.
        gradients: of all parameters; ``worst`` names the parameter.
    """

    outputs: float
    gradients: float
    worst: str


def check_parallelized(
    dense_model: nn.Module, parallel_model: nn.Module, example: Any, *, tolerance: float | None = None
) -> Comparison:
    """Runs both forward and backward on one example and compares; collective over the axes of the split
    model.

    Both are run in their present mode, from the same random state; their gradients, and that state, are as
    before afterwards. The loss is the output's ``loss`` where there is one, else a sum that weighs every
    element of the output differently. Weights that are all zeros or ones hide errors: give both models
    ordinary ones.

    Args:
        dense_model: the whole model, with the same weights.
        parallel_model: the same after :func:`~smp_lite.nn.plans.parallelize`.
        example: arguments of the model's call: a tensor, a tuple or a dict; the same on all ranks.
        tolerance: largest relative difference; None: 1e-4 in 32 bits, 1e-9 in 64, 0.1 in 16.

    Raises:
        SMPError: outputs or gradients differ by more, or there are other ones; names them.
    """
    expected, their_gradients = _run(dense_model, example)
    found, gradients = _run(parallel_model, example)
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in zip(expected, found, strict=False)):
        raise SMPError(
            f"the split model gives tensors of shapes {[list(t.shape) for t in found]}, the dense one "
            f"{[list(t.shape) for t in expected]}: something in it returns this rank's part"
        )
    outputs = 0.0
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        difference = _difference(one, other)
        outputs = max(outputs, difference)
        if not difference <= _allowed(one, tolerance):
            raise SMPError(
                f"output {index} of the split model (shape {list(one.shape)}) differs from the dense one's "
                f"by {difference:.2g} of its largest number"
            )
    if their_gradients.keys() != gradients.keys():
        other_names = sorted(their_gradients.keys() ^ gradients.keys())
        raise SMPError(f"only one of the two models has gradients of {', '.join(other_names)}")
    largest = max((float(g.abs().max()) for g in their_gradients.values() if g.numel()), default=0.0)
    worst, gradients_differ = "", 0.0
    for name, gradient in their_gradients.items():
        # Some gradients are nothing but rounding: they are compared with the model's largest.
        difference = _difference(gradient, gradients[name], largest / 100)
        if not difference <= _allowed(gradient, tolerance):
            raise SMPError(
                f"the gradient of {name} in the split model differs from the dense one's by "
                f"{difference:.2g} of its largest number: some rank's contribution is missing, or counted "
                "more than once"
            )
        if difference > gradients_differ:
            worst, gradients_differ = name, difference
    return Comparison(outputs, gradients_differ, worst)


def _run(model: nn.Module, example: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    state = torch.get_rng_state()
    try:
        with torch.enable_grad():
            output = _call(model, example)
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            tensors = list(_tensors(output))
            if not isinstance(loss, torch.Tensor):
                loss = sum(
                    (
                        tensor * torch.linspace(-1, 1, tensor.numel(), device=CPU).to(tensor).view_as(tensor)
                    ).sum()
                    for tensor in tensors
                    if tensor.requires_grad
                )
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.backward()
        sum_partial_gradients(model)
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                layout = layout_of(parameter)
                gradient = parameter.grad.detach()
                gradients[name] = gradient if layout is None else whole_of(gradient, layout)
        return [tensor.detach() for tensor in tensors], gradients
    finally:
        torch.set_rng_state(state)
        for name, parameter in model.named_parameters():
            parameter.grad = before[name]


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, Mapping):
        output = dict(output)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            yield leaf


def _difference(expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> float:
    if not expected.numel():
        return 0.0
    expected, found = expected.double(), found.double()
    same = (expected == found) | (expected.isnan() & found.isnan())
    if same.all():
        return 0.0
    scale = max(float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0, least)
    error = float((found - expected)[~same].abs().max())
    return error / scale if scale else float("inf")


def _allowed(tensor: torch.Tensor, tolerance: float | None) -> float:
    if tolerance is not None:
        return tolerance
    return {torch.float64: 1e-9, torch.bfloat16: 0.1, torch.float16: 0.1}.get(tensor.dtype, 1e-4)
