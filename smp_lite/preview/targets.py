"""The model that a command is given as ``package:function``, and the inputs that describe one batch."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..devices import CPU

__all__ = ["as_call", "build_model", "described_inputs", "own_traceback", "split_target"]


@contextlib.contextmanager
def own_traceback(name: str) -> Iterator[None]:
    """Within: a ValueError that the user's code raises, not the library, ends the process as it would without
    us, with its traceback; ours are a line for the user.

    Args:
        name: of what runs.

    Raises:
        ValueError: it ended the process as if all were well, before there was anything to show.
    """
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise
        raise ValueError(
            f"{name} ended by sys.exit() before a step that calls model.backward(): there is nothing to show"
        ) from None
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
            raise
        traceback.print_exception(error)
        sys.exit(1)


def split_target(target: str) -> tuple[str, str]:
    """The two names of ``package:function``.

    Raises:
        ValueError: it is written otherwise.
    """
    package, _, name = target.partition(":")
    if not package or not name:
        raise ValueError(f"{target!r} is neither a script nor package:function")
    return package, name


def build_model(target: str) -> tuple[nn.Module, Any]:
    """What ``package:function`` returns: a model, and inputs if it brings any.

    Raises:
        ValueError: it cannot be imported, or returns something else.
    """
    package, name = split_target(target)
    sys.path.insert(0, "")
    try:
        with own_traceback(package):
            module_of_function = importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{package!r} cannot be imported: {error}") from error
    function = getattr(module_of_function, name, None)
    if function is None:
        raise ValueError(f"{package!r} has no {name!r}")
    if reason := _why_not_called(function):
        raise ValueError(
            f"{target} cannot be called without arguments ({reason}): name a function that makes the model "
            "by itself, def build(): return Model(...)"
        )
    with own_traceback(target):
        built = function()
    module, inputs = built if isinstance(built, tuple) else (built, None)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{target} returned {type(module).__name__}: it must return an nn.Module")
    return module, inputs


def _why_not_called(function: Any) -> str:
    """What a call without arguments would lack; empty if nothing, or if nobody can tell before."""
    if not callable(function):
        return f"it is a {type(function).__name__}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not say
        return ""
    try:
        signature.bind()
    except TypeError as error:
        return str(error)
    return ""


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model's call: a tensor, a tuple of them, or a dict."""
    if inputs is None:
        return (), {}
    if isinstance(inputs, dict):
        return (), inputs
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def described_inputs(texts: list[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model's call, all zeros.

    Args:
        texts: ``[name=]dtype[sizes]``.

    Raises:
        ValueError: one is written otherwise.
    """
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for text in texts:
        match = re.fullmatch(r"(?:(\w+)=)?(\w+)\[(\s*\d+\s*(?:,\s*\d+\s*)*)\]", text)
        dtype = getattr(torch, match[2], None) if match else None
        if match is None or not isinstance(dtype, torch.dtype):
            raise ValueError(f"--input {text!r}: write for example 'int64[16,128]' or 'x=float32[8,3,32,32]'")
        try:
            tensor = torch.zeros([int(size) for size in match[3].split(",")], dtype=dtype, device=CPU)
        except (RuntimeError, TypeError) as error:  # too much, or no number for torch
            reason = str(error).partition("\n")[0]
            raise ValueError(f"--input {text!r}: torch cannot make it here ({reason})") from None
        if match[1] in kwargs:
            raise ValueError(f"--input {text!r}: {match[1]!r} has been given before")
        if match[1]:
            kwargs[match[1]] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs
