"""The keys of a dictionary that a script makes in pieces.

``{...}``, ``dict(...)``, ``{**other, ...}`` and ``one | other``, by variable or not, and what later
statements add: ``d["key"] = value``, ``d.update(...)``, ``d.setdefault("key", value)``, ``d |= ...``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .scopes import Key, ScriptNames, shortened

__all__ = ["DictReader", "Entry", "Unread"]


@dataclass(frozen=True)
class Entry:
    """A key with its value.

    Attributes:
        condition: when the script sets it, None: always.
    """

    key: str
    value: ast.expr
    line: int
    condition: str | None

    def hides(self, earlier: Entry) -> bool:
        """Whether nothing is left of an earlier one."""
        return self.key == earlier.key and self.condition in (None, earlier.condition)


@dataclass(frozen=True)
class Unread:
    """An expression that brings keys which only the run knows."""

    text: str
    line: int


class DictReader:
    """Reads dictionaries of one script."""

    def __init__(self, names: ScriptNames) -> None:
        self._names = names
        self._changes: dict[Key, list[ast.AST]] = defaultdict(list)
        for node in ast.walk(names.tree):
            if (changed := _changed_by(node)) is not None and (key := names.key(changed)) is not None:
                self._changes[key].append(node)

    def entries(self, node: ast.expr) -> list[Entry | Unread]:
        """Every key that the dictionary may have; more than once where a condition, or the order, decides."""
        return list(dict.fromkeys(self._of(node, frozenset())))

    def _of(self, node: ast.expr, seen: frozenset[Key]) -> list[Entry | Unread]:
        if isinstance(node, ast.Dict):
            return _without_hidden(self._of_literal(node, seen))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return _without_hidden([*self._of(node.left, seen), *self._of(node.right, seen)])
        if isinstance(node, ast.IfExp):
            return [*self._of(node.body, seen), *self._of(node.orelse, seen)]
        if isinstance(node, ast.NamedExpr):
            return self._of(node.value, seen)
        if isinstance(node, ast.Call) and (parts := _same_keys(node)) is not None:
            entries = [entry for part in parts for entry in self._of(part, seen)]
            return _without_hidden([*entries, *self._keywords(node, seen)])
        variable = self._names.key(node)
        if variable is None or not self._names.bindings.get(variable):
            return [self._unread(node)]
        return [] if variable in seen else self._of_variable(variable, node, seen | {variable})

    def _of_literal(self, node: ast.Dict, seen: frozenset[Key]) -> Iterator[Entry | Unread]:
        for key, value in zip(node.keys, node.values):
            yield from self._of(value, seen) if key is None else self._item(key, value)

    def _of_variable(self, variable: Key, node: ast.expr, seen: frozenset[Key]) -> list[Entry | Unread]:
        changes = {id(change) for change in self._changes[variable]}
        bindings = [
            binding
            for binding in self._names.bindings[variable]
            if id(self._names.parent(binding.node)[0]) not in changes  # `d |= ...` is both
        ]
        entries: list[Entry | Unread] = []
        for binding in bindings:
            is_read = binding.value is not None and not binding.is_part
            entries += self._of(binding.value, seen) if is_read else [self._unread(node)]
        for change in sorted(self._changes[variable], key=lambda node: getattr(node, "lineno", 0)):
            entries += self._added_by(change, seen)
        # Of several dictionaries by one name (a notebook's), which one was changed is not known.
        return _without_hidden(entries) if len(bindings) == 1 else entries

    def _added_by(self, change: ast.AST, seen: frozenset[Key]) -> Iterator[Entry | Unread]:
        if isinstance(change, ast.Subscript):
            parent, _ = self._names.parent(change)
            value = parent.value if isinstance(parent, ast.Assign | ast.AnnAssign) else None
            yield from self._item(change.slice, value)
        elif isinstance(change, ast.AugAssign):
            yield from self._of(change.value, seen)
        elif isinstance(change, ast.Call) and len(change.args) == 2:
            yield from self._item(*change.args)  # setdefault
        elif isinstance(change, ast.Call):
            for part in change.args:
                yield from self._of(part, seen)
            yield from self._keywords(change, seen)

    def _item(self, key: ast.expr, value: ast.expr | None) -> Iterator[Entry | Unread]:
        name = self._names.constant(key)
        if isinstance(name, str) and value is not None:
            yield Entry(name, value, key.lineno, self._names.condition(key))
        else:
            yield self._unread(key)

    def _keywords(self, call: ast.Call, seen: frozenset[Key]) -> Iterator[Entry | Unread]:
        for keyword in call.keywords:
            if keyword.arg is None:
                yield from self._of(keyword.value, seen)
            else:
                condition = self._names.condition(keyword)
                yield Entry(keyword.arg, keyword.value, keyword.lineno, condition)

    def _unread(self, node: ast.expr) -> Unread:
        return Unread(shortened(node), node.lineno)


def _without_hidden(entries: Iterable[Entry | Unread]) -> list[Entry | Unread]:
    """Without those whose key is set again later, under the same condition or none."""
    kept: list[Entry | Unread] = []
    for entry in entries:
        if isinstance(entry, Entry):
            kept = [each for each in kept if not isinstance(each, Entry) or not entry.hides(each)]
        kept.append(entry)
    return kept


def _changed_by(node: ast.AST) -> ast.expr | None:
    """The dictionary that a node adds keys to."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return node.value
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr):
        return node.target
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_adding = node.func.attr == "update" or (node.func.attr == "setdefault" and len(node.args) == 2)
        return node.func.value if is_adding else None
    return None


def _same_keys(call: ast.Call) -> Sequence[ast.expr] | None:
    """Of ``dict(d)``, ``d.copy()`` and ``copy.deepcopy(d)``: the dictionaries in the result."""
    function = call.func
    if isinstance(function, ast.Name) and function.id == "dict":
        return call.args
    if isinstance(function, ast.Attribute) and function.attr == "copy" and not call.args:
        return [function.value]
    last = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return call.args if last in ("copy", "deepcopy") and len(call.args) == 1 else None
