"""Makes the device's code count as torch's own, as kernels of a real one do: nobody watches it, or lists it
among what a model's Python runs."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

_TORCH = Path(torch.__file__).resolve().parent


def take_over(package: str) -> None:
    """For all functions and methods of the package's modules that are loaded."""
    for name, module in sys.modules.copy().items():
        if name.startswith(f"{package}.") and name != __name__ and "cases" not in name:
            for value in list(vars(module).values()):
                _take(value, name)


def _take(value: Any, module: str) -> None:
    if getattr(value, "__module__", None) != module:
        return
    if isinstance(value, types.FunctionType):
        value.__code__ = _moved(value.__code__)
        _take(getattr(value, "__wrapped__", None), module)
    elif isinstance(value, type):
        for member in vars(value).values():
            inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            _take(inner, module)


def _moved(code: types.CodeType) -> types.CodeType:
    consts = tuple([_moved(each) if isinstance(each, types.CodeType) else each for each in code.co_consts])
    # The same file, for whoever shows its lines.
    path = f"{_TORCH}{os.sep}{os.path.relpath(code.co_filename, _TORCH)}"
    return code.replace(co_consts=consts, co_filename=path)
