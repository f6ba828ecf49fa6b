"""Scripts and notebooks as files: read, parsed, and never run.

A notebook is one script: its code cells one after the other. Lines of it are told as ``cell:line``, code
cells counted from 1. What IPython alone understands (``%pip install``, ``!ls``) is blanked.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ScriptError", "ScriptFile", "files_of", "read_script"]

_PYTHON_CELLS = ("time", "timeit", "capture", "prun", "local", "python", "python3")
"""Cell magics below which there is Python; a cell of another one (``%%bash``) is no Python."""

_SHELL_WORDS = ("pip", "conda")
"""IPython runs them without a sign of their own."""


class ScriptError(ValueError):
    """A file cannot be read or parsed; the text names it, and its line where there is one."""


@dataclass(frozen=True)
class ScriptFile:
    """A parsed script.

    Attributes:
        name: as the user wrote it.
        text: what it says.
        tree: that, parsed.
        places: of a notebook ``cell:line`` of each line of the tree, the first one's first.
    """

    name: str
    text: str
    tree: ast.Module
    places: Sequence[str] = ()

    def place(self, line: int) -> str:
        """How a line is told."""
        return self.places[line - 1] if self.places else str(line)


def files_of(path: Path) -> list[Path]:
    """The file itself; of a folder its scripts, and those of folders below that are not hidden.

    Raises:
        ScriptError: there is none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*.py")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise ScriptError(f"{path}: no .py file in this folder")
    return found


def read_script(path: Path) -> ScriptFile:
    """Reads and parses a ``.py`` file or a notebook.

    Raises:
        ScriptError: it cannot be read, is not text, or is not Python.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror or error}") from None
    text = _decoded(str(path), content)
    if path.suffix != ".ipynb":
        tree = _parsed(text, [f"{path}:{n + 1}" for n in range(text.count("\n") + 1)])
        return ScriptFile(str(path), text, tree)
    lines: list[str] = []
    places: list[str] = []
    for number, cell in enumerate(_code_cells(str(path), text), 1):
        cell = _without_magics(cell)
        own = [f"{number}:{n + 1}" for n in range(cell.count("\n") + 1)]
        _parsed(cell, [f"{path}:{place}" for place in own])  # names the cell that is wrong
        lines += cell.split("\n")
        places += own
    text = "\n".join(lines)
    return ScriptFile(str(path), text, _parsed(text, [f"{path}:{place}" for place in places]), places)


def _decoded(name: str, content: bytes) -> str:
    """The text with ``\\n`` for every end of a line, as Python counts them."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ScriptError(f"{name}:{line}: this is not {error.encoding} text ({error.reason})") from None
    except SyntaxError as error:
        raise ScriptError(f"{name}:1: {error.msg}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parsed(text: str, places: Sequence[str]) -> ast.Module:
    """Parses; ``places`` say what each line is called, should it be wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in the script's strings
            return ast.parse(text)
    except SyntaxError as error:
        place = places[min(max(error.lineno or 1, 1), len(places)) - 1]
        raise ScriptError(f"{place}: this is not Python 3: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ScriptError(f"{places[0]}: cannot be parsed ({error or type(error).__name__})") from None


# Notebooks --------------------------------------------------------------------------------------------------


def _code_cells(name: str, text: str) -> Iterator[str]:
    try:
        notebook: Any = json.loads(text)
        cells: Any = notebook["cells"] if "cells" in notebook else notebook["worksheets"][0]["cells"]
        sources = [
            cell["source"] if "source" in cell else cell["input"]
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    except json.JSONDecodeError as error:
        raise ScriptError(f"{name}:{error.lineno}: this is no notebook: {error.msg}") from None
    except (KeyError, IndexError, TypeError, RecursionError):
        raise ScriptError(f"{name}: this is no notebook: it has no list of cells") from None
    for source in sources:
        yield source if isinstance(source, str) else "".join(source)


def _without_magics(cell: str) -> str:
    """The cell with as many lines, of which those that are not Python say nothing."""
    if _is_python(cell):
        return cell
    lines = cell.split("\n")
    first = next((n for n, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        magic, _, rest = lines[first][2:].strip().partition(" ")
        if magic not in _PYTHON_CELLS and not (magic == "writefile" and rest.strip().endswith(".py")):
            return "\n" * (len(lines) - 1)
        lines[first] = ""
    return "\n".join(_blanked(lines))


def _is_python(text: str) -> bool:
    try:
        _parsed(text, [""])
    except ScriptError:
        return False
    return True


def _blanked(lines: Iterable[str]) -> Iterator[str]:
    goes_on = False
    for line in lines:
        words = line.split()
        was_magic = goes_on
        is_magic = was_magic or _is_magic(line.strip(), words[0] if words else "")
        goes_on = is_magic and line.rstrip().endswith("\\")
        if is_magic:
            yield "" if was_magic else f"{line[: len(line) - len(line.lstrip())]}pass"
        else:
            yield re.sub(r"^(\s*[\w., ]+=\s*)[%!].*$", r"\1None", line)


def _is_magic(line: str, first_word: str) -> bool:
    return line.startswith(("%", "!", "?")) or line.endswith("?") or first_word in _SHELL_WORDS
