"""What a script takes from SMP: names, methods of its objects, parameters. Nothing of it is run.

The reader only says what is there, and where; :mod:`.judging` says what becomes of it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ... import __all__ as _PUBLIC
from .dicts import DictReader, Entry, Unread
from .scopes import ScriptNames, spelt

__all__ = ["ParameterSet", "Script", "Use", "below_smp", "read"]

_SMP = "smdistributed.modelparallel.torch"

_MODEL_PARALLEL = "smdistributed.modelparallel"
_OURS = (_SMP, "smp_lite")
_FOREIGN = ("smdistributed", "torch.sagemaker")
_CLASSES = {
    "DistributedModel": "DistributedModel",
    "model.DistributedModel": "DistributedModel",
    "DistributedOptimizer": "DistributedOptimizer",
}
_CUDA_DEVICE = re.compile(r"cuda(:\d+)?")


@dataclass(frozen=True)
class Use:
    """A place where a name stands.

    Attributes:
        name: in full: ``smdistributed.modelparallel.torch.rank``; methods stand under their class.
        kind: ``test`` is an argument of ``isinstance``; ``method``, that it is one, of an object.
        condition: when it is reached, None: whenever what is around it runs.
        call: where it is called.
        is_caught: the script goes on without it: of an import, and of getattr with a default.
    """

    name: str
    kind: Literal["import", "test", "use", "method"]
    line: int
    condition: str | None = None
    call: ast.Call | None = None
    is_caught: bool = False


@dataclass(frozen=True)
class ParameterSet:
    """The dictionary of one ``smp.init`` or one estimator."""

    entries: list[Entry]
    unread: list[Unread]


@dataclass
class Script:
    """All of it.

    Attributes:
        cuda_lines: lines that speak of CUDA.
        alias_lines: lines that import SMP by its own name.
    """

    names: ScriptNames
    uses: list[Use] = field(default_factory=list)
    parameters: list[ParameterSet] = field(default_factory=list)
    cuda_lines: list[int] = field(default_factory=list)
    alias_lines: list[int] = field(default_factory=list)
    imports_smp: bool = False


def below_smp(name: str) -> str | None:
    """The path below ``smp`` of a full name; None: it is none of SMP's."""
    for root in _OURS:
        if name == root or name.startswith(f"{root}."):
            return name[len(root) + 1 :]
    if name.startswith(f"{_MODEL_PARALLEL}.test."):  # beside torch, not below it
        return name[len(_MODEL_PARALLEL) + 1 :]
    return None


def read(tree: ast.Module) -> Script:
    """Reads a parsed script."""
    names = ScriptNames(tree, starred=_PUBLIC)
    script = Script(names)
    kinds = _kinds_of_variables(names)
    for node in ast.walk(tree):
        for use in _uses_of(node, names, kinds):
            script.uses.append(use)
            script.imports_smp |= use.kind == "import"
            if use.kind == "import" and use.name.startswith(_MODEL_PARALLEL):
                script.alias_lines.append(use.line)
        if (line := _line_of_cuda(node, names)) is not None:
            script.cuda_lines.append(line)
    script.uses.sort(key=lambda use: use.line)
    script.cuda_lines = sorted({*script.cuda_lines})
    dicts = DictReader(names)
    for given in [*_given_to_init(script.uses), *_given_to_estimators(tree, dicts)]:
        found = dicts.entries(given)
        entries = [each for each in found if isinstance(each, Entry)]
        script.parameters.append(ParameterSet(entries, [each for each in found if isinstance(each, Unread)]))
    return script


# Names ------------------------------------------------------------------------------------------------------


def _uses_of(node: ast.AST, names: ScriptNames, kinds: dict[str, set[str]]) -> Iterator[Use]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        if isinstance(node, ast.ImportFrom) and node.level:
            return
        for alias in node.names:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            name = f"{module}{alias.name}".removesuffix(".*")
            if _is_spoken_of(name):
                yield Use(
                    name,
                    "import",
                    alias.lineno if alias.name != "*" else node.lineno,
                    names.condition(node),
                    is_caught=names.is_caught(node),
                )
        return
    # Of a chain of attributes the whole says most; methods are looked for along it.
    is_got = names.got(node) is not None
    if not isinstance(node, ast.Name | ast.Attribute) and not is_got:
        return
    assert isinstance(node, ast.expr)
    if isinstance(names.parent(node)[0], ast.Attribute):
        return
    name = names.imported(node)
    if name is not None and _is_spoken_of(name):
        has_default = is_got and isinstance(node, ast.Call) and len(node.args) == 3
        yield Use(
            name,
            _kind(node, names),
            node.lineno,
            names.condition(node),
            _call_of(node, names),
            is_caught=has_default,
        )
        return
    attribute: ast.expr = node
    while isinstance(attribute, ast.Attribute):
        for kind in sorted(_kinds_of(attribute.value, names, kinds)):
            line = attribute.end_lineno or attribute.lineno
            full = f"{_SMP}.{kind}.{attribute.attr}"
            yield Use(full, "method", line, names.condition(attribute), _call_of(attribute, names))
        attribute = attribute.value


def _is_spoken_of(name: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in (*_OURS, *_FOREIGN))


def _kind(node: ast.expr, names: ScriptNames) -> Literal["test", "use"]:
    parent, at = names.parent(node)
    while isinstance(parent, ast.Tuple | ast.BinOp):
        parent, at = names.parent(parent)
    is_argument = isinstance(parent, ast.Call) and at == "args"
    return "test" if is_argument and spelt(parent.func) in ("isinstance", "issubclass") else "use"


def _call_of(node: ast.expr, names: ScriptNames) -> ast.Call | None:
    parent, at = names.parent(node)
    return parent if isinstance(parent, ast.Call) and at == "func" else None


# Objects ----------------------------------------------------------------------------------------------------


def _kinds_of_variables(names: ScriptNames) -> dict[str, set[str]]:
    """Spelling of a variable -> the classes of SMP's that it may be of.

    By spelling, for the whole file: a script passes ``model`` on to functions that call it ``model`` too.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(names.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                function = decorator.func if isinstance(decorator, ast.Call) else decorator
                if below_smp(names.imported(function) or "") == "step":
                    kinds[node.name].add("step")
    before = -1
    while before != (before := sum(map(len, kinds.values()))):
        for (_, text), bindings in names.bindings.items():
            for binding in bindings:
                found = _kinds_of(binding.value, names, kinds) if binding.value is not None else set()
                # Only a step's results come in tuples.
                found = found & {"StepOutput"} if binding.is_part else found
                if found:
                    kinds[text] |= found
    return kinds


def _kinds_of(node: ast.expr, names: ScriptNames, kinds: dict[str, set[str]]) -> set[str]:
    if isinstance(node, ast.Call):
        path = below_smp(names.imported(node.func) or "")
        if path == "step":
            return {"step"}
        if path in _CLASSES:
            return {_CLASSES[path]}
        return {"StepOutput"} if "step" in _kinds_of(node.func, names, kinds) else set()
    if isinstance(node, ast.Subscript):
        return _kinds_of(node.value, names, kinds) & {"StepOutput"}
    if isinstance(node, ast.IfExp):
        return _kinds_of(node.body, names, kinds) | _kinds_of(node.orelse, names, kinds)
    return set(kinds.get(spelt(node) or "", ()))


# Parameters -------------------------------------------------------------------------------------------------


def _given_to_init(uses: list[Use]) -> Iterator[ast.expr]:
    for use in uses:
        if use.call is not None and below_smp(use.name) == "init" and use.kind == "use":
            given = [*use.call.args, *(each.value for each in use.call.keywords if each.arg == "config")]
            # None: the launcher gives them. A text is the path of a JSON file, which this does not read.
            yield from (value for value in given[:1] if not isinstance(value, ast.Constant))


def _given_to_estimators(tree: ast.Module, dicts: DictReader) -> Iterator[ast.expr]:
    """What stands under "parameters" under "modelparallel", wherever that is written."""
    for node in ast.walk(tree):
        for options in _under_modelparallel(node):
            for entry in dicts.entries(options):
                if isinstance(entry, Entry) and entry.key == "parameters":
                    yield entry.value


def _under_modelparallel(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):
            if isinstance(key, ast.Constant) and key.value == "modelparallel":
                yield value
    elif isinstance(node, ast.keyword) and node.arg == "modelparallel":
        yield node.value
    elif isinstance(node, ast.Assign):
        slices = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        if any(isinstance(each, ast.Constant) and each.value == "modelparallel" for each in slices):
            yield node.value


# CUDA -------------------------------------------------------------------------------------------------------


def _line_of_cuda(node: ast.AST, names: ScriptNames) -> int | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
        is_cuda = any(f"{module}{alias.name}.".startswith("torch.cuda.") for alias in node.names)
        return node.lineno if is_cuda else None
    if isinstance(node, ast.Name | ast.Attribute):
        name = names.imported(node) or ""
        is_cuda = name == "torch.cuda" or (isinstance(node, ast.Name) and name.startswith("torch.cuda."))
        return node.end_lineno if is_cuda else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
        return node.func.end_lineno
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CUDA_DEVICE.fullmatch(node.value):
        return node.lineno
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        return node.lineno if str(node.values[0].value).startswith("cuda:") else None
    return None
