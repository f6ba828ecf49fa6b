"""``smp-lite port``: what becomes of a script of SMP v1 here, before it is run.

It reads; it runs nothing and imports no torch.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...plan.text_table import text_table
from .files import ScriptError, ScriptFile, files_of, read_script
from .judging import ORDER, Finding, judged_names, merged
from .judging_parameters import judged_parameters
from .reader import read

__all__ = ["add_port_arguments", "run_port"]

_REFUSED = 1
_UNREADABLE = 2

_WORDS = ("smdistributed", "modelparallel", "smp_lite", "sagemaker", "cuda")
"""A script without any of them has nothing to be found; most files of a folder have none."""

_LINES_SHOWN = 4
_HEADER = ("name", "lines", "becomes", "what to know")
_LEAST_WIDTH = 60
_SHARE_OF_NAMES = 0.4
"""Of the width that they and what there is to know share on a terminal."""


@dataclass(frozen=True)
class Report:
    """What is said about one file.

    Attributes:
        findings: the worst first.
        notes: lines below the table.
    """

    file: ScriptFile
    findings: Sequence[Finding]
    notes: Sequence[str]
    imports_smp: bool


def add_port_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists every name and parameter of SMP in scripts, and what becomes of it: it runs; it is a hint, "
        "taken without effect; it is refused; or it depends on a value that only the run knows. Nothing is "
        "run. Exits with 1 if something would be refused, with 2 if a file cannot be read."
    )
    parser.add_argument("--refused", action="store_true", help="show only what is refused, or may be")
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a script, a notebook, or a folder: the scripts in it"
    )


def run_port(args: argparse.Namespace) -> int:
    """Prints a report of each file, and returns the exit code."""
    width = max(shutil.get_terminal_size().columns, _LEAST_WIDTH) if sys.stdout.isatty() else None
    reports: list[Report] = []
    is_unreadable = False
    for path in _each_file(args.files):
        try:
            if isinstance(path, ScriptError):
                raise path
            report = report_on(read_script(path))
        except ScriptError as error:
            print(f"smp-lite port: {error}", file=sys.stderr)
            is_unreadable = True
            continue
        reports.append(report)
        print("\n".join(_text_of(report, width, is_short=args.refused)))
    if len(reports) > 1:
        every = [finding for report in reports for finding in report.findings]
        print(f"all {len(reports)} files: {_summary(every)}")
    if is_unreadable:
        return _UNREADABLE
    refused = any(finding.verdict.becomes == "refused" for report in reports for finding in report.findings)
    return _REFUSED if refused else 0


def report_on(file: ScriptFile) -> Report:
    """Reads what a parsed file says, and judges it."""
    if not any(word in file.text for word in _WORDS):
        return Report(file, [], [], imports_smp=False)
    try:
        script = read(file.tree)
        findings = [*judged_names(script)]
        for given in script.parameters:
            findings += judged_parameters(given, script.names)
    except RecursionError:
        raise ScriptError(f"{file.name}: its expressions are nested too deeply to be read") from None
    notes = []
    if script.alias_lines:
        notes.append(
            f"imports smdistributed ({_places(file, script.alias_lines)}): smp-lite run finds smp_lite under "
            "that name; other launchers start python -m smp_lite.smp_v1 script.py"
        )
    if script.cuda_lines:
        notes.append(
            "speaks of CUDA: on a machine without GPU run it with --cuda-as-cpu "
            f"({_places(file, script.cuda_lines)})"
        )
    return Report(file, merged(findings, file.place), notes, script.imports_smp)


def _each_file(given: Sequence[str]) -> Iterator[Path | ScriptError]:
    """Every file once, in the order in which they were written."""
    seen: set[Path] = set()
    for text in given:
        try:
            files = files_of(Path(text))
        except ScriptError as error:
            yield error
            continue
        yield from (file for file in files if file not in seen)
        seen.update(files)


# Text -------------------------------------------------------------------------------------------------------


def _text_of(report: Report, width: int | None, *, is_short: bool) -> Iterator[str]:
    shown = [each for each in report.findings if each.verdict.becomes in ORDER[: 2 if is_short else 4]]
    if shown:
        yield from (f"{report.file.name}:", _table(report.file, shown, width), "")
    if not report.findings:
        nothing = "imports SMP, and uses no name of it" if report.imports_smp else "nothing of SMP in it"
        yield f"{report.file.name}: {nothing}"
    else:
        yield f"{report.file.name}: {_summary(report.findings)}"
    for note in report.notes:
        yield from _wrapped(f"- {note}", width, indent="  ")
    if shown or report.notes:
        yield ""


def _table(file: ScriptFile, findings: Sequence[Finding], width: int | None) -> str:
    cells = [
        (each.name, _places(file, each.lines, word=False), each.verdict.becomes, each.verdict.says)
        for each in findings
    ]
    rows: list[tuple[str, ...]] = []
    name_width, says_width = _widths(cells, width)
    for name, lines, becomes, says in cells:
        names, texts = _wrapped_name(name, name_width), _wrapped(says, says_width)
        for n in range(max(len(names), len(texts))):
            middle = (lines, becomes) if n == 0 else ("", "")
            rows.append(("".join(names[n : n + 1]), *middle, "".join(texts[n : n + 1])))
    return text_table(_HEADER, rows, left=_HEADER)


def _widths(cells: Sequence[tuple[str, ...]], width: int | None) -> tuple[int | None, int | None]:
    """Of names and of what there is to know about them; None: as wide as they are."""
    if width is None:
        return None, None
    names, lines, becomes, _ = (max(map(len, column)) for column in zip(_HEADER, *cells, strict=True))
    both = width - lines - becomes - 3 * 2
    names = min(names, max(int(both * _SHARE_OF_NAMES), 1))
    return names, max(both - names, 1)


def _wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent) or [""] if width is not None else [text]


def _wrapped_name(name: str, width: int | None) -> list[str]:
    """Between its parts: no name has a blank."""
    if width is None:
        return [name]
    lines = [""]
    for part in re.findall(r"[^._]*[._]|[^._]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return [piece for line in lines for piece in textwrap.wrap(line, width)]


def _places(file: ScriptFile, lines: Sequence[int], *, word: bool = True) -> str:
    places = [*dict.fromkeys(file.place(line) for line in lines)]
    text = ", ".join(places[:_LINES_SHOWN]) + ", ..." * (len(places) > _LINES_SHOWN)
    return f"line{'s' * (len(places) > 1)} {text}" if word else text


def _summary(findings: Sequence[Finding]) -> str:
    kinds = Counter(each.kind for each in findings)
    becomes = Counter(each.verdict.becomes for each in findings)
    parts = [_counted(becomes["runs"], "runs", "run")]
    if becomes["hint"]:
        parts.append(_counted(becomes["hint"], "hint", "hints"))
    if becomes["depends"]:
        parts.append(_counted(becomes["depends"], "depends on a value", "depend on values"))
    parts.append(f"{becomes['refused']} refused")
    names, parameters = (
        _counted(kinds[kind], kind, f"{kind}s")
        for kind in ("name", "parameter")  # type: ignore[index]
    )
    return f"{names} and {parameters}: {', '.join(parts)}"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
