"""The gradients of the leaves at which the backward of a segment ends, as autograd came to them.

A leaf's ``.grad`` is laid out like the leaf, which may need a copy. In one process there is no leaf: what
runs next gets the gradient with the strides that it has, and may choose its kernels by them. So where they
are others than the leaf's, a hook takes the gradient on its way.

What a leaf gets may be the memory of a parameter's ``.grad`` too: of ``x + self.position[None]``, for one
sample, both get one tensor, by views, which autograd takes for ``.grad`` without a copy. In one process
nobody holds the other when the next backward adds to it. Here it waits for its consumer, or is on its way,
as a copy.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch._subclasses import FakeTensor

from ...comm.layout import handed_over
from ...errors import SMPError
from ...record.describe.tensor_iterator import preserved
from ...record.values.memory import num_users

__all__ = ["CutGradients", "of_its_own"]


class CutGradients:
    """Made before a backward.

    Args:
        leaves: by value.
    """

    def __init__(self, leaves: Mapping[int, torch.Tensor]) -> None:
        self._leaves = leaves
        self._others: dict[int, torch.Tensor | None] = {}  # None: the leaf has it
        for value, leaf in leaves.items():
            hook = self._noting(value, leaf)
            if leaf._backward_hooks is None:
                leaf._backward_hooks = OrderedDict({0: hook})  # a tenth of what register_hook() takes
            else:
                leaf.register_hook(hook)

    def _noting(self, value: int, leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor | None]:
        others = self._others
        stride = leaf.stride() if leaf.layout is torch.strided else ()
        weak = weakref.ref(leaf)

        def note(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:
                # Zeros instead would be another thing: what comes before would get gradients of its own.
                raise SMPError(
                    "the backward of an autograd function gives None for a value that another stage, or an "
                    "earlier part of the step, has made: give the function value.detach(), or give zeros"
                )
            if value not in others:
                # Of a fake one the leaf makes a copy, as large as the one here: memory is planned with that.
                is_other = gradient.layout is torch.strided and gradient.stride() != stride
                if not is_other or isinstance(gradient, FakeTensor):
                    others[value] = None
                    return None
                others[value] = handed_over(gradient)  # a slice must not keep all that it is of
            else:  # a backward within the backward: it comes in parts
                before = others[value]
                if before is None:
                    return None
                others[value] = before + gradient
            # The leaf takes what is laid out like it as it is: its own numbers, which nobody reads.
            leaf = weak()
            return None if leaf is None else leaf.detach()

        return note

    def taken(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each value's gradient, zeros where none has come; the leaves keep none."""
        for value, leaf in self._leaves.items():
            gradient = self._others.pop(value, None)
            if gradient is None:
                gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            # A loss that the step returns keeps its graph's leaves, not what they got.
            leaf.grad = None
            yield value, of_its_own(gradient)


def of_its_own(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, or a copy where others have its memory, to which a backward may add: if it is dense."""
    if num_users(gradient) > 1 and preserved(gradient) is not None:
        return gradient.clone()
    return gradient
