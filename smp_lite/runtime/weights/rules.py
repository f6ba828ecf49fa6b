"""Which torch functions can give the gradients of their parameters later than that of their input.

A rule runs the function on parameters that are detached, so that autograd's own nodes give the gradient of
the input, and says how the gradients of the parameters follow from the gradient of the output: by the same
kernels, on operands laid out in the same way, as autograd's own nodes use (torch's ``derivatives.yaml`` and
``FunctionsManual.cpp``). Whether the bits really are the same is looked at once on real data, see
:mod:`.deferral`; where a rule meets what it does not know, the call stays whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

__all__ = ["LINEAR", "RULES", "Call", "is_plain"]

LINEAR, ADDMM, EMBEDDING = torch._C._nn.linear, torch.addmm, F.embedding
CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
"""Torch's own: a script may put others in their places, which call these."""

Gradients = Callable[[Tensor], tuple[Tensor, ...]]
"""From the gradient of the output those of the parameters of the call, in their order."""


class Call(NamedTuple):
    """A call that can be split.

    Attributes:
        input: a gradient of it may be wanted at once; an integer tensor has none.
        parameters: those that want a gradient; autograd will not see them.
        run: runs the call on tensors that stand for the parameters, gives the output, and what ``gradients``
            needs beside the gradient of the output.
        reads: tensors that ``gradients`` will read again, beside the parameters.
    """

    input: Tensor
    parameters: tuple[nn.Parameter, ...]
    run: Callable[[Callable[[Any], Any]], tuple[Tensor, Gradients]]
    reads: tuple[Tensor, ...]


def is_plain(tensor: Any) -> bool:
    """Whether it has no ways of its own. (Fake tensors have none: memory is planned with them.)"""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def _trained(weight: Any, bias: Any) -> tuple[nn.Parameter, ...] | None:
    """The parameters of a call, if they are what its rule expects."""
    if not isinstance(weight, nn.Parameter) or not is_plain(weight) or not weight.requires_grad:
        return None
    if not weight.is_floating_point():  # complex ones take conjugates
        return None
    if bias is None:
        return (weight,)
    if not isinstance(bias, nn.Parameter) or not is_plain(bias):
        return None if bias.requires_grad else (weight,)
    return (weight, bias) if bias.requires_grad else (weight,)


def _linear(input: Tensor, weight: Any, bias: Any = None) -> Call | None:
    parameters = _trained(weight, bias)
    if parameters is None or input.dim() < 2 or weight.dim() != 2 or input.is_nested:
        return None
    if not input.is_contiguous() or not weight.is_contiguous():
        return None  # autograd's product is turned round where they are
    is_addmm = input.dim() < 4  # else a product and a sum

    def run(stand_in: Callable[[Any], Any]) -> tuple[Tensor, Gradients]:
        def gradients(gradient: Tensor) -> tuple[Tensor, ...]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            found = rows.t().mm(input.reshape(-1, input.shape[-1]))
            if len(parameters) == 1:
                return (found,)
            return found, (rows if is_addmm else gradient).sum_to_size(bias.shape)

        return LINEAR(input, stand_in(weight), stand_in(bias)), gradients

    return Call(input, parameters, run, (input,))


def _addmm(input: Any, mat1: Tensor, mat2: Any, **others: Any) -> Call | None:
    """``addmm(bias, x, weight)``, the linear layer of GPT-2."""
    parameters = _trained(mat2, input)
    if others or parameters is None or not mat1.is_contiguous() or not mat2.is_contiguous():
        return None

    def run(stand_in: Callable[[Any], Any]) -> tuple[Tensor, Gradients]:
        def gradients(gradient: Tensor) -> tuple[Tensor, ...]:
            found = mat1.t().mm(gradient)
            return (found,) if len(parameters) == 1 else (found, gradient.sum_to_size(input.shape))

        return ADDMM(stand_in(input), mat1, stand_in(mat2)), gradients

    return Call(mat1, parameters, run, (mat1,))


def _convolution(num_dims: int) -> Callable[..., Call | None]:
    function = CONVOLUTIONS[num_dims - 1]

    def read(
        input: Tensor,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Call | None:
        parameters = _trained(weight, bias)
        if parameters is None or input.dim() != num_dims + 2 or isinstance(padding, str):
            return None
        sizes = [
            [size] * num_dims if isinstance(size, int) else list(size) for size in (stride, padding, dilation)
        ]
        if any(len(size) != num_dims for size in sizes):
            return None
        bias_sizes = None if bias is None else list(bias.shape)

        def run(stand_in: Callable[[Any], Any]) -> tuple[Tensor, Gradients]:
            def gradients(gradient: Tensor) -> tuple[Tensor, ...]:
                mask = [False, True, len(parameters) == 2]
                found = torch.ops.aten.convolution_backward(
                    gradient, input, weight, bias_sizes, *sizes, False, [0] * num_dims, groups, mask
                )
                return found[1 : 1 + len(parameters)]

            output = function(input, stand_in(weight), stand_in(bias), stride, padding, dilation, groups)
            return output, gradients

        return Call(input, parameters, run, (input,))

    return read


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call | None:
    """Without those that change the weight, or have a sparse gradient."""
    parameters = _trained(weight, None)
    if parameters is None or max_norm is not None or sparse or input.dtype not in (torch.int32, torch.int64):
        return None
    length = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx if padding_idx >= 0 else padding_idx + length

    def run(stand_in: Callable[[Any], Any]) -> tuple[Tensor, Gradients]:
        def gradients(gradient: Tensor) -> tuple[Tensor, ...]:
            backward = torch.ops.aten.embedding_dense_backward
            return (backward(gradient, input, length, padding, scale_grad_by_freq),)

        return EMBEDDING(input, stand_in(weight), padding_idx, None, norm_type, scale_grad_by_freq), gradients

    return Call(input, parameters, run, (input,))


RULES: dict[Any, Callable[..., Call | None]] = {
    LINEAR: _linear,
    ADDMM: _addmm,
    **{function: _convolution(i + 1) for i, function in enumerate(CONVOLUTIONS)},
    EMBEDDING: _embedding,
}
"""By torch function; a rule takes its arguments, and gives None for a call that stays whole."""
