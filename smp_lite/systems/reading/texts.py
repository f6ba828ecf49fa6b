"""Texts to values: JSON, YAML, and the literals of a command line.

A key that stands twice in a file is refused: both formats let the last one win without a word, and a rule
would be lost.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ...config.errors import ConfigError
from ...config.keys import unique_keys

__all__ = ["read_json", "read_literal", "read_text", "read_yaml"]

_STRING_OR_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(\s*[}\]])')
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_LONGEST_LIST = 1_000_000


def read_text(path: Path) -> str:
    """Returns what a file holds.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error}): save it as such") from None


def read_json(text: str, name: str) -> tuple[Any, tuple[str, ...]]:
    """Returns the value and warnings. Commas before a closing bracket are passed over, with a warning.

    Args:
        text: of the file.
        name: of the file, for errors.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys), ()
    except json.JSONDecodeError as error:
        clean = _STRING_OR_TRAILING_COMMA.sub(lambda m: m[1] or m[2], text)
        if clean == text:
            raise ConfigError(f"{name} is not valid JSON: {error}") from None
    try:
        value = json.loads(clean, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    return value, (
        f"{name} has a comma before a closing bracket, which JSON does not allow; it was left out",
    )


def read_yaml(text: str, name: str) -> Any:
    """Returns the value of a YAML text; ``name`` is for errors."""
    try:
        return yaml.load(text, Loader=_UniqueLoader)
    except yaml.YAMLError as error:
        hint = ""
        if "alias" in str(error):
            hint = '; a name that begins with * must be quoted, as in "*.weight": [fsdp, null]'
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}{hint}") from None


def read_literal(text: str, name: str) -> Any:
    """Returns the value of a command line's text: a Python literal (``[0]*6 + [1]*7`` and
    ``dict(size=4, mode="2d")`` too), else YAML, so that ``null``, ``true`` and ``[fsdp, null]`` are read."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except ConfigError:
        raise
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
        return read_yaml(text, f"the value of {name}")


def _evaluate(node: ast.expr) -> Any:
    """Raises ValueError for what is no literal."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = zip(node.keys, node.values)
        return unique_keys([(_evaluate(key), _evaluate(value)) for key, value in pairs if key is not None])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("not a literal")
        return {str(keyword.arg): _evaluate(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Mult):
            lengths = [len(side) if isinstance(side, list) else abs(side) for side in (left, right)]
            if list in (type(left), type(right)) and lengths[0] * lengths[1] > _LONGEST_LIST:
                raise ConfigError(f"a list of {lengths[0] * lengths[1]} entries is too long")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("not a literal")


class _UniqueLoader(yaml.SafeLoader):
    """YAML's safe loader, but for keys that stand twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        return unique_keys(
            [
                (self.construct_object(key, deep=True), self.construct_object(value, deep=True))
                for key, value in node.value
            ]
        )
