"""Which functions a hook consists of, and whether it could change a gradient.

It could by what it returns, and in place, whatever it returns: a hook that runs once a gradient has been
added (``register_post_accumulate_grad_hook``) can do nothing else. What it calls is looked through too, as
far as it is the user's (:mod:`..code.readers`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Sequence
from typing import Any

from ..code.bytecode import changes_tensors, returned_by
from ..code.readers import Readers, defaults_of

__all__ = ["functions_in", "may_change_gradients"]

_OURS = ("torch", __name__.partition(".")[0])


def functions_in(function: Any) -> list[types.FunctionType]:
    """The functions of a hook or a backward, whatever decorators stand around them."""
    found: list[types.FunctionType] = []
    pending, seen = [function], set()
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, functools.partial):
            pending.append(function.func)
            continue
        if not isinstance(function, types.FunctionType | types.MethodType | staticmethod | classmethod):
            kinds = type(function).__mro__
            function = next((vars(kind)["__call__"] for kind in kinds if "__call__" in vars(kind)), None)
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            found.append(function)
            if function.__globals__.get("__name__", "").partition(".")[0] in _OURS:
                pending += [cell.cell_contents for cell in function.__closure__ or () if _is_function(cell)]
    return found


def may_change_gradients(hooks: Iterable[Any]) -> bool:
    """Whether any of these hooks, which have the same code, could."""
    readers, own = Readers(None, ()), set()
    for hook in hooks:
        readers.add_function(hook)  # with the object whose method it is
        for function in functions_in(hook):
            if _may_return_more(function) or changes_tensors(
                function.__code__, frozenset(defaults_of(function))
            ):
                return True
            own.add(function.__code__)
            readers.add_function(function)
    return any(changes_tensors(code) for code in readers.complete().codes() if code not in own)


def _may_return_more(function: types.FunctionType, depth: int = 4) -> bool:
    """Whether a function could return something but None."""
    calls = returned_by(function.__code__)
    if calls is None or depth == 0:
        return True
    for names in calls:
        inner = _named(function, names)
        inner = getattr(inner, "__func__", inner)
        if not isinstance(inner, types.FunctionType) or _may_return_more(inner, depth - 1):
            return True
    return False


def _named(function: types.FunctionType, names: Sequence[str]) -> Any:
    """What a function calls by these names: a function, or a method of an object."""
    variables = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    if not names:
        return None
    if names[0] in variables:
        if not _is_filled(variables[names[0]]):
            return None
        value = variables[names[0]].cell_contents
    else:
        value = function.__globals__.get(names[0])
    for name in names[1:]:
        is_module = isinstance(value, types.ModuleType)
        value = getattr(value, name, None) if is_module else inspect.getattr_static(type(value), name, None)
    return value


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_function(cell: Any) -> bool:
    return _is_filled(cell) and isinstance(cell.cell_contents, types.FunctionType | types.MethodType)
