"""Which of torch's functions a handler is asked about, where a script has put one of its own in its place.

Functions of torch that are written in Python (``F.mse_loss``) look themselves up by their global name to tell
handlers who they are. Where a script has put a function of its own there, which calls torch's in its turn,
handlers are told of the script's: to run that would do twice what it does around the call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function

from ...errors import SMPError
from ...source_files import folders_of

__all__ = ["meant"]

_Function = Callable[..., Any]

_TORCH = folders_of(torch.__file__)
_ASKS = handle_torch_function.__code__
_OF_C = frozenset(
    (
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.MethodWrapperType,
        types.ClassMethodDescriptorType,
    )
)
_by_code: dict[types.CodeType, _Function] = {
    function.__code__: function
    for function in (*vars(F).values(), *vars(torch.Tensor).values(), *vars(torch).values())
    if isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(_TORCH)
}
"""Torch's functions by their code, as far as nothing had taken their places by then."""


def meant(function: _Function) -> _Function:
    """The function of torch that has been called, of which a handler was told as ``function``.

    Raises:
        SMPError: it is not to be found.
    """
    if type(function) in _OF_C:
        return function
    code = getattr(function, "__code__", None)
    if code is not None and code.co_filename.startswith(_TORCH):
        return function
    frame = sys._getframe(1)
    while frame.f_code is not _ASKS:
        if frame.f_back is None:
            return function  # nobody has looked it up
        frame = frame.f_back
    caller = frame.f_back
    if caller is None or caller.f_code is code or not caller.f_code.co_filename.startswith(_TORCH):
        return function  # a script's own, which asks for itself
    found = _by_code.get(caller.f_code)
    if found is None:
        if caller.f_code.co_freevars:
            raise SMPError(
                f"{caller.f_code.co_name}() of torch has been replaced by a function of the script before "
                "smp_lite was imported: import smp_lite first"
            )
        found = types.FunctionType(caller.f_code, caller.f_globals)
        _by_code[caller.f_code] = found
    return found
