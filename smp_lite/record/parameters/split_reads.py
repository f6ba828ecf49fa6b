"""Code that computes with a split parameter and is not the layer that the parameter belongs to.

Such code has one rank's part and would take it for the whole: a penalty on weights counts what is here only,
a number made of a size is another one than in one process. Where all ranks have the same batch such numbers
may differ between them and be found so; where each has its own, results differ anyway, and nothing would be
seen. So it is refused by name, in the step function and in modules' forwards, without gradients too: what is
made of a part (``p.detach()``) does not say what it was made of. Not refused is what says nothing of numbers
or sizes, and what changes every element by itself in place. Code of split layers knows what it holds.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...errors import SMPError
from ...nn.guarding import is_elementwise, words
from ...nn.keeping import KeepsLayouts
from ...nn.layout import layout_of
from ..code.frames import users_line
from ..code.fused_layers import look_at_opened
from ..code.watch import is_users_code
from ..values.torch_functions import METADATA_FUNCTIONS, changes_first, function_name

__all__ = ["SplitReads", "is_split", "members_of", "refuse_split_read"]

_LAYERS = f"{KeepsLayouts.__module__.rpartition('.')[0]}."
_ENCODER = nn.TransformerEncoder.forward.__code__
_STATE_DICT = nn.Module.state_dict.__code__
_SAVES = (nn.Module._save_to_state_dict.__code__, KeepsLayouts._save_to_state_dict.__code__)
_MASKS = ("mask", "src_key_padding_mask")
_SIZES = frozenset(["size", "numel", "nelement", "__len__", "stride"])
_NUMBERS = frozenset(["shape", "nbytes", "data", "T", "mT", "H", "mH", "real", "imag"])
_HARMLESS = words(
    """
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad data_ptr is_shared zero_
    __hash__ __repr__ __str__ __format__
    """
)


def is_split(parameter: torch.Tensor) -> bool:
    """Whether a layer computes with this rank's part of it."""
    layout = layout_of(parameter)
    return layout is not None and any(layout.dims)


def refuse_split_read(
    name: str, func: Any, kwargs: Mapping[str, Any], where: str = "a step function"
) -> None:
    """
    Args:
        name: of a split parameter, which a torch function is called with now.
        where: the code that calls it runs, for the error.

    Raises:
        SMPError: what the function gives would be one part's.
    """
    called = getattr(func, "__name__", "")
    if called in ("__get__", "__set__", "__delete__"):
        what = getattr(func.__self__, "__name__", "")
        is_right = what not in _NUMBERS
    else:
        what = function_name(func)
        is_right = (
            called in _HARMLESS
            or (called in METADATA_FUNCTIONS and called not in _SIZES)
            or (changes_first(called, dict(kwargs)) and (called == "copy_" or is_elementwise(called)))
        )
    if is_right or _in_a_split_layer():
        return
    raise SMPError(
        f"{what} of the parameter {name!r} at {users_line()}, in {where}: the parameter is split "
        "over tensor-parallel ranks, and the part that this one has would pass for the whole. For a penalty "
        "on weights use the optimizer's weight_decay; take sizes from the model's configuration; or keep the "
        "layer whole"
    )


def _in_a_split_layer() -> bool:
    """Whether code of a layer is running that was written for parts: the library's own, or a user's class."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _STATE_DICT:  # whoever asks for it gets parts
            return False
        if frame.f_code in _SAVES:
            frame = frame.f_back
            continue
        if str(frame.f_globals.get("__name__", "")).startswith(_LAYERS):
            return True
        names = frame.f_code.co_varnames
        if names and names[0] == "self":
            module = frame.f_locals.get("self")
            if isinstance(module, KeepsLayouts):
                return True
            if isinstance(module, nn.Module) and is_users_code(frame.f_code, frame.f_globals):
                return False
        frame = frame.f_back
    return False


def members_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments of a torch function, and what lists among them hold."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, list | tuple):
            yield from arg
        else:
            yield arg


class SplitReads(TorchFunctionMode):
    """While modules of a model with split layers run forward.

    Under a mode torch does not take the kernels that it has for evaluation only (of
    ``nn.TransformerEncoderLayer``, of attention), which would be given parts. Nor does it take padding out of
    what an ``nn.TransformerEncoder`` gets, so that is refused by name.

    Args:
        name_of: of an object, if it is a split parameter of the model.
    """

    def __init__(self, name_of: Callable[[Any], str | None]) -> None:
        super().__init__()
        self._name_of = name_of

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if caller.f_code is _ENCODER:
            given = {key: caller.f_locals[key] for key in _MASKS}
            look_at_opened("the model", caller.f_locals["self"], (caller.f_locals["src"],), given)
        is_wrapped = torch._C._are_functorch_transforms_active()
        for arg in members_of(args, kwargs):
            if is_wrapped:
                arg = _below_transforms(arg)
            if isinstance(arg, nn.Parameter) and (name := self._name_of(arg)) is not None:
                refuse_split_read(name, func, kwargs, "a module's forward")
        return func(*args, **kwargs)


def _below_transforms(arg: Any) -> Any:
    """What ``torch.func`` has wrapped, once for each transformation."""
    while isinstance(arg, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(arg):
        arg = torch._C._functorch.get_unwrapped(arg)
    return arg
