"""Which attributes of a module a run of it reads, so that a description can say what it did not depend on.

For the time of the run ``nn.Module`` gets a ``__getattribute__`` that notes each read, whoever makes it: the
module's own code, a property, a child, ``getattr``, C. Whatever looks at a module as a whole counts as
reading all of it: its ``__dict__``, copies and pickles, its hash (a table of modules). Where reads could go
unseen nothing counts as unread: classes with a ``__getattribute__`` of their own, code that names a way round
it or asks for identities, compiled code, hooks.

Only whole numbers and texts of the user's own classes are ever unread: a block's number or name. All other
attributes count as read.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from ..code.bytecode import with_nested
from ..code.watch import Names
from .checkpointed_calls import has_runs, is_marked

__all__ = ["AttributeReads", "Unread", "numbers_and_texts"]

Unread = frozenset[tuple[str, str]]
"""(Name of a part, its attribute)."""

_ALL = "__dict__"
_WHOLE = frozenset(
    (
        "__getstate__",
        "__reduce__",
        "__reduce_ex__",
        "__copy__",
        "__deepcopy__",
        "__getattribute__",
        "__hash__",
    )
)
"""Attributes through which one gets at all others."""

_WAYS_ROUND = frozenset(
    ("__dict__", "__getattribute__", "getattr_static", "get_referents", "get_objects", "ctypes", "id")
)
"""Names in code that may read attributes unseen, or tell a module from one that is alike."""

_LOOK_IN_TABLES = frozenset(
    function.__code__
    for function in (nn.Module.__getattr__, is_marked, has_runs)
    if isinstance(function, types.FunctionType)
)
"""Code that reads a ``__dict__`` for what is never unread."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DYNAMO = torch.__file__.rpartition("__init__")[0] + "_dynamo"


def numbers_and_texts(module: nn.Module) -> Unread:
    """All that may be unread: whole numbers and texts of parts whose classes are not torch's.

    Nothing where a read could go unseen, or where hooks run, which are not compared.
    """
    found = []
    for name, part in module.named_modules(remove_duplicate=False):
        kind, own = type(part), part.__dict__
        if kind.__getattribute__ is not object.__getattribute__ or any(map(own.get, _HOOKS)):
            return frozenset()
        if kind.__module__.partition(".")[0] != "torch":
            found += [(name, key) for key, value in own.items() if type(value) in (int, str)]
    return frozenset(found)


class AttributeReads:
    """The reads of one run.

    Args:
        module: the one that runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._candidates = numbers_and_texts(module)
        self._parts = dict(module.named_modules(remove_duplicate=False)) if self._candidates else {}
        self._read: dict[int, set[str]] = {}  # by part

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within, all reads are noted; nothing is done where nothing can be unread."""
        if not self._candidates:
            yield
            return
        read, plain_read, plain_hash = self._read, object.__getattribute__, object.__hash__

        def note(part: nn.Module, name: str) -> None:
            names = read.get(id(part))
            if names is None:
                names = read[id(part)] = set()
            names.add(name)

        def getattribute(part: nn.Module, name: str) -> Any:
            if name in _WHOLE or (name == _ALL and sys._getframe(1).f_code not in _LOOK_IN_TABLES):
                note(part, _ALL)
            elif name != _ALL:
                note(part, name)
            return plain_read(part, name)

        def get_hash(part: nn.Module) -> int:
            note(part, _ALL)
            return plain_hash(part)

        nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign]
        nn.Module.__hash__ = get_hash  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__, nn.Module.__hash__

    def unread(self, names: Names, entered: Collection[types.CodeType | None]) -> Unread:
        """What the run has not read.

        Args:
            names: what the user's code mentions that ran.
            entered: all code that ran, torch's too.
        """
        if not self._candidates or any(map(_goes_round, names.functions)) or any(map(_is_compiled, entered)):
            return frozenset()
        read = {name: self._read.get(id(part), set()) for name, part in self._parts.items()}
        if any(_ALL in keys for keys in read.values()):
            return frozenset()
        return frozenset((name, key) for name, key in self._candidates if key not in read[name])


def _goes_round(code: types.CodeType) -> bool:
    """Whether it may read attributes of modules unseen."""
    return any(
        not _WAYS_ROUND.isdisjoint(part.co_names)
        # A class's own way to read its attributes goes on to its base's; none of these classes is a module's.
        and (part.co_name != "__getattribute__" or "object" in part.co_names)
        for part in with_nested(code)
    )


def _is_compiled(code: types.CodeType | None) -> bool:
    """Whether it is the entrance to what torch.compile makes, whose guards look at attributes from C."""
    return (
        code is not None
        and code.co_filename.startswith(_DYNAMO)
        and code.co_qualname.startswith(("_TorchDynamoContext.__call__.", "OptimizedModule."))
    )
