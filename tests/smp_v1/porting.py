"""Runs ``smp-lite port`` on scripts that are written as text, and reads its table back."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from smp_lite.cli import main

SMP = "import smdistributed.modelparallel.torch as smp\n"


@dataclass
class Ported:
    """What one call printed.

    Attributes:
        rows: name -> lines, what becomes of it, what there is to know, of the last file that has it.
    """

    code: int
    out: str
    err: str
    rows: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    def becomes(self, name: str) -> str:
        return self.rows[name][1]

    def says(self, name: str) -> str:
        return self.rows[name][2]

    def lines(self, name: str) -> str:
        return self.rows[name][0]

    @property
    def of(self) -> dict[str, str]:
        """Name -> what becomes of it."""
        return {name: row[1] for name, row in self.rows.items()}


Port = Callable[..., Ported]


def porter(folder: Path, capsys: pytest.CaptureFixture[str]) -> Port:
    """What writes a script, or ``files`` by their names, into the working directory, and ports it.

    Of a notebook a file is the list of its code cells. ``arguments`` are flags; with ``files`` they may name
    what to port.
    """

    def run(text: str = "", *arguments: str, files: dict[str, str | list[str]] | None = None) -> Ported:
        written = {"train.py": text} if files is None else files
        for name, content in written.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            text = notebook(content) if isinstance(content, list) else textwrap.dedent(content)
            (folder / name).write_text(text)
        code = main(["port", *arguments, *(written if files is None or not arguments else ())])
        printed = capsys.readouterr()
        return Ported(code, printed.out, printed.err, rows_of(printed.out))

    return run


def notebook(cells: list[str]) -> str:
    """Code cells, each after a cell of text."""
    both = [
        {"cell_type": kind, "source": source.splitlines(keepends=True)}
        for cell in cells
        for kind, source in (("markdown", "# smp.rank()"), ("code", textwrap.dedent(cell)))
    ]
    return json.dumps({"cells": both, "nbformat": 4})


def rows_of(out: str) -> dict[str, tuple[str, str, str]]:
    """The rows of every table, by the widths of its rule."""
    rows: dict[str, tuple[str, str, str]] = {}
    spans: list[tuple[int, int]] = []
    for line in out.splitlines():
        if re.fullmatch(r"-+  -+  -+  -+", line):
            spans = [match.span() for match in re.finditer("-+", line)]
        elif not line:
            spans = []
        elif spans:
            name, *rest = (line[start:end].strip() for start, end in spans[:-1])
            rows[name] = (rest[0], rest[1], line[spans[-1][0] :])
    return rows


def line_of(text: str, part: str) -> str:
    """The number of the only line that holds ``part``."""
    found = [n for n, line in enumerate(text.split("\n"), 1) if part in line]
    assert len(found) == 1, (part, found)
    return str(found[0])
