"""What a backward in which everything stays whole shows: which parameters rules give the same gradients.

A parameter that can be split has one use in the segment (one edge of autograd's graph comes to it), it is
that of a call with a rule, nobody else reads its gradient within the backward, and the rule has made every
bit of what has arrived. Edges are counted since a gradient of zeros, which a second use may give in the first
step, shows nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ...record.backward.gradient_reads import GradientReads
from .splitting import Use

__all__ = ["comparing", "same_bits"]


@contextlib.contextmanager
def comparing(
    touched: Mapping[int, nn.Parameter],
    starts: Sequence[Any],
    watched: list[Use],
    read: dict[int, Any],
    are_equal: Callable[[Tensor, Tensor], bool],
) -> Iterator[tuple[set[int], set[int]]]:
    """Around a backward; afterwards the sets hold the ids of the parameters that can be split, and of those
    that could be by all that was seen, which was zeros, such as a wrong rule makes too.

    Args:
        touched: what may get gradients, by id.
        starts: of the backward.
        watched: the calls with rules; the backward fills it.
        read: tensors, by id, whose gradients somebody reads or sets within a backward; this one adds to it.
        are_equal: compares what has arrived with what a rule has made.
    """
    arrived: dict[int, Tensor] = {}
    task: list[int] = []
    handles = [
        parameter.register_hook(_into(arrived, key))
        for key, parameter in touched.items()
        if parameter.requires_grad and not parameter._backward_hooks  # others change it on its way
    ]
    nodes = [getattr(start, "node", None) or getattr(start, "grad_fn", None) for start in starts]
    nodes = [node for node in nodes if node is not None]
    edges = _edges_to_parameters(nodes)
    # A parameter whose numbers another stage uses: the backward starts at it, too.
    edges.update(id(start) for start in starts if isinstance(start, nn.Parameter))
    handles += [node.register_prehook(_note_task(task)) for node in nodes]
    found: set[int] = set()
    unshown: set[int] = set()
    watched.clear()
    try:
        with GradientReads(lambda tensor: read.setdefault(id(tensor), tensor)):
            yield found, unshown
    finally:
        for handle in handles:
            handle.remove()
    uses = Counter(id(parameter) for use in watched for parameter in use.parameters)
    for use in watched:
        keys = [id(parameter) for parameter in use.parameters]
        # A backward inside the backward (somebody's own autograd.grad) has another number.
        if use.task not in task or not use.is_as_it_was():
            continue
        if any(uses[key] > 1 or edges[key] > 1 or key in read for key in keys):
            continue
        made = zip(keys, use.made(), strict=True)
        if all(
            key in arrived and arrived[key].dtype == gradient.dtype and are_equal(arrived[key], gradient)
            for key, gradient in made
        ):
            shown = all(isinstance(arrived[key], FakeTensor) or bool(arrived[key].any()) for key in keys)
            (found if shown else unshown).update(keys)
    watched.clear()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of what is no number, as a loss scale that is too large makes it."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    bits = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


def _edges_to_parameters(nodes: Sequence[Any]) -> Counter[int]:
    """How many edges of the graph come to each leaf, by its id; also those that bring zeros for now."""
    found: Counter[int] = Counter()
    seen = set(nodes)
    todo = list(seen)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is None:
                continue
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                found[id(leaf)] += 1
            elif node not in seen:
                seen.add(node)
                todo.append(node)
    return found


def _into(arrived: dict[int, Tensor], key: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        arrived[key] = gradient

    return note


def _note_task(task: list[int]) -> Callable[[Any], None]:
    def note(gradients: Any) -> None:
        task.append(torch._C._current_graph_task_id())

    return note
