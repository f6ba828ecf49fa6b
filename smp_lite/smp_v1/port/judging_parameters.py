"""What becomes of the parameters that a script writes, as far as it writes their values.

The configuration itself says so (:class:`~smp_lite.config.Config`): of each written value alone, with what it
needs beside it, and, where all keys are to be seen, of the written values together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...config import Config, ConfigError
from ...config.v1_parameters import HINTS, INERT, PRIVATE_HINTS
from .dicts import Entry
from .judging import Finding, Verdict
from .reader import ParameterSet
from .scopes import UNKNOWN, ScriptNames

__all__ = ["judged_parameters"]

_NUMBERS = ("partitions", "pipeline_parallel_degree")
_NEEDS: Mapping[str, Mapping[str, object]] = {
    "ddp_port": {"ddp": True},
    "ddp_dist_backend": {"ddp": True},
    "load_partition": {"partition_file": "partition.json"},
    "auto_partition": {"default_partition": 0},
}
"""Key -> others that it is refused without, whatever its value."""

_STAND_INS: Mapping[str, object] = {"ddp": False, "partition_file": "partition.json", "default_partition": 0}
"""For values that only the run knows: without these keys others are refused. They clash with none."""


def judged_parameters(given: ParameterSet, names: ScriptNames) -> Iterator[Finding]:
    """A finding of each key."""
    values = [(entry, names.constant(entry.value)) for entry in given.entries]
    for unread in given.unread:
        says = "its keys are not to be seen in this file: what is not supported is refused when it runs"
        yield Finding("parameter", f"{{**{unread.text}}}", (unread.line,), Verdict("depends", says))
    alone = [(entry, _verdict_alone(entry, value, dict(_numbers(values)))) for entry, value in values]
    if _is_all_there(given, values) and all(verdict.becomes != "refused" for _, verdict in alone):
        complaint = _complaint(_together({entry.key: value for entry, value in values}))
        if complaint is not None:
            # A complaint about several of them stands with one.
            key = _named(complaint, [*(entry.key for entry, _ in values), _NUMBERS[0]])
            condition = values[0][0].condition
            lines = [entry.line for entry, _ in values if entry.key == key] or [values[0][0].line]
            yield _found(key, lines[0], Verdict("refused", complaint).under(condition))
    for entry, verdict in alone:
        yield _found(entry.key, entry.line, verdict.under(entry.condition))


def _found(key: str, line: int, verdict: Verdict) -> Finding:
    return Finding("parameter", f'"{key}"', (line,), verdict)


def _is_all_there(given: ParameterSet, values: list[tuple[Entry, object]]) -> bool:
    is_once = len({entry.key for entry, _ in values}) == len(values)
    is_same = len({entry.condition for entry, _ in values}) == 1
    return not given.unread and is_once and is_same


def _together(values: Mapping[str, object]) -> dict[str, object]:
    """The written values, with stand-ins for those of the run without which others are refused."""
    known = {key: value for key, value in values.items() if value is not UNKNOWN}
    stand_ins = {key: value for key, value in _STAND_INS.items() if values.get(key) is UNKNOWN}
    if not any(key in known for key in _NUMBERS) and any(key in values for key in _NUMBERS):
        stand_ins["partitions"] = _fitting(known.get("default_partition"))
    return {**stand_ins, **known}


def _fitting(default_partition: object) -> int:
    """A number of partitions that the default one is among."""
    return max(2, default_partition + 1) if isinstance(default_partition, int) else 2


def _numbers(values: list[tuple[Entry, object]]) -> Iterator[tuple[str, object]]:
    """The number of partitions, where it is written, and right."""
    for entry, value in values:
        if entry.key in _NUMBERS and value is not UNKNOWN and _complaint({entry.key: value}) is None:
            yield "partitions", value


def _verdict_alone(entry: Entry, value: object, numbers: Mapping[str, object]) -> Verdict:
    key = entry.key
    if value is UNKNOWN:
        return _verdict_of_any(key)
    if key in _NUMBERS:
        complaint = _complaint({key: value})
    else:
        partitions = _fitting(value if key == "default_partition" else None)
        complaint = _complaint({"partitions": partitions, **numbers, **_NEEDS.get(key, {}), key: value})
    return Verdict("refused", complaint) if complaint is not None else _accepted(key, value)


def _verdict_of_any(key: str) -> Verdict:
    """Of a value that only the run knows."""
    if key not in Config.model_fields and key not in PRIVATE_HINTS:
        complaint = _complaint({"partitions": 2, key: None}) or ""
        return Verdict("refused", complaint.replace(f". Got {key}=None (NoneType)", ""))
    return _accepted(key, UNKNOWN)


def _accepted(key: str, value: object) -> Verdict:
    if key in PRIVATE_HINTS:
        return Verdict("hint", "means nothing here")
    kind, _, says = str(Config.model_fields[key].description).removesuffix(".").partition(": ")
    if kind == "Hint" and not (key in HINTS and value == HINTS[key]):
        return Verdict("hint", says)
    if kind == "Inert":
        return Verdict("runs", f"means nothing without {INERT[key]}: {says}")
    return Verdict("runs")


def _complaint(parameters: Mapping[str, Any]) -> str | None:
    """What the configuration says against them."""
    try:
        Config.from_parameters(parameters)
    except ConfigError as error:
        return str(error)
    return None


def _named(text: str, keys: list[str]) -> str:
    """The key whose value a complaint shows, else the first that it names."""
    got = re.search(r"\bGot (\w+)=", text)
    if got is not None and got[1] in keys:
        return got[1]
    found = {key: match.start() for key in keys if (match := re.search(rf"\b{re.escape(key)}\b", text))}
    return min(found, key=found.__getitem__, default=keys[0])
