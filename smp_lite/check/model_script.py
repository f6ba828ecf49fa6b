"""A script for models that come without one: a few training steps of ``package:function``.

The loss is the output's ``loss`` where there is one, else a sum that weighs every element of the output
differently, so that no error cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..lifecycle import starting
from ..optim.optimizer import DistributedOptimizer
from ..preview.step_preview import batches_of_a_step
from ..preview.targets import as_call, build_model, described_inputs
from ..record.values.placed import PlacedTensor
from ..record.values.structure import flatten
from ..steps.loader_batches import batches
from ..steps.step_function import step
from ..wrapper.distributed_model import DistributedModel

__all__ = ["train"]

_LEARNING_RATE = 1e-2


def train(target: str, inputs: Sequence[str], num_steps: int) -> None:
    """Trains.

    Args:
        target: ``package:function``, which returns a model, or a model and the inputs of one batch.
        inputs: descriptions of inputs (``int64[16,128]``), in the place of those; floats are random.
        num_steps: how many.

    Raises:
        ValueError: the function cannot be had, or there are no inputs, or no weights.
    """
    starting.init()
    torch.manual_seed(0)
    module, given = build_model(target)
    meta = next((name for name, p in module.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ValueError(f"{target}: {meta} is on the meta device, and a check needs real weights")
    args, kwargs = described_inputs(list(inputs)) if inputs else as_call(given)
    if inputs:
        args, kwargs = tuple(map(_drawn, args)), {name: _drawn(each) for name, each in kwargs.items()}
    if not args and not kwargs:
        raise ValueError(
            f"{target} returned no inputs: let it return (model, inputs), or describe them, for example "
            "--input 'int64[16,128]'"
        )
    model = DistributedModel(module)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE))

    @step
    def train_step(args: Any, kwargs: Any) -> Any:
        loss = _loss(model(*args, **kwargs), target)
        model.backward(loss)
        return loss

    for batch in batches([(args, kwargs)] * batches_of_a_step() * num_steps):
        optimizer.zero_grad()
        train_step(*batch)
        optimizer.step()


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(tensor) if tensor.is_floating_point() else tensor


def _loss(output: Any, target: str) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves: list[Any] = []
    flatten(output, leaves)
    total: Any = None
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor | PlacedTensor) and leaf.requires_grad:
            count = leaf.numel()
            weights = (
                torch.linspace(-1, 1, count, dtype=leaf.dtype, device=leaf.device).view(leaf.shape)
                / count**0.5
            )
            part = (leaf * weights).sum()
            total = part if total is None else total + part
    if total is None:
        raise ValueError(f"{target}: no result of the model depends on its parameters")
    return total
