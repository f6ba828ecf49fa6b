"""What torch functions mean to the recorder, by their names.

Names, because one function has many faces (``torch.add``, ``Tensor.add``, ``Tensor.__add__``); torch hands on
the face that was called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload


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
    size dim numel nelement ndimension stride is_floating_point is_complex
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
    "storage_offset": "where it lies in memory is not known before it is made",
    "_is_view": "whether it shares memory is not known before it is made",
    "is_set_to": "whether it shares memory is not known before it is made",
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


def changed_by(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The tensors among the arguments that a call changes in place, or may change."""
    if isinstance(func, OpOverload):
        declared = func._schema.arguments
        known = dict(zip([argument.name for argument in declared], args), **kwargs)
        return _tensors_in([known.get(each.name) for each in declared if _is_written(each)])
    if kwargs.get("out") is not None:
        return _tensors_in([kwargs["out"]])
    if changes_first(name, kwargs):
        # Of several lists (torch._foreach_add_, torch._fused_adamw_) it may be any.
        return _tensors_in([each for each in args if type(each) in (list, tuple)] or args[:1])
    if "batch_norm" in name or "instance_norm" in name:  # of running statistics
        return _tensors_in([*args[1:], *kwargs.values()])
    if name in ("embedding", "embedding_bag") and kwargs.get("max_norm") is not None:
        return _tensors_in(args[:2])
    return []


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += _tensors_in(value)
    return found


def function_name(function: Callable[..., Any]) -> str:
    """A readable name that is the same in every process: ``add``, ``T``, ``MyFunction.apply``."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", name))  # type: ignore[attr-defined]
    return str(name)
