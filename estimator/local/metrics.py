"""`metric_definitions`: what the service finds in a job's log, found in the log of a job here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["check_metrics", "final_metrics"]

_RANK = re.compile(r"^\[\d+\] ")
"""Our launcher's sign before each line, which no regular expression of a user's counts on."""


def check_metrics(definitions: Iterable[Mapping[str, str]]) -> None:
    """
    Raises:
        ValueError: a regular expression is none, or has no group for the value; names the metric.
    """
    for definition in definitions:
        try:
            groups = re.compile(definition["Regex"]).groups
        except re.error as error:
            raise ValueError(_complaint(definition, f"is no regular expression ({error})")) from None
        if not groups:
            raise ValueError(_complaint(definition, "has no group: put the number's part in parentheses"))


def final_metrics(definitions: Sequence[Mapping[str, str]], logs: Iterable[Path]) -> list[dict[str, Any]]:
    """The last value of each metric that is in the files, as DescribeTrainingJob tells it."""
    found: dict[str, float] = {}
    for log in logs:
        if not definitions or not log.is_file():
            continue
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                text = _RANK.sub("", line.rstrip("\n"))
                for definition in definitions:
                    match = re.search(definition["Regex"], text)
                    value = _number(match[1]) if match is not None else None
                    if value is not None:
                        found[definition["Name"]] = value
    now = datetime.now(UTC)
    return [{"MetricName": name, "Value": value, "Timestamp": now} for name, value in found.items()]


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # the service leaves it out as well
        return None


def _complaint(definition: Mapping[str, str], what: str) -> str:
    return f"metric_definitions: the Regex {definition['Regex']!r} of {definition['Name']!r} {what}"
