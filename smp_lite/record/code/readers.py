"""What code that runs while a step is recorded could read: the step function and the forwards of modules.

In one process such code sees what an earlier microbatch's backward has changed; here it has run by then. So
whether backward code (a hook, an autograd function's backward) changes something that such code mentions has
to be known. All code is looked through that can be reached by name from the step function and the modules:
functions, methods, properties and functions written in functions, as far as they belong to the packages of
the model and the script. What a watched run has entered anyway is known better (:mod:`.reads`).
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..state.containers import MISSING
from ..state.parts import is_users_class
from ..state.places import PLAIN, Attribute, Cell, Item, Place
from .bytecode import (
    constant_keys,
    names_used,
    reads_computed_names,
    uses_of_attribute,
    variables_around,
    with_nested,
)
from .copies import Copy
from .frames import Frame
from .watch import Names, called_by
from .worklist import Worklist

__all__ = ["Readers", "defaults_of"]

_OURS = __name__.partition(".")[0]
_PASSED_OVER = (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader)
_CONTAINERS = (list, dict, set, tuple, frozenset, deque, torch.Tensor, types.ModuleType)
_READ_ALL_ATTRIBUTES = ("asdict", "astuple", "__getstate__", "__reduce__")
_RUN_BY_TORCH = ("forward", "setup_context")
_TABLES = frozenset(nn.Module().__dict__)
_NOT_RECORDED = (
    *("__init__", "__post_init__", "__new__", "__repr__", "__str__", "__hash__"),
    *("__doc__", "__module__", "__qualname__", "backward", "vjp"),
)
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__replace__")
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")


class Readers:
    """Code, all that it mentions, and what lies there.

    Args:
        root: the model, whose forwards are looked through; None: only what is added.
        but: the code of hooks and backwards, which does not count.
        trusts_scripts: modules that are installed nowhere count as well, whatever package is the model's.
    """

    def __init__(
        self, root: nn.Module | None, but: Iterable[types.CodeType], *, trusts_scripts: bool = False
    ) -> None:
        self._but = frozenset(but)
        self._trusts_scripts = trusts_scripts
        self.names = Names()
        self._packages: set[str] = set()
        self._functions: dict[types.CodeType, type | None] = {}  # with the class whose method it is
        self._kinds: dict[type, None] = {}
        self._spaces: dict[int, tuple[dict[str, Any], str]] = {}  # of modules of the user's, by id
        self._roots: dict[int, tuple[Any, list[str]]] = {}  # objects and their names, by id
        self._objects: dict[int, tuple[Any, str]] = {}  # and their names, by id
        self._closures: dict[int, Any] = {}  # functions whose variables are known, by id
        self._places: dict[Any, Place] = {}
        self._values = Worklist(self._find)
        self._modules = list(root.modules()) if root is not None else []
        self._users: list[types.CodeType] = []
        self._held: dict[int, nn.Module] | None = None  # of users: modules whose attributes count, by id
        for module in self._modules:
            self._add_kind(type(module), trusted=True)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    self.add_function(hook)

    def add_function(self, function: Any) -> None:
        """The whole function counts."""
        self._trust(str(getattr(function, "__module__", "")))
        self._found(function, getattr(function, "__name__", "the step function"))

    def add_user(self, function: Any) -> None:
        """What the function does more with than to collect something there counts.

        That is what it holds (variables around it, defaults, the object whose method it is), globals, and the
        attributes of modules among these; but not the parameters, whose stages know of them.
        """
        self._held = {} if self._held is None else self._held
        self._trust(str(getattr(function, "__module__", "")))
        while isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                self._found(value, "what a hook is given")
            function = function.func
        if isinstance(function, types.MethodType):
            self._found(function.__self__, type(function.__self__).__name__)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            self._found(function, "a hook")  # and its methods
            return
        code, defaults = function.__code__, defaults_of(function)
        self._users.append(code)
        names = names_used(code, frozenset(defaults)).union(*map(names_used, with_nested(code)[1:]))
        self.names.attributes |= names
        for name in names & function.__globals__.keys():
            self._global(function.__globals__, name)
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if free in names:
                self._places.setdefault(id(cell), Cell(cell, free))
                self._found(_contents(cell), free)
        for name in names & defaults.keys():
            self._found(defaults[name], name)

    def codes(self) -> list[types.CodeType]:
        """The code that has been found, but for forwards that nobody mentions."""
        return [
            part
            for code in self._functions
            if code.co_name not in _RUN_BY_TORCH or code.co_name in self.names.attributes
            for part in with_nested(code, but=self._but)
        ]

    def add(self, frame: Frame) -> None:
        """The whole function counts; what variables around it hold is not known."""
        self._trust(str(frame.namespace.get("__name__", "")))
        self._mention(frame.code, frame.namespace, None)

    def add_later(self, frame: Frame, function: Any) -> None:
        """What a function does after ``model.backward()`` counts; ``function`` may be it."""
        self._trust(str(frame.namespace.get("__name__", "")))
        if getattr(function, "__code__", None) is frame.code:
            for name, cell in zip(frame.code.co_freevars, function.__closure__ or (), strict=False):
                if name in frame.later:
                    self._places.setdefault(id(cell), Cell(cell, name))
        self.names.attributes |= frame.later
        self._functions[frame.code] = None
        for name in frame.later:
            if name in frame.later_variables:
                self._found(frame.later_variables[name], name)
            elif name in frame.namespace:
                self._global(frame.namespace, name)

    def complete(self) -> Readers:
        """Follows the names until nothing new is found."""
        known = -1
        while known != (known := self._num_known()):
            for kind in list(self._kinds):
                self._methods(kind)
            for namespace, name in list(self._spaces.values()):
                for key in [key for key in namespace if key in self.names.attributes]:
                    self._global(namespace, key, f"{name}.{key}")
            for module in self._modules:
                for key, value in module.__dict__.items():
                    if key in self.names.attributes and not isinstance(value, (*PLAIN, *_PASSED_OVER)):
                        self._found(value, f"{type(module).__name__}.{key}")
            for module in list((self._held or {}).values()):
                self._attributes_of_module(module)
            for value, name in list(self._objects.values()):
                self._attributes(value, name)
        self._narrow()
        return self

    def _num_known(self) -> int:
        found = (self.names.attributes, self._functions, self._roots, self._held or ())
        return sum(map(len, found))

    def _narrow(self) -> None:
        """Of a dict that is only subscripted with constants, only these entries count."""
        functions = (*self._functions, *self._users)
        codes = [part for code in functions for part in with_nested(code, but=self._but)]
        for value, names in list(self._roots.values()):
            if type(value) is not dict:
                continue
            keys = constant_keys(codes, {name.rpartition(".")[2] for name in names})
            if keys is None:
                continue
            del self._roots[id(value)]
            for key in keys:
                place = Item(value, key, f"{names[0]}[{key!r}]")
                self._places.setdefault(place.identity, place)
                if key in value and not isinstance(value[key], PLAIN):
                    self._root(value[key], place.name)

    def copy(self) -> Copy:
        """What lies there now."""
        roots = [(value, names[0]) for value, names in self._roots.values()]
        passed_over = _PASSED_OVER if self._held is None else (*_PASSED_OVER, nn.Parameter)
        return Copy(roots, list(self._places.values()), passed_over)

    def reads(self, module: nn.Module, name: str) -> bool:
        """Whether any of the code reads an attribute of the module that none of it sets."""
        if name not in self.names.attributes:
            return self._reads_all
        loads = stores = False
        for code, kind in self._functions.items():
            for part in with_nested(code, but=self._but):
                for opname, on_self in uses_of_attribute(part, name):
                    if kind is None or not on_self or isinstance(module, kind):
                        loads |= opname in _LOADS
                        stores |= opname == "STORE_ATTR"
        return loads and not stores

    # Finding ------------------------------------------------------------------------------------------------

    def _trust(self, module_name: str) -> None:
        first = module_name.partition(".")[0]
        if first not in ("torch", _OURS) and first not in sys.stdlib_module_names - {"__main__"}:
            self._packages.add(first)

    def _is_users(self, module_name: Any) -> bool:
        name = str(module_name)
        return name.partition(".")[0] in self._packages or (self._trusts_scripts and _is_a_script(name))

    def _mention(self, code: types.CodeType, namespace: dict[str, Any], kind: type | None) -> None:
        if code in self._functions or code in self._but:
            return
        self._functions[code] = kind
        self.names.functions.add(code)
        for part in with_nested(code, but=self._but):
            for name in self.names.mention_part(part, namespace):
                self._global(namespace, name)

    def _global(self, namespace: dict[str, Any], name: str, label: str = "") -> None:
        value = namespace[name]
        self.names.globals[id(namespace), name] = namespace, name
        if not isinstance(value, types.FunctionType | types.ModuleType | type):
            place = Item(namespace, name, label or name)
            self._places.setdefault(place.identity, place)
        self._found(value, label or name)

    def _found(self, value: Any, name: str, kind: type | None = None) -> None:
        """Takes what code can reach."""
        self._values.add(value, name, kind)

    def _find(self, value: Any, name: str, kind: type | None) -> None:
        if isinstance(value, types.MethodType):
            self._found(value.__self__, name)
            value = value.__func__
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        for part in called_by(value, self.names.attributes):
            self._found(part, name)
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, types.FunctionType):
            if value.__code__ in self._but:
                return
            if self._is_users(value.__globals__.get("__name__")):
                self._mention(value.__code__, value.__globals__, kind)
            if id(value) not in self._closures:
                self._closures[id(value)] = value
                self._closure(value, name, kind)
        elif isinstance(value, types.ModuleType):
            if self._is_users(value.__name__):
                self._spaces.setdefault(id(value), (vars(value), name))
        elif isinstance(value, type):
            self._add_kind(value)
        elif isinstance(value, nn.Module):
            self._add_kind(type(value))
            if self._held is not None:
                self._held.update({id(module): module for module in value.modules()})
        elif self._held is not None and isinstance(value, nn.Parameter):
            pass
        elif not isinstance(value, (*PLAIN, *_PASSED_OVER)):
            self._add_kind(type(value))
            if self._is_plain_object(value):
                self._objects.setdefault(id(value), (value, name))
            else:
                self._root(value, name)

    def _attributes_of_module(self, module: nn.Module) -> None:
        label = type(module).__name__
        for table in (module.__dict__, module.__dict__["_buffers"]):
            for key, value in list(table.items()):
                if key in self.names.attributes and key not in _TABLES:
                    place = Item(table, key, f"{label}.{key}")
                    self._places.setdefault(place.identity, place)
                    if not isinstance(value, (*PLAIN, *_PASSED_OVER)):
                        self._found(value, place.name)

    @property
    def _reads_all(self) -> bool:
        """Whether attributes may be read whose names are not written anywhere."""
        return not self.names.attributes.isdisjoint(_READ_ALL_ATTRIBUTES) or any(
            reads_computed_names(part)
            for code in self._functions
            for part in with_nested(code, but=self._but)
        )

    def _is_plain_object(self, value: Any) -> bool:
        """Whether all that it holds are attributes, which code names to read them."""
        kind = type(value)
        return (
            (is_users_class(kind) or issubclass(kind, types.SimpleNamespace | argparse.Namespace))
            and type(getattr(value, "__dict__", None)) is dict
            and not isinstance(value, _CONTAINERS)
            and not any(vars(base).get("__slots__") for base in kind.__mro__)
        )

    def _attributes(self, value: Any, name: str) -> None:
        everything = self._reads_all
        for key, held in list(value.__dict__.items()):
            if everything or key in self.names.attributes:
                if not isinstance(held, types.FunctionType):
                    place = Item(value.__dict__, key, f"{name}.{key}")
                    self._places.setdefault(place.identity, place)
                self._found(held, f"{name}.{key}")

    def _closure(self, function: types.FunctionType, name: str, kind: type | None) -> None:
        """What a function holds: variables around it, among them what a decorator has wrapped; defaults."""
        mentioned = variables_around(function.__code__, but=self._but)
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if free in mentioned:
                self._places.setdefault(id(cell), Cell(cell, free))
                self._found(_contents(cell), free, kind)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._found(value, f"a default of {name}")
        if function.__dict__:
            self._root(function.__dict__, f"an attribute of {name}")

    def _root(self, value: Any, name: str) -> None:
        if self._held is not None and isinstance(value, list | tuple | dict):
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, nn.Module):
                    self._found(item, name)
        names = self._roots.setdefault(id(value), (value, []))[1]
        if name not in names:
            names.append(name)

    def _add_kind(self, kind: type, *, trusted: bool = False) -> None:
        for base in kind.__mro__:
            if trusted:
                self._trust(base.__module__)
            if self._is_users(base.__module__):
                self._kinds.setdefault(base)

    def _methods(self, kind: type) -> None:
        generated = _COMPARISONS if "__dataclass_fields__" in vars(kind) else ()
        for key, value in list(vars(kind).items()):
            # By name, or by an operator.
            runs = key in self.names.attributes or key in _RUN_BY_TORCH or key.startswith("__")
            if not runs or key in _NOT_RECORDED or key in generated:
                continue
            if isinstance(value, PLAIN):
                place = Attribute(kind, key, f"{kind.__name__}.{key}")
                self._places.setdefault(place.identity, place)
            elif isinstance(value, types.FunctionType) or not key.startswith("__"):
                self._found(value, f"{kind.__name__}.{key}", kind)


@functools.cache
def _is_a_script(module_name: str) -> bool:
    """Whether a module lies beside the script, and not among what is installed."""
    first = module_name.partition(".")[0]
    if first in ("torch", _OURS) or first in sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is not None and not _INSTALLED.intersection(Path(file).parts)


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The arguments of a function that have defaults, and these."""
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    return dict(zip(names, given, strict=True)) | (function.__kwdefaults__ or {})


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
