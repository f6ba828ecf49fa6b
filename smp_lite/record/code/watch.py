"""Which of the user's Python functions a run enters, and what these could read or change around them.

The code of a module reads more than its own attributes: globals, class attributes, configs, context
variables. Which of it a call depends on is found by watching one run: :class:`CodeWatch` notes every function
of the user's that is entered, and with it the names that its code mentions. What those names mean is copied
before the function first runs, so that its changes are noticed and undone (:mod:`..state.python_state`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...source_files import folders_of
from ..state.containers import MISSING, same_plain
from ..state.places import PLAIN
from ..state.python_state import NeedsOpening, PythonState
from .bytecode import with_nested

__all__ = ["CodeWatch", "Names", "called_by", "is_users_code", "mentioned_in"]

_NOT_THE_USERS = (*folders_of(torch.__file__), *folders_of(__file__, 2), "<frozen")


class Names:
    """What the code of a run mentions.

    Attributes:
        attributes: all names in it.
        globals: (global namespace, name) pairs that are there.
        functions: the code that was entered.
        whole: global namespaces of functions that call ``globals()``.
    """

    def __init__(self) -> None:
        self.attributes: set[str] = set()
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.functions: set[types.CodeType] = set()
        self.whole: dict[int, dict[str, Any]] = {}

    def mention(self, code: types.CodeType, namespace: dict[str, Any]) -> list[str]:
        """Adds what one function mentions; returns which globals that are there it does."""
        self.functions.add(code)
        if any("globals" in part.co_names for part in with_nested(code)):
            self.whole[id(namespace)] = namespace
        found = dict.fromkeys(
            name for part in with_nested(code) for name in self.mention_part(part, namespace)
        )
        self.globals.update({(id(namespace), name): (namespace, name) for name in found})
        return list(found)

    def mention_part(self, code: types.CodeType, namespace: dict[str, Any]) -> list[str]:
        """The same without what is written in the function."""
        self.attributes.update(code.co_names)
        # getattr(holder, "name"), and keys of namespaces
        self.attributes.update(constant for constant in code.co_consts if _is_name(constant))
        return [name for name in code.co_names if name in namespace]

    def add(self, other: Names) -> bool:
        """Takes over another run's; returns whether any of it is new."""
        if other.functions <= self.functions:
            return False
        self.attributes |= other.attributes
        self.globals.update(other.globals)
        self.functions |= other.functions
        self.whole.update(other.whole)
        return True


def mentioned_in(module: nn.Module) -> Names:
    """What the code of a module could mention, where it cannot be watched: all methods of its parts."""
    names = Names()
    for part in module.modules():
        for kind in type(part).__mro__:
            for function in vars(kind).values():
                if isinstance(function, types.FunctionType) and is_users_code(
                    function.__code__, function.__globals__
                ):
                    names.mention(function.__code__, function.__globals__)
    return names


def called_by(value: Any, attributes: set[str]) -> list[Any]:
    """What a callable that is written in C holds and calls or reads: ``config.get``,
    ``partial(getattr, config, "rate")``, ``attrgetter("rate")``.

    Args:
        attributes: takes the names of attributes that it reads.
    """
    if isinstance(value, functools.partial):
        held = [value.func, *value.args, *value.keywords.values()]
        attributes.update(each for each in held if _is_name(each))
        return held
    if isinstance(value, operator.attrgetter | operator.methodcaller):
        _, given, *_ = value.__reduce__()
        names = [each for each in (given if isinstance(given, tuple) else ()) if isinstance(each, str)]
        attributes.update(part for name in names for part in name.split("."))
        return []
    if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        holder = value.__self__
        return [] if holder is None or isinstance(holder, types.ModuleType | type) else [holder]
    return []


def _is_name(constant: object) -> bool:
    return isinstance(constant, str) and constant.isidentifier()


def is_users_code(code: types.CodeType, namespace: dict[str, Any]) -> bool:
    """Whether a function is neither torch's, nor this library's, nor Python's own."""
    if code.co_filename.startswith(_NOT_THE_USERS):
        return False
    name = str(namespace.get("__name__", ""))
    # What makes a named tuple is written by Python, in a namespace of its own.
    return name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("namedtuple_")


class CodeWatch:
    """Notes the user's functions that are entered while it is on, and copies what they could change.

    Args:
        state: takes copies of globals and of variables around functions before the code first runs.
        passed_over: functions whose own doings do not count.
        minds_opaque: raise :class:`NeedsOpening` before a function runs that may take from an iterator.
    """

    def __init__(
        self, state: PythonState, passed_over: Iterable[Any] = (), *, minds_opaque: bool = True
    ) -> None:
        self._minds_opaque = minds_opaque
        self._passed_over = {getattr(function, "__code__", None) for function in passed_over}
        self.state = state
        self.names = Names()
        self.entered: set[types.CodeType | None] = set()  # torch's and Python's own too
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        before = sys.getprofile()
        thread = threading.get_ident()
        # A collection of garbage comes when it comes: what it calls is none of the run's doings.
        collected = {getattr(callback, "__code__", None) for callback in gc.callbacks}
        seen = self.entered
        seen |= self._passed_over | collected

        def entered(frame: types.FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code not in seen and threading.get_ident() == thread:
                seen.add(frame.f_code)
                self._look(frame)

        entered.torchs_operators = {}  # type: ignore[attr-defined]  # see run_operator
        sys.setprofile(entered)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _look(self, frame: types.FrameType) -> None:
        code, namespace = frame.f_code, frame.f_globals
        if not is_users_code(code, namespace):
            return
        known = len(self.state.opaque)
        for name in self.names.mention(code, namespace):
            key = (id(namespace), name)
            if key not in self._globals:
                value = namespace[name]
                self._globals[key] = (namespace, name, value)
                if isinstance(value, types.ModuleType):
                    self._look_into(value, code)
                elif not isinstance(value, types.FunctionType):
                    self.state.add(value, name)
        for name in code.co_freevars:
            value = frame.f_locals.get(name, MISSING)
            if value is not MISSING and name != "__class__":
                self.state.add(value, name)
        if self._minds_opaque and len(self.state.opaque) > known:
            # Before the function has run, so that nothing has been taken out.
            raise NeedsOpening(f"may take from {self.state.opaque[-1]}")

    def _look_into(self, module: types.ModuleType, code: types.CodeType) -> None:
        """The code may set variables of another module of the user's."""
        first = module.__name__.partition(".")[0]
        if first == "torch" or first in sys.stdlib_module_names:
            return
        namespace = vars(module)
        for name in code.co_names:
            if name in namespace and not isinstance(
                namespace[name], types.FunctionType | types.ModuleType | type
            ):
                self._globals.setdefault((id(namespace), name), (namespace, name, namespace[name]))
                self.state.add(namespace[name], f"{module.__name__}.{name}")

    def changed(self) -> str | None:
        """A global variable that has been bound anew."""
        for namespace, name, old in self._globals.values():
            new = namespace.get(name, MISSING)
            if new is not old and not (isinstance(new, PLAIN) and same_plain(old, new)):
                return f"sets the global variable {name}"
        return None

    def restore(self) -> None:
        for namespace, name, old in self._globals.values():
            if namespace.get(name, MISSING) is not old:
                namespace[name] = old
