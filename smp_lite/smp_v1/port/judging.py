"""What becomes of each name and parameter of a script: it runs, is a hint, is refused, or the run decides."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ... import __all__ as _PUBLIC
from ..names import NAMES, Name, find
from .reader import Script, Use, below_smp
from .scopes import UNKNOWN, ScriptNames, shortened

__all__ = ["ORDER", "Finding", "Verdict", "judged_names", "merged"]

Becomes = Literal["refused", "depends", "hint", "runs"]

ORDER: tuple[Becomes, ...] = ("refused", "depends", "hint", "runs")
"""The worst first."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of one use, and what there is to know about it."""

    becomes: Becomes
    says: str = ""

    def under(self, condition: str | None) -> Verdict:
        """What it is where only the run knows whether the use is reached."""
        if condition is None or self.becomes != "refused":
            return self
        return Verdict("depends", f"refused if {condition}: {self.says}")


@dataclass(frozen=True)
class Finding:
    """A name or a parameter of a script.

    Attributes:
        lines: where it stands.
    """

    kind: Literal["name", "parameter"]
    name: str
    lines: tuple[int, ...]
    verdict: Verdict


def merged(findings: Iterable[Finding], place: Callable[[int], str] = str) -> list[Finding]:
    """One finding of each name: the worst of its uses decides.

    Args:
        findings: one of each use.
        place: what a line is called.
    """
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.kind, finding.name].append(finding)
    rows = []
    for uses in groups.values():
        becomes = min((use.verdict.becomes for use in uses), key=ORDER.index)
        lines_of: dict[str, set[int]] = defaultdict(set)
        for use in uses:
            if use.verdict.becomes == becomes:
                lines_of[use.verdict.says].update(use.lines)
        lines = sorted({line for use in uses for line in use.lines})
        is_one = len(lines_of) == 1 and set(*lines_of.values()) == set(lines)
        is_plain = is_one or becomes in ("hint", "runs")
        said = [
            text if is_plain else f"{_listed(where, place)}: {text}"
            for text, where in lines_of.items()
            if text
        ]
        verdict = Verdict(becomes, "; ".join(said))
        rows.append(Finding(uses[0].kind, uses[0].name, tuple(lines), verdict))
    return sorted(rows, key=lambda row: (ORDER.index(row.verdict.becomes), row.lines))


def _listed(lines: Collection[int], place: Callable[[int], str]) -> str:
    return f"line{'s' * (len(lines) > 1)} {', '.join(map(place, sorted(lines)))}"


# Names ------------------------------------------------------------------------------------------------------

_FOREIGN = {
    "smdistributed.dataparallel": Verdict(
        "refused",
        "another library, for replicas of whole models: write ddp: True in the parameters, and "
        "smp.DistributedModel averages gradients over replicas",
    ),
    "smdistributed.modelparallel.tensorflow": Verdict(
        "refused", "smp_lite is for PyTorch: smdistributed.modelparallel.torch"
    ),
    "torch.sagemaker": Verdict(
        "refused", "SMP v2, another product, without pipelines: write the script for SMP v1's interface"
    ),
}
_VERSION = "smdistributed.modelparallel.__version__"
_ERRORS = ("exceptions", "smdistributed.modelparallel.backend.exceptions")


def judged_names(script: Script) -> Iterator[Finding]:
    """A finding of each use of a name."""
    for use in script.uses:
        for name, verdict in _judged(use, script.names):
            yield Finding("name", name, (use.line,), verdict.under(use.condition))


def _judged(use: Use, names: ScriptNames) -> Iterator[tuple[str, Verdict]]:
    """The name as it is shown, and its verdict; nothing of what is no name of SMP's."""
    for root, verdict in _FOREIGN.items():
        if f"{use.name}.".startswith(f"{root}."):
            yield root, _if_not_caught(verdict, use)
            return
    path = below_smp(use.name)
    if path is None:
        if use.name == _VERSION:
            yield use.name, Verdict("runs", "1.15.0, the version whose interface this is")
        elif _ERRORS[1].startswith(use.name) or _is_error(use.name):
            return  # a package on the way to something
        else:
            yield use.name, _if_not_caught(_unknown(use.name), use)
        return
    found = find(path)
    if use.kind == "method":
        if found is not None and found.path == path:
            yield path, _verdict_of(found, use, names)
    elif found is not None:
        yield f"smp.{found.path}", _verdict_of(found, use, names)
    elif path.partition(".")[0] in _PUBLIC or _is_error(path):
        yield f"smp.{path}", Verdict("runs", "smp_lite's own")
    elif path and not _is_module(path) and not _is_own_module(use.name):
        path = _first_unknown(path)
        yield f"smp.{path}", _if_not_caught(_unknown(path), use)


def _verdict_of(name: Name, use: Use, names: ScriptNames) -> Verdict:
    if name.status == "refused":
        if use.kind in ("import", "test"):
            return Verdict("runs", f"{_NOT_USED}: belongs to {name.says}")
        return Verdict("refused", f"belongs to {name.says}")
    if name.refused_with is not None and use.call is not None:
        return _verdict_of_argument(name, use.call, names)
    return Verdict(name.status, name.says)


_NOT_USED = "imported or asked for by isinstance, which runs; any other use is refused"
_POSITION = {"model_creation": 0, "tensor_parallelism": 0, "set_tensor_parallelism": 1}
_DEFAULT = {"model_creation": False}
"""Of the argument that may be refused; True of the others."""


def _verdict_of_argument(name: Name, call: ast.Call, names: ScriptNames) -> Verdict:
    argument, refused = name.refused_with or ("", ())
    given = _argument(call, argument, _POSITION.get(name.path))
    if given is None:
        value: object = _DEFAULT.get(name.path, True)
        says = f"{argument} is {value} unless it is written"
    else:
        value = names.constant(given)
        says = f"{argument}={value}"
    if given is not None and value is UNKNOWN:
        written = ", ".join(map(str, refused))
        return Verdict(
            "depends", f"refused if {argument} is {written} (here {shortened(given)}): {_OTHER_VALUE}"
        )
    return (
        Verdict("refused", f"{says}: {_OTHER_VALUE}") if value in refused else Verdict(name.status, name.says)
    )


_OTHER_VALUE = "this value is not supported yet; write another one"


def _argument(call: ast.Call, name: str, position: int | None) -> ast.expr | None:
    """What is given for an argument; what is passed on by * or ** where that may hide it."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None:
        for at, argument in enumerate(call.args[: position + 1]):
            if isinstance(argument, ast.Starred) or at == position:
                return argument
    return next((keyword.value for keyword in call.keywords if keyword.arg is None), None)


def _if_not_caught(verdict: Verdict, use: Use) -> Verdict:
    makes_up = "the script's own except clause, or default, does not make up for it"
    return verdict.under(makes_up if use.is_caught else None)


def _is_error(path: str) -> bool:
    """Whether it is an error class where scripts look for errors."""
    module, _, name = path.rpartition(".")
    return module in _ERRORS and name in _PUBLIC


def _is_module(path: str) -> bool:
    """Whether it is a module of SMP's, or what Python gives every module."""
    return path.startswith("__") or any(each.startswith(f"{path}.") for each in NAMES)


def _is_own_module(name: str) -> bool:
    """Whether it is a module of this library that SMP has not: ``smp_lite.estimator``."""
    root, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    return root == "smp_lite" and importlib.util.find_spec(f"{root}.{first}") is not None


def _first_unknown(path: str) -> str:
    """The part of a path up to where nothing is known any more."""
    parts = path.split(".")
    for length in range(1, len(parts)):
        start = ".".join(parts[:length])
        if not _is_module(start):
            return start
    return path


def _unknown(path: str) -> Verdict:
    known = [*NAMES, *_PUBLIC]
    last = path.rpartition(".")[2]
    close = [each for each in known if each.rpartition(".")[2] == last]
    close = close or difflib.get_close_matches(path, known, n=1, cutoff=0.7)
    hint = f": did you mean smp.{close[0]}?" if close else ": no public script or document has this name"
    return Verdict("refused", f"unknown{hint}")
