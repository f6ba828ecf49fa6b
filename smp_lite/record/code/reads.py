"""Where the code of a module finds plain Python values, beside the attributes of modules.

Globals, attributes of classes and of objects that the module holds (configs), containers of plain values,
context variables, thread-locals, variables around functions. Attributes of modules themselves are not among
them: setting one is heard.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import ctypes
import functools
import gc
import operator
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from ..state.containers import MISSING, contents_of
from ..state.places import (
    PLAIN,
    Array,
    Attribute,
    Cell,
    Contents,
    Item,
    ModuleAttribute,
    Place,
    PlacesRead,
    Raw,
    Row,
    Variable,
    is_plain,
)
from .bytecode import constant_keys, reads_computed_names, with_nested
from .readers import Readers
from .stored import stored_in
from .torch_names import CODE, of_torch_module
from .watch import Names, called_by
from .worklist import Worklist

__all__ = ["places_mentioned", "places_of_class", "places_reached", "places_read"]

_MAX_ITEMS = 64
_MAX_BYTES = 1 << 14
_MAX_DEPTH = 3
_OF_C = (
    *(functools.partial, operator.attrgetter, operator.methodcaller),
    *(types.BuiltinMethodType, types.MethodWrapperType),
)
_TABLES = ("_parameters", "_buffers", "_modules")


def places_read(module: nn.Module, names: Names) -> PlacesRead:
    """Where code that mentions these names finds plain values, beside the attributes of modules.

    Args:
        module: whose calls run the code.
        names: from watching one run of this module, or of one that is built alike.
    """
    known = -1
    while known != (known := len(names.attributes)):  # attrgetter("rate"), say, which is found on the way
        found = _places_read(module, names)
    return found


def _places_read(module: nn.Module, names: Names) -> PlacesRead:
    finder = _Finder(names, {id(part) for part in module.modules()})
    for namespace, name in names.globals.values():
        finder.item(namespace, name, name, 0)
    for part in module.modules():
        label = type(part).__name__
        for kind in type(part).__mro__:
            if finder.is_users(kind):
                finder.klass(kind)
            elif kind not in nn.Module.__mro__:
                finder.calls(of_torch_module(kind))
        for key, value in part.__dict__.items():
            if key in names.attributes and not isinstance(value, PLAIN) and key not in _TABLES:
                finder.into(value, f"{label}.{key}", 1)
    return finder.found()


def places_of_class(cls: type) -> PlacesRead:
    """The same for the methods of a class that is no module (an autograd function), and what these reach."""
    methods = [getattr(function, "__func__", function) for function in vars(cls).values()]
    finder = _finder_of([method for method in methods if isinstance(method, types.FunctionType)])
    if finder.is_users(cls):
        finder.klass(cls)
    return finder.found()


def places_reached(functions: Iterable[Any]) -> PlacesRead:
    """The same for functions, methods and other callables, and for all of the user's that they reach by name.

    Those that they call through variables around them, methods of the objects that they have or are methods
    of, what these call. (Functions that a watched run has entered are known better, by :func:`places_read`.)
    Looked through anew each time: an object's attribute may name another function by then.
    """
    given = list(functions)
    finder = _finder_of(given)
    for function in given:
        if not isinstance(function, types.FunctionType):
            finder.into(function, getattr(function, "__name__", "a hook"), 0)
    return finder.found()


def places_mentioned(functions: Iterable[types.FunctionType]) -> PlacesRead:
    """The same for what functions mention themselves."""
    given = list(functions)
    names = Names()
    for function in given:
        names.mention(function.__code__, function.__globals__)
    return _finder_with(names, given).found()


def _finder_of(functions: Iterable[Any]) -> _Finder:
    given = list(functions)
    readers = Readers(None, (), trusts_scripts=True)
    for function in given:
        readers.add_function(function)
    plain = [getattr(function, "__func__", function) for function in given]
    names = readers.complete().names
    return _finder_with(names, [each for each in plain if isinstance(each, types.FunctionType)])


def _finder_with(names: Names, functions: Iterable[types.FunctionType]) -> _Finder:
    finder = _Finder(names)
    for namespace, name in list(names.globals.values()):
        finder.item(namespace, name, name, 0)
    for function in functions:
        finder.function(function)
    return finder


class _Finder:
    """Args:
    names: what the code mentions.
    heard: ids of modules whose attributes are known otherwise.
    """

    def __init__(self, names: Names, heard: Collection[int] = ()) -> None:
        self.names = names
        self._heard = heard
        self.bound: list[tuple[dict[str, Any], str]] = []
        self.places: list[Place] = []
        self.objects: list[tuple[Any, str]] = []
        self._codes = [part for code in names.functions for part in with_nested(code)]
        self._computed = any(map(reads_computed_names, self._codes))
        self.objects += [(namespace, "globals()") for namespace in names.whole.values()]
        if not names.attributes.isdisjoint(("environ", "getenv")):
            self.objects.append((os.environ, "os.environ"))
        self._values = Worklist(self._look_into)
        self._seen: dict[Any, Any] = {}
        self._functions: dict[int, Any] = {}
        if "modules" in names.attributes:  # sys.modules["name"]
            for key in constant_keys(self._codes, {"modules"}) or ():
                if key in sys.modules:
                    self.members(sys.modules[key], key, 0)

    def found(self) -> PlacesRead:
        return PlacesRead(self.places, self.objects, self.bound)

    @staticmethod
    def is_users(kind: type) -> bool:
        first = kind.__module__.partition(".")[0]
        return first != "torch" and first not in sys.stdlib_module_names

    def item(self, holder: dict[str, Any], key: str, name: str, depth: int) -> None:
        """A variable or an attribute, and what can be reached through it."""
        if (id(holder), key) in self._seen:
            return
        self._seen[id(holder), key] = holder
        value = holder[key]
        if key.startswith("__"):
            pass
        elif isinstance(value, (*PLAIN, *CODE)) or depth > 0:
            self.places.append(Item(holder, key, name))
        else:
            self.bound.append((holder, key))
        if not isinstance(value, PLAIN):
            self.into(value, name, depth)

    def into(self, value: Any, name: str, depth: int) -> None:
        """Takes what can be reached through a value."""
        self._values.add(value, name, depth)

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, nn.Parameter):
            return
        if isinstance(value, nn.Module):
            self.module(value)
            return
        if isinstance(value, torch.Tensor):
            self.objects.append((value, name))
            return
        if isinstance(value, type):
            if self.is_users(value):
                self.klass(value)
            return
        self._seen[id(value)] = value
        if isinstance(value, contextvars.ContextVar):
            self.places.append(Variable(value, name))
        elif isinstance(value, threading.local):
            self.places += [
                Attribute(value, key, f"{name}.{key}")
                for key in sorted(self.names.attributes)
                if not callable(getattr(type(value), key, None))  # its methods
            ]
        elif isinstance(value, list | dict | set):
            held = contents_of(value)
            items = list(held.items()) if isinstance(held, dict) else held
            keys = constant_keys(self._codes, {name.rpartition(".")[2]}) if type(value) is dict else None
            if len(items) <= _MAX_ITEMS and all(map(is_plain, items)):
                self.places.append(Contents(value, name))
            elif keys is not None:
                for key in keys & value.keys():
                    self.item(value, key, f"{name}[{key!r}]", depth + 1)
            else:
                self.objects.append((value, name))
                for item in items[:_MAX_ITEMS]:
                    for part in item if isinstance(item, tuple) else (item,):
                        if isinstance(part, nn.Module):
                            self.module(part)
        elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
            if value.nbytes <= _MAX_BYTES:
                self.places.append(Array(value, name))
            else:
                self.objects.append((value, name))
        elif isinstance(value, tuple | frozenset | deque):
            if not is_plain(value):
                self.objects.append((value, name))
        elif isinstance(value, bytearray | array.array):
            self.places.append(Row(value, name))
        elif isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
            self.places.append(Raw(value, name))
        elif isinstance(value, weakref.ref):
            self.into(value(), name, depth)
        elif isinstance(value, types.MappingProxyType):
            for behind in gc.get_referents(value):  # the dict that it shows
                self.into(behind, name, depth)
        elif isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, _OF_C):
            for part in called_by(value, self.names.attributes):
                self.into(part, name, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.objects.append((value, name))
        elif isinstance(value, types.MethodType):
            self.function(value.__func__)
            self.into(value.__self__, name, depth)
        elif isinstance(value, types.ModuleType):
            self.members(value, name, depth)
        elif type(value).__module__ == "collections":  # ChainMap, UserDict, UserList
            self.objects.append((value, name))
        elif (behind := stored_in(value)) is not None:
            self.found_in(behind, name, depth)
        elif self.is_users(type(value)) or isinstance(value, types.SimpleNamespace | argparse.Namespace):
            for kind in type(value).__mro__:
                if self.is_users(kind):
                    self.klass(kind)
            self.members(value, name, depth)

    def calls(self, places: Iterable[Place]) -> None:
        """Places of functions that the code calls."""
        for place in places:
            if place.identity not in self._seen:
                self._seen[place.identity] = place
                self.places.append(place)

    def found_in(self, behind: Iterable[tuple[Any, Any, str]], name: str, depth: int) -> None:
        """What an object of torch's or of Python's own stores, under names that the code does not mention."""
        for holder, key, text in behind:
            if holder is None:
                self.into(key, f"{name}{text}", depth + 1)
            else:
                self.item(holder, key, f"{name}{text}", depth + 1)

    def module(self, module: nn.Module) -> None:
        """Attributes of a module that the code reads although it is another's."""
        if id(module) in self._heard or id(module) in self._seen:
            return
        self._seen[id(module)] = module
        for key, value in list(module.__dict__.items()):
            if key in _TABLES or not (key in self.names.attributes or self._computed):
                continue
            self.places.append(ModuleAttribute(module, key))
            if not isinstance(value, PLAIN):
                self.into(value, f"{type(module).__name__}.{key}", 1)

    def members(self, value: Any, name: str, depth: int) -> None:
        is_module = isinstance(value, types.ModuleType)
        first = value.__name__.partition(".")[0] if is_module else ""
        if is_module and (first == "torch" or first in sys.stdlib_module_names):
            for key in sorted(self.names.attributes & vars(value).keys()):
                if isinstance(vars(value)[key], CODE):
                    self.item(vars(value), key, f"{name}.{key}", depth + 1)
                elif isinstance(vars(value)[key], types.ModuleType):
                    self.into(vars(value)[key], f"{name}.{key}", depth + 1)
            return
        namespace = getattr(value, "__dict__", None)
        if not is_module and (not isinstance(namespace, dict) or depth >= _MAX_DEPTH):
            self.objects.append((value, name))
        if not isinstance(namespace, dict) or depth >= _MAX_DEPTH:
            return
        # Private ones too: a property that the code names reads them.
        for key in [k for k in namespace if k in self.names.attributes or (self._computed and not is_module)]:
            self.item(namespace, key, f"{name}.{key}", depth + 1)

    def klass(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        for key, value in list(kind.__dict__.items()):
            is_computed = self._computed and isinstance(value, PLAIN)
            if key not in self.names.attributes and key != "forward" and not is_computed:
                continue
            self.places.append(Attribute(kind, key, f"{kind.__name__}.{key}"))
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if not isinstance(value, (property, *PLAIN)):
                self.into(value, f"{kind.__name__}.{key}", 1)

    def function(self, function: Any) -> None:
        """Variables around a function that has run."""
        if id(function) in self._functions:
            return
        self._functions[id(function)] = function
        for key in [key for key in getattr(function, "__dict__", ()) if key in self.names.attributes]:
            self.item(function.__dict__, key, f"{function.__name__}.{key}", 1)
        code = getattr(function, "__code__", None)
        if code not in self.names.functions:
            return
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.into(value, f"a default of {function.__name__}", 1)
        self.places.append(Attribute(function, "__defaults__", f"the defaults of {function.__name__}"))
        keywords = function.__kwdefaults__
        if keywords and all(map(is_plain, keywords.values())):
            self.places.append(Contents(keywords, f"the defaults of {function.__name__}"))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            place = Cell(cell, name)
            value = place.value()
            if isinstance(value, PLAIN):
                self.places.append(place)
            elif value is not MISSING:
                self.into(value, name, 1)
