"""What torch functions mean to the recorder, by their names.

Names, because one function has many faces (``torch.add``, ``Tensor.add``, ``Tensor.__add__``); torch hands on
the face that was called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


METADATA_PROPERTIES = _words(
    """
    shape dtype device ndim requires_grad is_leaf layout is_cuda is_cpu is_sparse is_quantized
    is_meta is_nested is_mkldnn is_mps is_xpu is_xla is_ipu is_vulkan is_sparse_csr itemsize nbytes
    names grad retains_grad output_nr _version is_maia is_mtia is_hpu name _backward_hooks
    """
)
"""Attributes that read only what a placed value knows."""

METADATA_FUNCTIONS = _words(
    """
    size dim numel nelement ndimension stride storage_offset is_floating_point is_complex
    is_contiguous element_size get_device is_signed __len__ __hash__ is_tensor is_inference
    is_same_size can_cast result_type has_names is_conj is_neg dim_order is_shared is_pinned
    """
)
"""Functions that read only what a placed value knows."""

LOOKS_AT_DATA = _words(
    """
    item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __array__ __contains__
    is_nonzero equal allclose __repr__ __str__ __format__ __reduce_ex__ __dlpack__ data_ptr
    untyped_storage storage
    """
)
"""Python needs the numbers now."""

IN_PLACE_OPERATORS = _words(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__
    __ior__ __ixor__ __ilshift__ __irshift__ __imatmul__ __idiv__
    """
)
"""Operators that change their first argument; so do names that end in one underscore."""

SHARES_MEMORY = _words("numpy __array__ __dlpack__ data_ptr untyped_storage storage")
"""Functions whose result lets Python change an ordinary tensor without torch hearing of it."""

DETACHES = _words("detach")
"""Functions whose result has no gradient."""

REFUSED = {
    "backward": "call model.backward(loss)",
    "grad": "model.backward(loss) is the only backward. Gradients of inputs are in input.grad after the "
    "step; "
    "gradients of gradients are not supported",
    "detach_": "write x = x.detach()",
    "retain_grad": "gradients exist only after the step; x.register_hook(function) sees them when they are "
    "made",
    "apply_": "use torch functions",
    "map_": "use torch functions",
    "map2_": "use torch functions",
}
"""What cannot be recorded, and what to do instead."""

FROM_NUMBERS = frozenset(
    (
        torch.tensor,
        torch.full,
        torch.Tensor.new_tensor,
        torch.Tensor.new_full,
        torch.arange,
        torch.range,
        torch.linspace,
        torch.logspace,
    )
)
"""They read numbers out of their arguments inside torch, where autograd is off and nobody hears of it."""


def is_metadata(func: Any, name: str) -> bool:
    """Whether the function reads only what a placed value knows."""
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in METADATA_PROPERTIES
    return name in METADATA_FUNCTIONS


def changes_first(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call of that name changes its first argument, or ``out``, in place."""
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name in IN_PLACE_OPERATORS
        or bool(kwargs.get("inplace"))
        or isinstance(kwargs.get("out"), torch.Tensor)
    )


def function_name(function: Callable[..., Any]) -> str:
    """A readable name that is the same in every process: ``add``, ``T``, ``MyFunction.apply``."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", name))  # type: ignore[attr-defined]
    return str(name)
