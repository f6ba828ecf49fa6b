"""What names mean in a script: which import or assignment they go back to, and under which condition they are
reached.

By Python's rules of scopes, without running anything; attributes (``self.model``) belong to the whole file.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["UNKNOWN", "Binding", "Key", "ScriptNames", "shortened", "spelt"]


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()
"""A value that only the run knows."""

Key = tuple[ast.AST, str]
"""A variable: the scope that it belongs to, and its name."""

_ROOTS = ("smdistributed", "smp_lite", "torch")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LONGEST = 70


@dataclass(frozen=True)
class Binding:
    """One of the places where a name gets its value.

    Attributes:
        node: the place.
        value: what is assigned, None where that is not an expression of its own.
        is_part: the name gets a part of ``value``: ``a, b = value``.
        imported: of an import its dotted name, ``smdistributed.modelparallel.torch``.
    """

    node: ast.AST
    value: ast.expr | None = None
    is_part: bool = False
    imported: str | None = None


class ScriptNames:
    """Looks up the names of one script.

    Args:
        tree: the script.
        starred: the names that ``from ... import *`` of one of our packages brings.
    """

    def __init__(self, tree: ast.Module, starred: Sequence[str] = ()) -> None:
        self.tree = tree
        self.bindings: dict[Key, list[Binding]] = defaultdict(list)
        self._parents: dict[ast.AST, tuple[ast.AST, str]] = {}
        self._starred = starred
        nodes = list(ast.walk(tree))
        for node in nodes:
            for field, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else (value,):
                    if isinstance(child, ast.AST):
                        self._parents[child] = (node, field)
        self._elsewhere = {
            (self.scope(node), name): isinstance(node, ast.Global)
            for node in nodes
            if isinstance(node, ast.Global | ast.Nonlocal)
            for name in node.names
        }
        for node in nodes:
            for name, binding in self._bound_by(node):
                self.bindings[self._home(self.scope(node), name)].append(binding)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and (text := spelt(node)):
                # Of the whole file: another method reads it.
                self.bindings[tree, text].append(self._assigned(node))

    def parent(self, node: ast.AST) -> tuple[ast.AST, str]:
        """The node around it, and the field of that."""
        return self._parents.get(node, (self.tree, ""))

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class, comprehension or module in which a node is looked up."""
        child, before = node, ""
        while child in self._parents:
            parent, field = self._parents[child]
            if isinstance(parent, (*_FUNCTIONS, ast.ClassDef)) and field == "body":
                return parent
            if isinstance(parent, ast.arguments) and isinstance(node, ast.arg):
                return self._parents[parent][0]
            is_first = isinstance(parent, _COMPREHENSIONS) and child is parent.generators[0]
            if isinstance(parent, _COMPREHENSIONS) and not (is_first and before == "iter"):
                return parent
            child, before = parent, field
        return self.tree

    def key(self, node: ast.expr) -> Key | None:
        """The variable that a name, or a chain of attributes, is."""
        if isinstance(node, ast.Attribute):
            text = spelt(node)
            return None if text is None else (self.tree, text)
        if not isinstance(node, ast.Name):
            return None
        start = scope = self.scope(node)
        while scope is not self.tree:
            is_seen = scope is start or not isinstance(scope, ast.ClassDef)
            if is_seen and (scope, node.id) in self.bindings:
                break
            scope = self.scope(scope)
        return scope, node.id

    def imported(self, node: ast.expr) -> str | None:
        """The dotted name of what a name, or an attribute of it, was imported as; None: it was not.

        Other names that are given to it count as well, as in ``s = smp``, and ``getattr`` with a name that is
        written there.
        """
        return self._imported(node, frozenset())

    def got(self, node: ast.AST) -> tuple[ast.expr, str] | None:
        """Of what ``getattr`` takes an attribute, and its name; None: it is no such call, or only the run
        knows the name."""
        is_getattr = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        )
        if not is_getattr or self.key(node.func) in self.bindings or len(node.args) not in (2, 3):
            return None
        name = self.constant(node.args[1])
        return (node.args[0], name) if isinstance(name, str) else None

    def _imported(self, node: ast.expr, seen: frozenset[Key]) -> str | None:
        """As :meth:`imported`; ``seen`` are the variables on the way here."""
        key = self.key(node)
        if key is not None and key in self.bindings and key not in seen:
            bindings = self.bindings[key]
            for binding in bindings:
                if binding.imported is not None:
                    return binding.imported
            found = {
                self._alias(binding, seen | {key}) for binding in bindings if not _is_none(binding.value)
            }
            # What a name also has from elsewhere may be meant by any use of it.
            if len(found) == 1 and (alias := found.pop()) is not None:
                return alias
        base, name = (
            (node.value, node.attr) if isinstance(node, ast.Attribute) else self.got(node) or (None, "")
        )
        above = self._imported(base, seen) if base is not None else None
        return f"{above}.{name}" if above is not None else None

    def _alias(self, binding: Binding, seen: frozenset[Key]) -> str | None:
        return None if binding.value is None or binding.is_part else self._imported(binding.value, seen)

    def constant(self, node: ast.expr) -> object:
        """The value that is written there, or that a name there always has; else UNKNOWN."""
        if (value := _literal(node)) is not UNKNOWN:
            return value
        key = self.key(node) if isinstance(node, ast.Name) else None
        bindings = self.bindings.get(key, ()) if key else ()
        if len(bindings) != 1 or bindings[0].value is None or bindings[0].is_part:
            return UNKNOWN
        value = _literal(bindings[0].value)
        # What is no plain value may have been changed since.
        return value if value is None or isinstance(value, bool | int | float | str) else UNKNOWN

    def condition(self, node: ast.AST) -> str | None:
        """When a node is reached at all, as far as ``if`` decides; None: whenever what is around it runs."""
        conditions: list[str] = []
        while node in self._parents:
            parent, field = self._parents[node]
            if isinstance(parent, ast.If | ast.IfExp) and field in ("body", "orelse"):
                if field == "orelse":
                    conditions.append(f"not ({ast.unparse(parent.test)})")
                elif not _is_always(parent.test):
                    conditions.append(ast.unparse(parent.test))
            elif isinstance(parent, ast.BoolOp) and node is not parent.values[0]:
                before = parent.values[: parent.values.index(node)]  # type: ignore[arg-type]
                text = ast.unparse(ast.BoolOp(parent.op, before) if before[1:] else before[0])
                conditions.append(text if isinstance(parent.op, ast.And) else f"not ({text})")
            elif isinstance(parent, ast.match_case) and field == "body":
                conditions.append(f"case {ast.unparse(parent.pattern)}")
            node = parent
        return shortened(" and ".join(reversed(conditions))) or None

    def is_caught(self, node: ast.AST) -> bool:
        """Whether an ``except`` around an import goes on where it fails."""
        while node in self._parents:
            parent, field = self._parents[node]
            if isinstance(parent, ast.Try) and field == "body":
                caught = [ast.unparse(each.type) if each.type else "Exception" for each in parent.handlers]
                if any(name in text for text in caught for name in ("Exception", "ImportError", "NotFound")):
                    return True
            node = parent
        return False

    def _home(self, scope: ast.AST, name: str) -> Key:
        """Where a name that is bound in a scope belongs."""
        while (is_global := self._elsewhere.get((scope, name))) is not None:
            scope = self.tree if is_global else self.scope(scope)
        return scope, name

    def _bound_by(self, node: ast.AST) -> Iterator[tuple[str, Binding]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                name = alias.name if alias.asname else root
                yield alias.asname or root, Binding(alias, imported=name if root in _ROOTS else None)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            is_ours = not node.level and module.partition(".")[0] in _ROOTS
            for alias in node.names:
                for name in self._starred if alias.name == "*" and is_ours else (alias.name,):
                    imported = f"{module}.{name}" if is_ours else None
                    yield alias.asname or name, Binding(alias, imported=imported)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, Binding(node)
        elif isinstance(node, ast.arg):
            yield node.arg, Binding(node)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, Binding(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, self._assigned(node)

    def _assigned(self, target: ast.expr) -> Binding:
        parent, field = self._parents[target]
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            return Binding(target, parent.value)
        if isinstance(parent, ast.Tuple | ast.List):
            outer, field = self._parents[parent]
            if isinstance(outer, ast.Assign) and field == "targets":
                value = outer.value
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parent.elts):
                    return Binding(target, value.elts[parent.elts.index(target)])
                return Binding(target, value, is_part=True)
        return Binding(target)


def shortened(what: ast.expr | str) -> str:
    """An expression as a part of a sentence."""
    text = " ".join((what if isinstance(what, str) else ast.unparse(what)).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def spelt(node: ast.expr) -> str | None:
    """``self.model`` of names and attributes; None of anything else."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *attributes]) if isinstance(node, ast.Name) else None


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def _is_always(test: ast.expr) -> bool:
    return bool(_literal(test) not in (UNKNOWN, None, False, 0)) or ast.unparse(test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )
