"""Between steps: what a script does with pieces of sharded parameters, and of their gradients.

A piece is a run of the parameter's elements, so a function that treats every element by itself is right on
it: optimizers, clamping, averages of weights. A norm, a sum, a row, random numbers, a matrix product or a
file would be one piece's and pass for the whole. So between steps the parameters, their gradients and what is
made of them are of types of their own, which refuse that by name. Inside a step they are ordinary and whole.

To a script a piece has the shape of its whole: it prints numbers of elements and decides by dimensions. The
library's own code is told what is here. So a tensor that a script makes by a parameter's shape is of the
whole, and to compute with it and a piece is refused too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import SMPError
from ..record.values.torch_functions import METADATA_FUNCTIONS, changes_first, function_name

__all__ = [
    "Piece",
    "PieceParameter",
    "as_between_steps",
    "as_ordinary",
    "close_all",
    "guarded",
    "is_by_element",
    "is_elementwise",
    "is_unguarded",
    "of_state",
    "piece_like",
    "plain",
    "set_whole_shape",
    "tensors_of",
    "unguarded",
]

Tensors = Callable[[], Iterable[tuple[torch.Tensor, torch.Size]]]
"""Gives the pieces there are now, with the shapes of their wholes."""

_open = 0
_ordinary: list[_Ordinary] = []  # what is of torch's own types now, the outermost first
_OWN_CODE = f"{__name__.partition('.')[0]}."
_READS_MEMORY = "safetensors."
"""A package that takes as many bytes as the shape says from where a tensor's memory begins."""
_WHOLE_SHAPE = "smp_whole_shape"
_WHOLE_STRIDE = "smp_whole_stride"
_AWAY = "smp_root"
"""What types of tensors have that live on another rank (:mod:`smp_lite.record.parameters.away`)."""


def words(text: str) -> frozenset[str]:
    """Those of a text."""
    return frozenset(text.split())


_HARMLESS = METADATA_FUNCTIONS | words(
    """
    detach detach_ clone requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad copy_
    zero_ fill_ to cpu float double half bfloat16 type type_as contiguous set_ zeros_like ones_like empty_like
    full_like data_ptr untyped_storage storage storage_offset __hash__ __repr__ __str__ __format__ _use_count
    is_shared share_memory_ __deepcopy__ new_zeros new_empty new_ones new_full new_tensor
    """
)
"""Functions that are right on a part of a tensor, whatever they do with it."""
_SIZES = words("shape ndim nbytes size dim numel nelement ndimension stride __len__ dim_order is_same_size")
"""What asks for the shape, and is told that of the whole."""
_MAKES_ANEW = words("new_zeros new_empty new_ones new_full new_tensor")
"""Functions whose result has the shape that they are given, and nothing of the piece in it."""
_PUTS_IN_PLACE = words("copy_ set_")
_OTHER_SHAPE = frozenset(["T", "mT", "H", "mH", "real", "imag"])
_NOT_SAID = words("masked_fill masked_fill_")
"""Functions of every element of which torch does not say so."""
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


def close_all() -> None:
    """A session ends: what an error may have left open is closed."""
    global _open
    _open = 0
    _ordinary.clear()


def is_unguarded() -> bool:
    """Whether it is the library that asks now."""
    return _open > 0


class _Ordinary:
    """Pieces that are of torch's own types for now, as optimizers look for."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._changed: list[tuple[torch.Tensor, type]] = []

    def open(self) -> None:
        """They become ordinary."""
        for tensor, _ in self._tensors():
            if type(tensor) in (Piece, PieceParameter):
                self._changed.append((tensor, type(tensor)))
                tensor.__class__ = nn.Parameter if type(tensor) is PieceParameter else torch.Tensor

    def close(self) -> None:
        """They are pieces again, and so is what has come to them: a new gradient, new state."""
        for tensor, kind in self._changed:
            tensor.__class__ = kind
        self._changed.clear()
        for tensor, shape in self._tensors():
            if type(tensor) is torch.Tensor:
                set_whole_shape(tensor, shape)
                tensor.__class__ = Piece


@contextlib.contextmanager
def as_ordinary(tensors: Tensors) -> Iterator[None]:
    """Within: pieces are of torch's own types, for an optimizer that steps them."""
    ordinary = _Ordinary(tensors)
    ordinary.open()
    _ordinary.append(ordinary)
    try:
        with unguarded():
            yield
    finally:
        _ordinary.remove(ordinary)
        ordinary.close()


@contextlib.contextmanager
def as_between_steps() -> Iterator[None]:
    """Within: pieces are guarded, wherever the library is: a script's own code runs (a closure, a hook)."""
    global _open
    outer = _open
    _open = 0
    opened = list(_ordinary)
    for ordinary in reversed(opened):
        ordinary.close()
    try:
        yield
    finally:
        for ordinary in opened:
            ordinary.open()
        _open += outer  # what is closed late, after an error, may find it open for another reason


def tensors_of(parameters: Iterable[torch.Tensor], state: Any) -> Iterator[tuple[torch.Tensor, torch.Size]]:
    """Of sharded parameters: themselves, their gradients, and what an optimizer keeps of each element.

    Args:
        parameters: any.
        state: of an optimizer, by parameter.
    """
    for parameter in parameters:
        shape = getattr(parameter, _WHOLE_SHAPE, None)
        if shape is None:
            continue
        local = tuple(parameter.shape)
        if local == shape:  # brought together, for a while
            continue
        yield parameter, shape
        if parameter.grad is not None and tuple(parameter.grad.shape) == local:
            yield parameter.grad, shape
        yield from of_state(state.get(parameter), local, shape)


def of_state(
    state: Any, local: tuple[int, ...], shape: torch.Size
) -> Iterator[tuple[torch.Tensor, torch.Size]]:
    """The pieces in the state of one parameter: what is of the shape of its piece."""
    if isinstance(state, dict):
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == local:
                yield value, shape


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor, detached."""
    with torch._C.DisableTorchFunctionSubclass():
        found = tensor.detach()
        return torch.Tensor.as_subclass(found, torch.Tensor) if _is_piece(found) else found


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether every element of the result depends on the elements at its place alone."""
    if name.startswith("__"):
        return name.strip("_") in _ARITHMETIC
    if name in _NOT_SAID:
        return True
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
    kwargs = kwargs or {}
    if "_foreach_" in name and any(hasattr(kind, _AWAY) for kind in types):
        return NotImplemented  # theirs runs it on those that are here; torch's own may do nothing at all
    with torch._C.DisableTorchFunctionSubclass():
        if _open > 0:
            return func(*args, **kwargs)
        if name == "detach_" and not args[0].requires_grad:
            return args[0]  # torch refuses it of views, as pieces are
        if name == "data_ptr" and _is_asked_by(_READS_MEMORY):
            raise _not_saved(args[0])
        attribute = getattr(func.__self__, "__name__", "") if name in _ACCESS else name
        if attribute in _SIZES and name not in ("__set__", "__delete__"):
            if not _is_asked_by(_OWN_CODE):
                args = tuple(_measured(each) if _is_piece(each) else each for each in args)
            return func(*args, **kwargs)
        if name in _ACCESS:
            if attribute not in _OTHER_SHAPE:
                if attribute == "grad" and name == "__set__":
                    _take_gradient(*args)
                result = func(*args, **kwargs)
                is_data = attribute == "data" and name == "__get__"
                return guarded(result, _whole_shape(args[0])) if is_data else result
        elif name in _HARMLESS or (is_elementwise(name) and is_by_element(name, args, kwargs)):
            shapes: dict[int | None, torch.Size | None] = {}
            if name in _PUTS_IN_PLACE or name not in _HARMLESS:
                shapes = _checked(func, changes_first(name, kwargs), args, kwargs)
            result = func(*args, **kwargs)
            if name in METADATA_FUNCTIONS or name in _MAKES_ANEW:
                return result
            if shapes:
                return _guarded_like(result, shapes)
            # Of what the function is of; a piece may also be named for its type (type_as).
            first = next(iter((*args, *kwargs.values())), None)
            return guarded(result, _whole_shape(first)) if _is_piece(first) else result
        piece = next((a for a in args if _is_piece(a)), None)
        shape = None if piece is None else list(piece.shape)
    raise SMPError(
        f"{function_name(func)} of a sharded parameter, or of its gradient, between steps: this rank holds a "
        f"piece of its elements{f', of shape {shape}' if shape else ''}, which would pass for the whole. "
        "Functions of every element by itself are right on pieces. For the rest: "
        "torch.nn.utils.clip_grad_norm_ and get_total_norm mean the whole model; model.state_dict() and "
        "optimizer.state_dict() have whole values; load_state_dict sets them; penalties on weights go into "
        "the step function; initialise before the first step"
    )


_ACCESS = words("__get__ __set__ __delete__")


def is_by_element(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function that may treat every element by itself does so with these arguments."""
    if name in ("max", "min"):
        return isinstance(args[1] if len(args) > 1 else kwargs.get("other"), torch.Tensor)
    if name == "equal":  # pointwise to torch, and one answer
        return False
    return name != "where" or len(args) + len(kwargs) == 3


def _is_piece(value: Any) -> bool:
    return isinstance(value, PieceParameter | Piece)


def _whole_shape(piece: torch.Tensor) -> torch.Size:
    found: torch.Size = getattr(piece, _WHOLE_SHAPE, piece.shape)
    return found


def set_whole_shape(
    tensor: torch.Tensor, shape: Iterable[int], stride: tuple[int, ...] | None = None
) -> None:
    """Says of what shape, and of what strides (None: contiguous), the tensor is whose piece this one is."""
    setattr(tensor, _WHOLE_SHAPE, torch.Size(shape))
    if stride is not None:
        setattr(tensor, _WHOLE_STRIDE, stride)


def piece_like(tensor: torch.Tensor | None, piece: torch.Tensor) -> torch.Tensor | None:
    """The tensor as a piece of a whole like that of this one."""
    if tensor is not None:
        tensor = guarded(tensor, _whole_shape(piece))
        set_whole_shape(tensor, _whole_shape(piece), getattr(piece, _WHOLE_STRIDE, None))
    return tensor


def _is_asked_by(package: str) -> bool:
    """Whether it is this package's code that has called what torch handed on to :func:`_guard`."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(package)


def _measured(piece: torch.Tensor) -> torch.Tensor:
    """What has the sizes of a piece's whole."""
    return _measures(_whole_shape(piece), getattr(piece, _WHOLE_STRIDE, None), piece.dtype)


@functools.lru_cache(maxsize=4096)
def _measures(shape: torch.Size, stride: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
    if stride is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _take_gradient(parameter: torch.Tensor, gradient: Any) -> None:
    """A script sets a gradient: from now on it is a piece as well."""
    if not isinstance(gradient, torch.Tensor):
        return
    is_piece = _is_piece(gradient)
    if gradient.shape != parameter.shape or (is_piece and not _goes_with(parameter, gradient, False)):
        raise _mixed("grad", parameter, gradient)
    if is_piece or type(gradient) is not torch.Tensor:
        return
    set_whole_shape(gradient, _whole_shape(parameter))
    gradient.__class__ = Piece


def _checked(
    func: Any, changes_first_one: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int | None, torch.Size | None]:
    """The whole shape of what comes of pieces; for functions of lists by place.

    Raises:
        SMPError: not all tensors are pieces of one shape. One number goes with every piece.
    """
    # What is changed first: the first argument, or ``out``.
    given = [kwargs["out"], *args] if isinstance(kwargs.get("out"), torch.Tensor) else list(args)
    given += [value for key, value in kwargs.items() if key != "out"]
    longest = max((len(each) for each in given if isinstance(each, list | tuple)), default=None)
    found: dict[int | None, torch.Size | None] = {}
    for place in [None] if longest is None else range(longest):
        members = [
            (number == 0 and changes_first_one, value)
            for number, each in enumerate(given)
            if isinstance(value := _at(each, place), torch.Tensor)
        ]
        piece = next((value for _, value in members if _is_piece(value)), None)
        found[place] = None if piece is None else _whole_shape(piece)
        if piece is None:
            continue
        for is_changed, value in members:
            if not _goes_with(piece, value, is_changed):
                raise _mixed(function_name(func), piece, value)
    return found


def _at(argument: Any, place: int | None) -> Any:
    if place is None or not isinstance(argument, list | tuple):
        return argument
    return argument[place] if place < len(argument) else None


def _goes_with(piece: torch.Tensor, other: torch.Tensor, is_changed: bool) -> bool:
    """Whether a function of every element finds at each place what it would in the wholes."""
    shape = _whole_shape(piece)
    if _is_piece(other):
        return _whole_shape(other) == shape and other.shape == piece.shape
    if is_changed:
        return False  # it would go on as if it were whole
    if other.numel() == 1:
        return other.dim() <= 1
    if other.shape != piece.shape:
        return False
    # A row as long as the piece goes with the whole as well, in another way. If it does not, it is meant.
    fits = zip(reversed(other.shape), reversed(shape), strict=False)
    return not all(mine in (1, theirs) for mine, theirs in fits)


def _mixed(what: str, piece: torch.Tensor, other: torch.Tensor) -> SMPError:
    is_piece = _is_piece(other)
    return SMPError(
        f"{what} of a piece of a sharded parameter and of a tensor that is none of it, between steps: this "
        f"rank holds {list(piece.shape)} of {list(_whole_shape(piece))}, and the other is "
        f"{f'a piece of {list(_whole_shape(other))}' if is_piece else f'of shape {list(other.shape)}'}. Make "
        "what goes with a parameter from the parameter, after the first step (torch.zeros_like(parameter), "
        "parameter.detach().clone()); where the whole is needed: model.state_dict(), smp.gathered(model)"
    )


def _guarded_like(result: Any, shapes: dict[int | None, torch.Size | None]) -> Any:
    """What an allowed function gives, which is a piece again, or several."""
    if isinstance(result, list | tuple):
        if None in shapes:
            return type(result)([_guarded_like(each, shapes) for each in result])
        return type(result)([guarded(each, shapes[place]) for place, each in enumerate(result)])
    return guarded(result, shapes[None]) if None in shapes else result


def _as_subclass(self: torch.Tensor, cls: type) -> Any:
    """``Tensor.as_subclass``, which torch does not hand on."""
    if _open > 0 or issubclass(cls, Piece | PieceParameter):
        return torch.Tensor.as_subclass(self, cls)
    return _guard(type(self), torch.Tensor.as_subclass, (type(self),), (self, cls))


class Piece(torch.Tensor):
    """A gradient's piece, or what was made of pieces."""

    __torch_function__ = classmethod(_guard)
    as_subclass = _as_subclass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with unguarded():
                memo[id(self)] = guarded(self.detach().clone(), _whole_shape(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _saved(self, protocol, super().__reduce_ex__)


class PieceParameter(nn.Parameter):
    """A parameter's piece; the very object of the parameter, whose class changes with the steps."""

    __torch_function__ = classmethod(_guard)
    as_subclass = _as_subclass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with unguarded():
                copied = nn.Parameter(self.data.clone(), self.requires_grad)
            copied.__class__ = PieceParameter
            set_whole_shape(copied, _whole_shape(self))
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _saved(self, protocol, super().__reduce_ex__)


def _saved(tensor: torch.Tensor, protocol: Any, plainly: Any) -> Any:
    if _open > 0:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.__reduce_ex__(plain(tensor), protocol)
    raise _not_saved(tensor)


def _not_saved(tensor: torch.Tensor) -> SMPError:
    with torch._C.DisableTorchFunctionSubclass():
        shape = list(tensor.shape)
    return SMPError(
        f"a piece of shape {shape} of a sharded parameter would be saved, and pass for the "
        "whole: save model.state_dict() and optimizer.state_dict(), which are collective over the ranks that "
        "share the model, or smp.save_checkpoint(..., portable=True)"
    )


def guarded(tensor: Any, shape: Iterable[int] | None) -> Any:
    """The same memory, as a piece of what has that shape; None: it is none."""
    if shape is None or not isinstance(tensor, torch.Tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        if not isinstance(tensor, PieceParameter | Piece):
            tensor = torch.Tensor.as_subclass(tensor, Piece)
        if getattr(tensor, _WHOLE_SHAPE, None) is None:
            set_whole_shape(tensor, shape)
    return tensor
