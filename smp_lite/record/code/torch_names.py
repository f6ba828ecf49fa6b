"""What code calls of torch's and of Python's own, which a script may exchange for functions of its own.

``with mock.patch.object(F, "gelu", mine): model(x)`` is for that call of the model, and not for what runs
later. The names that code mentions say which functions these may be; of torch's own modules the names in
torch's code do.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..state.places import Attribute, Item, Place
from .bytecode import with_nested

__all__ = ["CODE", "of_torch_module"]

CODE = (types.FunctionType, types.BuiltinFunctionType, type)
"""Kinds of functions and classes."""


@functools.cache
def of_torch_module(kind: type) -> tuple[Place, ...]:
    """The forward of a class of torch's, and the functions that its code calls."""
    found: dict[str, None] = {}
    pending: list[Any] = [
        function for base in kind.__mro__ if base not in nn.Module.__mro__ for function in vars(base).values()
    ]
    while pending:
        for key in _called(pending.pop()):
            if key not in found:
                found[key] = None
                pending.append(vars(F)[key])
    forward = Attribute(kind, "forward", f"{kind.__name__}.forward")
    return forward, *[Item(vars(F), key, f"F.{key}") for key in found]


def _called(function: Any) -> Iterator[str]:
    if isinstance(function, types.FunctionType):
        for code in with_nested(function.__code__):
            for key in code.co_names:
                if callable(vars(F).get(key)) and key not in vars(torch.overrides):
                    yield key
