"""Comparisons that are more than one training step repeated: a list of rounds, each with its own
function.

A round's function gets ``backward``, which is ``model.backward`` in the library and torch's own in
plain torch; everything else in it is the same code on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.record.values.microbatch import merge_outputs
from smp_lite.record.values.structure import flatten
from tests.models import Batch, split_batch, zigzag_stages
from tests.transparency.comparison import NUM_MICROBATCHES, gradients_of, place

__all__ = ["Round", "assert_rounds_equal", "leaves_of"]


@dataclass(frozen=True)
class Round:
    """One call of a step function.

    Attributes:
        function: (model, batch, backward) -> result.
        batch: keyword inputs, samples first.
        before: changes the user's module first (train mode, requires_grad, an attribute).
        no_grad: called under ``torch.no_grad()``.
    """

    function: Callable[[Any, Batch, Callable[..., None]], Any]
    batch: Batch
    before: Callable[[nn.Module], None] | None = None
    no_grad: bool = False


def assert_rounds_equal(
    build: Callable[[], nn.Module],
    rounds: Sequence[Round],
    placement: str | dict[str, int] = "zigzag",
    *,
    tolerance: float = 0.0,
) -> None:
    """Runs all rounds in the open session and in plain torch: results and gradients must agree.

    Compared is what this process holds. To the bit, or within a relative ``tolerance`` for gradients that
    are summed in another order.
    """
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    module = build()
    model = smp.DistributedModel(module)
    if placement == "zigzag":
        place(module, zigzag_stages(module, smp.state.num_stages))
    elif isinstance(placement, dict):
        place(module, placement)
    for index, part in enumerate(rounds):
        results = []
        for run, owner in ((_plain_round, plain), (_smp_round, model)):
            torch.manual_seed(index)
            own = plain if owner is plain else module
            if part.before is not None:
                part.before(own)
            own.zero_grad()
            with torch.set_grad_enabled(not part.no_grad):
                # The batch is copied: a step may change it in place.
                batch = {name: tensor.clone() for name, tensor in part.batch.items()}
                results.append(leaves_of(run(owner, part, batch)))
        expected, found = results
        assert len(found) == len(expected), f"round {index}"
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            _assert_same(ours, theirs, f"round {index}, result {number}")
        wanted_gradients = gradients_of(plain.named_parameters())
        here = {id(each) for each in (*model.local_parameters(), *model.local_buffers())}
        local = ((name, p) for name, p in module.named_parameters() if id(p) in here)
        for name, gradient in gradients_of(local).items():
            wanted = wanted_gradients[name]
            if tolerance and gradient is not None and wanted is not None:
                deviation = float((gradient - wanted).norm() / wanted.norm())
                assert deviation <= tolerance, f"round {index}, gradient of {name}: {deviation}"
                continue
            _assert_same(gradient, wanted, f"round {index}, gradient of {name}")
        buffers = dict(plain.named_buffers())
        for name, buffer in module.named_buffers():
            if id(buffer) not in here:
                continue
            _assert_same(buffer, buffers[name], f"round {index}, buffer {name}")


def leaves_of(result: Any) -> list[Any]:
    """The leaves of a step's result; a StepOutput counts as the list of its tensors."""
    leaves: list[Any] = []
    flatten(result, leaves)
    return [leaf.outputs if isinstance(leaf, smp.StepOutput) else leaf for leaf in leaves]


def _plain_round(model: nn.Module, part: Round, batch: Batch) -> Any:
    def backward(tensors: Any, grad_tensors: Any = None) -> None:
        losses = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
        given = grad_tensors if isinstance(grad_tensors, list | tuple) else [grad_tensors] * len(losses)
        scaled = [
            torch.full_like(loss, 1 / NUM_MICROBATCHES) if g is None else g / NUM_MICROBATCHES
            for loss, g in zip(losses, given, strict=True)
        ]
        # The library runs all backwards after the function; several of them may share a graph.
        torch.autograd.backward(losses, scaled, retain_graph=True)

    outputs = []
    for microbatch in split_batch(batch, NUM_MICROBATCHES):
        result = part.function(model, microbatch, backward)
        outputs.append(result)
    return merge_outputs(outputs)


def _smp_round(model: smp.DistributedModel, part: Round, batch: Batch) -> Any:
    @smp.step
    def run(model: smp.DistributedModel, batch: Batch) -> Any:
        return part.function(model, batch, model.backward)

    return run(model, batch)


def _assert_same(ours: Any, plain: Any, what: str) -> None:
    if isinstance(ours, list) and isinstance(plain, list):
        assert len(ours) == len(plain), what
        for a, b in zip(ours, plain, strict=True):
            _assert_same(a, b, what)
    elif isinstance(ours, Tensor) and isinstance(plain, Tensor):
        assert ours.dtype == plain.dtype, what
        assert ours.shape == plain.shape, what
        assert torch.equal(ours, plain), what
    else:
        assert type(ours) is type(plain), what
        assert ours == plain, what
