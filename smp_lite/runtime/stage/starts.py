"""Where the backward of a segment begins, and with which gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ...plan.step.segments import Segment
from ...record.describe.tensor_iterator import is_ambiguous
from .microbatch import MicrobatchState

__all__ = ["keeping_strides", "sum_latest_first", "taken_starts"]


def taken_starts(
    state: MicrobatchState, segment: Segment, scale: float
) -> tuple[list[Any], list[torch.Tensor], dict[int, torch.Tensor]]:
    """Takes what a backward needs out of the state.

    Args:
        state: of the microbatch; what has arrived for the segment is there.
        segment: whose backward is about to run.
        scale: what backwards begin with instead of 1.

    Returns:
        Where it begins, with which gradients, and, by value, what others have found already of the gradients
        that it makes.
    """
    part, visit = state.part, segment.visit
    sums: dict[int, torch.Tensor] = {}
    found: dict[int, torch.Tensor] = {}
    seeds_taken = part.seeds_taken[visit]
    own: list[int] = []
    if segment.roots:
        own = [value for value in segment.roots if value not in state.graph.summed_in_turn]
    if seeds_taken or own:
        for value, seed in _seeds(state, {*seeds_taken, *own}, scale):
            into = sums if value in seeds_taken else found
            into[value] = _added(seed, into[value]) if value in into else seed
    for value, sources in part.gradients_taken[visit]:
        into = sums if value in part.sums_taken[visit] else found
        parts = state.gradients.pop(value, None)
        if parts is None and len(sources) == 1 and value not in into:  # nothing to add: nearly always
            into[value] = state.arriving_gradients.pop((value, sources[0][0])).tensor()
            continue
        parts = parts or {}
        # A stage's sum counts where its latest consumer would have.
        for stage, last in sources:
            parts[last] = state.arriving_gradients.pop((value, stage)).tensor()
        into[value] = sum_latest_first(parts, into.get(value))
    starts: list[Any] = []
    gradients: list[torch.Tensor] = []
    for value, gradient in found.items():
        edge = state.edges.pop(value)
        if edge is not None:
            starts.append(edge)
            gradients.append(gradient)
    return starts, gradients, sums


def sum_latest_first(parts: dict[int, torch.Tensor], total: torch.Tensor | None = None) -> torch.Tensor:
    """Autograd's own order in one process: after ``total`` that of the latest consumer comes first."""
    if total is None and len(parts) == 1:
        (total,) = parts.values()
        return total
    for _, gradient in sorted(parts.items(), reverse=True):
        total = gradient if total is None else _added(total, gradient)
    assert total is not None
    return total


def _added(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The sum, with the strides that it has where autograd adds in place, as to what nobody else holds."""
    if not is_ambiguous(total) or total.dtype is not gradient.dtype:
        return total + gradient
    with torch.no_grad():
        return torch.add(total, gradient, out=torch.empty_like(total))


def keeping_strides(start: Any, gradient: torch.Tensor) -> Any:
    """Where a backward begins in the place of ``start``, which others add to.

    Autograd never adds in place to what it is given to begin with, as it does to what one of its nodes has
    made. Where the sum has other strides then, a node makes what is given. An edge has nothing to put a node
    on (activations that leave memory, copies): its own node lays out the sum.
    """
    if not is_ambiguous(gradient):
        return start
    if isinstance(start, GradientEdge):
        start.node.register_prehook(_laying_out(start.output_nr, gradient.stride()))
        return start
    if start.is_leaf:
        with torch.enable_grad():
            start = torch.ops.aten.alias.default(start)
    start.register_hook(torch.clone)
    return start


def _laying_out(number: int, stride: tuple[int, ...]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def hook(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found = gradients[number]
        if found.stride() == stride:
            return gradients
        laid_out = found.new_empty_strided(found.shape, stride).copy_(found)
        return (*gradients[:number], laid_out, *gradients[number + 1 :])

    return hook


def _seeds(state: MicrobatchState, wanted: set[int], scale: float) -> Iterator[tuple[int, torch.Tensor]]:
    """Those of the values at which backwards begin, and with which gradients."""
    for backward in state.recording.backwards:
        for value, gradient in zip(backward.values, backward.gradients, strict=True):
            if value not in wanted:
                continue
            if gradient is not None:
                yield value, _scaled(gradient, scale)
                continue
            meta = state.recording.values[value].meta
            # Wide first: a loss scale may be infinite in the loss's own type.
            wide = torch.promote_types(meta.dtype, torch.float32)
            seed = torch.full(meta.shape, scale, dtype=wide, device=meta.device)
            yield value, seed.to(meta.dtype)


def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """Divided by the number of microbatches, where that is the scale: as dividing the output by it would."""
    divisor = round(1 / scale) if scale else 0
    return gradient / divisor if divisor and 1 / divisor == scale else gradient * scale
