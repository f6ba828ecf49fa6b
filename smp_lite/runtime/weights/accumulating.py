"""Adding a gradient to a parameter's, as autograd does at the end of a backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...record.backward.engine import run_backward

__all__ = ["accumulate", "node_is_held"]

_SEEN = "smp_lite.seen"


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """By autograd's own node where this is the first gradient, or hooks wait for it; else by an addition.

    The node is what hooks on the parameter hang on; to run it takes ten times as long as a small addition.
    The user's hooks keep a parameter whole (:func:`.modules.without_hooks`), so those that wait here are the
    library's own: replicas want to know of each last gradient, for the time of that ``W``.

    Args:
        parameter: a leaf.
        gradient: of its shape.
    """
    total = parameter.grad
    if (
        total is None
        or total.requires_grad
        or total.layout is not torch.strided
        or parameter._backward_hooks
        or parameter._post_accumulate_grad_hooks
    ):
        run_backward((parameter,), (gradient,))
        return
    with torch.no_grad():
        total.add_(gradient)


def node_is_held(parameter: nn.Parameter) -> bool:
    """Whether somebody keeps the node, since only who does can have put a hook on it.

    A parameter makes a new node for whoever asks once the one before is gone, so a mark says whether it is.
    """
    if _SEEN in torch.autograd.graph.get_gradient_edge(parameter).node.metadata:
        return True
    torch.autograd.graph.get_gradient_edge(parameter).node.metadata[_SEEN] = True
    return _SEEN in torch.autograd.graph.get_gradient_edge(parameter).node.metadata
