"""Autograd's engine, for backwards that begin and end where we have cut a graph.

A stage runs one backward for each segment and microbatch, where a script runs one for each microbatch. So
what ``torch.autograd.backward`` does in Python before the engine starts counts as often: it takes longer than
the engine itself takes for a small segment (43 of 73 microseconds), on checks of gradients that are always
given here, and of the right shape (:func:`..step.gradients.backward` sees to those that the script gives).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ...errors import SMPError

__all__ = ["WANTED_DTYPES", "edge_of", "run_backward", "start_threads"]

_python_node = torch._C._FunctionBase
_EDGES_OWN = "ownership_token" in GradientEdge._fields

WANTED_DTYPES = "_smp_output_grad_dtypes"
"""What a function told ``ctx.set_output_grad_dtype()`` (from torch 2.14 on); nodes do not show it."""


def run_backward(starts: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """As ``torch.autograd.backward(starts, gradients)``.

    Args:
        starts: tensors, or their edges.
        gradients: for each its gradient, of its shape.
    """
    if not starts:
        return
    # retain_graph, create_graph, inputs: those of torch.autograd.backward.
    _engine_run_backward(
        tuple(starts), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def start_threads() -> None:
    """Lets autograd start its threads, one for each device that there is.

    It does so in the first backward of the process. Where a CUDA build of torch finds no GPU, a fake mode
    makes it believe in eight; were the first backward after that, the process would have eight idle threads,
    and no process that it forks could run a backward.
    """
    with torch.inference_mode(False), torch.enable_grad():
        run_backward((torch.zeros((), requires_grad=True),), (torch.zeros(()),))


def edge_of(tensor: Tensor) -> Any:
    """Where a backward through ``tensor`` starts, without keeping its data alive.

    Raises:
        SMPError: its function wants a gradient of another dtype than the tensor's.
    """
    node = tensor.grad_fn
    if node is None:
        return tensor
    if isinstance(node, _python_node):
        dtypes = getattr(node, WANTED_DTYPES, None)
        if dtypes is not None and (wanted := dtypes[tensor.output_nr]) != tensor.dtype:
            raise SMPError(
                f"{node.name()}: set_output_grad_dtype() asks for gradients of {wanted} for a result of "
                f"{tensor.dtype} that another stage, or a later part of the step, takes: they are handed "
                "over in the dtype of the result. Leave it out, or put what takes the result into the same "
                "module, on one stage"
            )
        # An edge that keeps a node of Python alive; in torch 2.8 the tensor has to, with its data.
        return get_gradient_edge(tensor) if _EDGES_OWN else tensor
    return GradientEdge(node, tensor.output_nr)
