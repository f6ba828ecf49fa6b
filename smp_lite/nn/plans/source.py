"""The source code of module classes, as far as plans must know it."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Reads", "function_of", "reads_of", "scope_of", "words"]


@dataclass(frozen=True)
class Reads:
    """Names that the methods of a class read, ``__init__`` aside.

    Attributes:
        attributes: of ``self``.
        of_config: of ``self.config``.
    """

    attributes: frozenset[str]
    of_config: frozenset[str]


@functools.cache
def reads_of(kind: type[nn.Module]) -> Reads:
    """What a class's own methods and those it inherits read, up to torch's Module."""
    attributes: set[str] = set()
    of_config: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for name, method in vars(base).items():
            if name == "__init__" or not inspect.isfunction(method):
                continue
            tree = function_of(method)
            if tree is None:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    if isinstance(node.value, ast.Name) and node.value.id == "self":
                        attributes.add(node.attr)
                    elif ast.unparse(node.value) == "self.config":
                        of_config.add(node.attr)
    return Reads(frozenset(attributes), frozenset(of_config))


def words(text: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(text.split())


def function_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Its syntax tree; None where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    found = tree.body[0] if tree.body else None
    return found if isinstance(found, ast.FunctionDef) else None


def scope_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What the names that a function does not bind itself stand for: globals, and variables around it."""
    plain = inspect.unwrap(function)
    scope = dict(getattr(plain, "__globals__", {}))
    cells = getattr(plain, "__closure__", None) or ()
    for name, cell in zip(getattr(getattr(plain, "__code__", None), "co_freevars", ()), cells, strict=False):
        with contextlib.suppress(ValueError):  # it has no value yet
            scope[name] = cell.cell_contents
    return scope
