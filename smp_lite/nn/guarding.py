"""Between steps: what a script does with pieces of sharded parameters, and of their gradients.

A piece is a run of the parameter's elements, so a function that treats every element by itself is right on
it: optimizers, clamping, averages of weights. A norm, a sum, a row, random numbers, a matrix product or a
file would be one piece's and pass for the whole. So between steps the parameters, their gradients and what is
made of them are of types of their own, which refuse that by name. Inside a step they are ordinary and whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import SMPError
from ..record.values.torch_functions import METADATA_FUNCTIONS, function_name

__all__ = [
    "Piece",
    "PieceParameter",
    "as_ordinary",
    "guarded",
    "is_elementwise",
    "is_unguarded",
    "plain",
    "unguarded",
]

_open = 0


def words(text: str) -> frozenset[str]:
    """Those of a text."""
    return frozenset(text.split())


_HARMLESS = METADATA_FUNCTIONS | words(
    """
    detach detach_ clone requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad copy_
    zero_ fill_ to cpu float double half bfloat16 type type_as contiguous set_ zeros_like ones_like empty_like
    full_like data_ptr untyped_storage storage storage_offset __hash__ __repr__ __str__ __format__ _use_count
    as_subclass is_shared share_memory_ __deepcopy__ new_zeros new_empty new_ones new_full new_tensor
    """
)
"""Functions that are right on a part of a tensor, whatever they do with it."""
_OTHER_SHAPE = frozenset(["T", "mT", "H", "mH", "real", "imag"])
_ARITHMETIC = words(
    """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv pow rpow
    ipow neg pos abs mod rmod imod eq ne lt le gt ge and or xor invert rand ror rxor iand ior ixor
    div rdiv idiv
    """
)


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Within: the library at work, which knows that pieces are pieces."""
    global _open
    _open += 1
    try:
        yield
    finally:
        _open -= 1


def is_unguarded() -> bool:
    """Whether it is the library that asks now."""
    return _open > 0


@contextlib.contextmanager
def as_ordinary(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within: these parameters and their gradients are of torch's own types, as optimizers look for."""
    changed: list[torch.Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad if isinstance(parameter, nn.Parameter) else None
        for tensor, own in ((parameter, nn.Parameter), (gradient, torch.Tensor)):
            if isinstance(tensor, PieceParameter | Piece):
                tensor.__class__ = own
                changed.append(tensor)
    try:
        with unguarded():
            yield
    finally:
        for tensor in changed:
            tensor.__class__ = PieceParameter if isinstance(tensor, nn.Parameter) else Piece


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor, detached."""
    with torch._C.DisableTorchFunctionSubclass():
        found = tensor.detach()
        return found.as_subclass(torch.Tensor) if isinstance(found, PieceParameter | Piece) else found


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether every element of the result depends on the elements at its place alone."""
    if name.startswith("__"):
        return name.strip("_") in _ARITHMETIC
    if name.startswith(("_foreach_", "_fused_", "_amp_")):
        return "norm" not in name and name.rpartition("_")[2] != "max"
    for each in (name, f"{name}_", name.removesuffix("_")):
        packet = getattr(torch.ops.aten, each, None) if each else None
        if packet is None:
            continue
        tags = [tag for overload in packet.overloads() for tag in getattr(packet, overload).tags]
        return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return False


def _guard(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    name = getattr(func, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if _open:
            return func(*args, **(kwargs or {}))
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(func.__self__, "__name__", "")
            if attribute not in _OTHER_SHAPE:
                result = func(*args, **(kwargs or {}))
                return guarded(result) if attribute == "data" and name == "__get__" else result
        elif name in _HARMLESS or is_elementwise(name):
            result = func(*args, **(kwargs or {}))
            return result if name in METADATA_FUNCTIONS else _guarded_like(result, args)
        shape = next((list(a.shape) for a in args if isinstance(a, PieceParameter | Piece)), None)
    what = function_name(func)
    raise SMPError(
        f"{what} of a sharded parameter, or of its gradient, between steps: this rank holds a piece of its "
        f"elements{f', of shape {shape}' if shape else ''}, which would pass for the whole. Functions of "
        "every element by itself are right on pieces. For the rest: torch.nn.utils.clip_grad_norm_ and "
        "get_total_norm mean the whole model; model.state_dict() has whole values; load_state_dict sets "
        "them; penalties on weights go into the step function; initialise before the first step"
    )


def _guarded_like(result: Any, args: tuple[Any, ...]) -> Any:
    """What an allowed function gives, which is a piece again; what was changed in place is what it was."""
    if isinstance(result, list | tuple):
        return type(result)([_guarded_like(each, args) for each in result])
    if not isinstance(result, torch.Tensor) or isinstance(result, PieceParameter | Piece):
        return result
    return guarded(result)


class Piece(torch.Tensor):
    """A gradient's piece, or what was made of pieces."""

    __torch_function__ = classmethod(_guard)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _saved(self, protocol, super().__reduce_ex__)


class PieceParameter(nn.Parameter):
    """A parameter's piece; the very object of the parameter, whose class changes with the steps."""

    __torch_function__ = classmethod(_guard)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with unguarded():
                copied = nn.Parameter(self.data.clone(), self.requires_grad)
            copied.__class__ = PieceParameter
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _saved(self, protocol, super().__reduce_ex__)


def _saved(tensor: torch.Tensor, protocol: Any, plainly: Any) -> Any:
    if _open:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.__reduce_ex__(tensor.detach().as_subclass(torch.Tensor), protocol)
    raise SMPError(
        f"a piece of shape {list(tensor.shape)} of a sharded parameter would be saved, and pass for the "
        "whole: save model.state_dict() and optimizer.state_dict(), which are collective over the ranks that "
        "share the model, or smp.save_checkpoint(..., portable=True)"
    )


def guarded(tensor: Any) -> Any:
    """The same memory, as a piece."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, PieceParameter | Piece):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Piece)
