"""Between steps: what a script does with parameters of split layers, and with their gradients.

A rank has its part of such a parameter. Functions of every element by itself are right on it, and so is what
looks at the part as it is (comparisons, copies, other views of it). A norm, a sum, a matrix product or random
numbers would be one part's and pass for the whole's. So between steps these parameters, their gradients and
what is made of them are of types of their own, which refuse that by name when it is the script's code that
asks. Its shape is the part's, and what is computed with a tensor of that shape that the script has made is
the script's own affair: it knows of parts. Pieces of sharded parameters are guarded by :mod:`.guarding`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import SMPError
from ..record.values.torch_functions import METADATA_FUNCTIONS, function_name
from .guarding import is_by_element, is_elementwise, is_unguarded, words
from .layout import layout_of

__all__ = ["Part", "PartGuard", "PartParameter", "is_guarded"]

_LIBRARY = f"{__name__.partition('.')[0]}."
_HARMLESS = METADATA_FUNCTIONS | words(
    """
    detach detach_ clone requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad copy_
    zero_ fill_ to cpu cuda float double half bfloat16 type type_as contiguous set_ zeros_like ones_like
    empty_like full_like rand_like randn_like data_ptr untyped_storage storage storage_offset __hash__
    __repr__ __str__ __format__ is_shared share_memory_ new_zeros new_empty new_ones new_full new_tensor
    size numel nelement dim ndimension stride __len__ dim_order is_same_size nbytes
    """
)
_LOOKS = words("equal allclose isclose numpy tolist item __array__ __bool__")
"""Gives ordinary numbers of the part as it is."""
_VIEWS = words(
    """
    view reshape flatten unflatten transpose permute t squeeze unsqueeze expand narrow select __getitem__
    chunk split tensor_split unbind movedim swapaxes swapdims view_as expand_as ravel adjoint
    """
)
_MAKES_ANEW = words("new_zeros new_empty new_ones new_full new_tensor rand_like randn_like")
_ACCESS = words("__get__ __set__ __delete__")
_DATA = frozenset(["data", "grad", "T", "mT", "H", "mH", "real", "imag"])


class PartGuard:
    """Guards the parts in a model between its steps.

    Args:
        module: a model, whose layers are split.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._within = 0
        self._parts: list[nn.Parameter] = []
        self._switch_on()

    @contextlib.contextmanager
    def ordinary(self) -> Iterator[None]:
        """Within: parts are of torch's own types. A step runs, forward and backward, or an optimizer."""
        self._within += 1
        if self._within == 1:
            self._switch_off()
        try:
            yield
        finally:
            self._within -= 1
            if not self._within:
                self._switch_on()

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """Within: they are guarded, wherever the library is: a script's own code runs (a closure, a hook)."""
        outer, self._within = self._within, 0
        self._switch_on()
        try:
            yield
        finally:
            self._within = outer
            if outer:
                self._switch_off()

    def _switch_off(self) -> None:
        for part in self._parts:
            if type(part) is PartParameter:
                part.__class__ = nn.Parameter

    def _switch_on(self) -> None:
        self._parts = [
            parameter
            for parameter in self._module.parameters()
            if type(parameter) in (nn.Parameter, PartParameter) and is_guarded(parameter)
        ]
        for part in self._parts:
            part.__class__ = PartParameter

    def end(self) -> None:
        """For good."""
        self._within = 1
        self._switch_off()


def is_guarded(parameter: torch.Tensor) -> bool:
    """Whether a rank has its part of it, and others have theirs."""
    layout = layout_of(parameter)
    return layout is not None and any(axis.size > 1 for axes in layout.dims for axis in axes)


def _guard(cls: type, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if is_unguarded() or _is_the_librarys(sys._getframe(1)):
            return func(*args, **kwargs)
        if name in _ACCESS:
            attribute = getattr(func.__self__, "__name__", "")
            if name == "__set__" and attribute in _DATA:
                args = (args[0], *map(_plain, args[1:]))
            result = func(*args, **kwargs)
            return _guarded(result) if name == "__get__" and attribute in _DATA else result
        if name in _LOOKS:
            return func(*args, **kwargs)
        by_element = is_elementwise(name) and is_by_element(name, args, kwargs)
        if name in _HARMLESS or name in _VIEWS or by_element:
            result = func(*args, **kwargs)
            if name in METADATA_FUNCTIONS or name in _MAKES_ANEW or _has_own(args, kwargs):
                return result
            return _guarded(result)
        part = next((each for each in _members(args, kwargs) if isinstance(each, Part | PartParameter)), None)
        shape = "" if part is None else f", of shape {list(part.shape)},"
    raise SMPError(
        f"{function_name(func)} of a parameter of a split layer, or of its gradient, between steps: this "
        f"rank has a part of it{shape} which would pass for the whole. Functions of every element by itself "
        "are right on parts. For the rest: torch.nn.utils.clip_grad_norm_ and get_total_norm mean the whole "
        "model; model.state_dict() has whole values, model.load_state_dict() sets them; initialise before "
        "smp.DistributedModel; numpy() and tolist() give the numbers of the part"
    )


def _is_the_librarys(frame: types.FrameType | None) -> bool:
    """Whether this library's code has called what torch handed on, by torch or at once."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and name != "torch" and not name.startswith(("torch.", "contextlib")):
            return name.startswith(_LIBRARY)
        frame = frame.f_back
    return False


def _members(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, list | tuple):
            yield from arg
        else:
            yield arg


def _has_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is a tensor of several elements among the arguments that the script has made."""
    return any(
        isinstance(each, torch.Tensor) and not isinstance(each, Part | PartParameter) and each.numel() > 1
        for each in _members(args, kwargs)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Part | PartParameter):
        return torch.Tensor.as_subclass(value.detach(), torch.Tensor)
    return value


def _guarded(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(map(_guarded, result)) if type(result) in (list, tuple) else result
    if type(result) is torch.Tensor:
        return torch.Tensor.as_subclass(result, Part)
    return result


def _saved(tensor: torch.Tensor, protocol: int) -> Any:
    """As torch's own types."""
    with torch._C.DisableTorchFunctionSubclass():
        plain: torch.Tensor = _plain(tensor)
        if isinstance(tensor, nn.Parameter):
            plain = nn.Parameter(plain, tensor.requires_grad)
        own = {key: value for key, value in vars(tensor).items() if not key.startswith("smp_")}
        plain.__dict__.update(own)  # not how it lies, which is the module's to say
        return plain.__reduce_ex__(protocol)


class Part(torch.Tensor):
    """The gradient of a part, or what was made of parts."""

    __torch_function__ = classmethod(_guard)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = _guarded(_plain(self).clone())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _saved(self, protocol)


class PartParameter(nn.Parameter):
    """A part; the very object of the parameter, whose class changes with the steps."""

    __torch_function__ = classmethod(_guard)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = nn.Parameter(_plain(self).clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _saved(self, protocol)
