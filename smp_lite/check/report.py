"""What a check has found, in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from .observe import Call, Key, Print, StepNotes

__all__ = ["StepReport", "compare"]

ROUNDING = 1e-5
"""Relative difference of norms up to which gradients may differ for being summed in another order."""


@dataclass
class StepReport:
    """The comparison of one step.

    Attributes:
        index: number of the step.
        num_calls: calls of modules that were compared.
        rounded: gradients that differ by rounding only.
        texts: what differs, the first thing first; empty if nothing does.
        refused: the error of the recorded run where the plain one has none.
        fails: the error of the plain run, where both have one.
    """

    index: int
    num_calls: int
    num_stages: int
    rounded: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    refused: str = ""
    fails: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.texts or self.refused or self.fails)


def compare(index: int, recorded: StepNotes, plain: StepNotes, *, num_stages: int) -> StepReport:
    """Compares the two runs of one step."""
    report = StepReport(index, len(plain.calls), num_stages)
    if recorded.error and plain.error:
        report.fails = plain.error
        return report
    if recorded.error:
        report.refused = recorded.error
        return report
    if plain.error:
        report.texts.append(f"the plain run fails ({plain.error}), and the recorded one does not")
        return report
    first = _first_differing_call(recorded, plain)
    for name, expected in plain.outcome.items():
        found = recorded.outcome.get(name)
        if found is None:
            report.texts.append(f"{name} is missing")
        elif found.digest != expected.digest:
            if first is None and name.startswith("the gradient") and _is_rounding(found, expected):
                report.rounded.append(name)
            else:
                report.texts.append(f"{name} is {found.shown} instead of {expected.shown}")
    report.texts += [f"{name} is too much" for name in recorded.outcome.keys() - plain.outcome.keys()]
    if first is not None and report.texts:
        report.texts.insert(0, first)
    return report


def _is_rounding(found: Print, expected: Print) -> bool:
    scale = max(found.norm, expected.norm)
    return scale > 0 and abs(found.norm - expected.norm) <= ROUNDING * scale


def _first_differing_call(recorded: StepNotes, plain: StepNotes) -> str | None:
    """The first call, in the plain run's order, whose result differs, and why."""
    for key, expected in plain.calls.items():
        found = recorded.calls.get(key)
        if found is None:
            return f"{_name(key)} at {expected.line} was not made by the recorded run"
        if _digests(found.result) != _digests(expected.result):
            return f"{_name(key)} at {expected.line} gives another result: {_cause(found, expected)}"
    return None


def _name(key: Key) -> str:
    m, label, number = key
    times = f", call {number + 1} of it," if number else ""
    return f"{label}{times} in microbatch {m}"


def _digests(prints: tuple[Print, ...]) -> list[str]:
    return [each.digest for each in prints]


def _cause(found: Call, expected: Call) -> str:
    for name, value in expected.state.items():
        now = found.state.get(name, "nothing")
        if now != value:
            return f"{name} is {now} when it runs, and was {value} when it was called"
    if _digests(found.given) != _digests(expected.given):
        for a, b in zip(found.given, expected.given, strict=False):
            if a.digest != b.digest:
                return (
                    f"it is given {a.shown} instead of {b.shown}: an argument was changed in place, or code "
                    "between the calls computed something else"
                )
        return "it is given other arguments"
    return (
        "its arguments and attributes are the same, so it reads something else that has changed since (a "
        "file, "
        "the time, a global that its code reaches indirectly), or draws random numbers of its own"
    )
