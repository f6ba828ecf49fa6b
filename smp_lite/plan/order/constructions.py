"""Orders of the literature, written down: for each stage of a row a list of what it runs.

An entry is (kind, visit, microbatch), kinds ``F``, ``B`` and ``W``. A list may leave ``W`` out; whoever plays
it then puts them where the stage would wait. With P stages, M microbatches, and F, B and W the times that a
stage takes for a microbatch (all its visits; B without W where there is a W), the step takes M (F + B + W)
and the bubble:

- 1F1B (PipeDream, Narayanan et al. 2019; :mod:`.stage_machines` make it): (P-1)(F+B). A stage holds at most
  P microbatches.
- :func:`interleaved` (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
  Using Megatron-LM"): (P-1)(F+B)/v for v visits and M a multiple of P; a stage holds at most P + (P-1)/v.
- :func:`zero_bubble_h1` (ZB-H1; Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): (P-1)(F+B-W), which is
  (P-1)F for F = B = W; a stage holds at most P.
- :func:`zero_bubble_v` (ZB-V, the same paper, section 6): for F = B = W no stage waits between its first
  action and its last one (if each of the last stage's two visits is a segment of its own). Stage i begins
  after the i forwards before it, halves of F since a visit is half of the stage: the step takes
  3 M F + (P-1) F/2, and a stage holds at most P.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..step.actions import ActionKind

__all__ = ["Entry", "interleaved", "zero_bubble_h1", "zero_bubble_v"]

Entry = tuple[ActionKind, int, int]
"""What runs, at which visit, with which microbatch (counted from 0)."""

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> list[list[Entry]]:
    """1F1B in which stage i is i microbatches late with ``W``."""
    return [
        _with_weights(
            _alternately(_row(F, num_microbatches), _row(B, num_microbatches), num_stages - 1 - place), place
        )
        for place in range(num_stages)
    ]


def interleaved(
    num_stages: int, num_microbatches: int, num_visits: int, *, lead: int = 2, short_first: bool = False
) -> list[list[Entry]]:
    """Megatron-LM's order: as many microbatches as there are stages, then the same ones at the next visit.

    Args:
        lead: how many forwards more each stage runs before its first backward than the stage after it. With 1
            a stage holds P at most, which is enough where ``W`` fill the gaps: the bubble is then that of
            ZB-V, (P-1) F/v for F = B = W.
        short_first: where M is no multiple of P, the first group has fewer, not the last one. The lists are
            those of the next multiple without the microbatches that are not there.
    """
    padded = -(-num_microbatches // num_stages) * num_stages
    missing = padded - num_microbatches if short_first else 0
    groups = [range(begin - missing, begin - missing + num_stages) for begin in range(0, padded, num_stages)]
    forwards = [(F, visit, m) for ms in groups for visit in range(num_visits) for m in ms]
    backwards = [(B, visit, m) for ms in groups for visit in reversed(range(num_visits)) for m in ms]
    first = (num_visits - 1) * num_stages
    return [
        [
            entry
            for entry in _alternately(forwards, backwards, first + lead * (num_stages - 1 - place))
            if 0 <= entry[2] < num_microbatches
        ]
        for place in range(num_stages)
    ]


def zero_bubble_v(num_stages: int, num_microbatches: int) -> list[list[Entry]]:
    """ZB-V of two visits, the second ones from the last stage to the first one."""
    return [list(_zero_bubble_v(num_stages, place, num_microbatches)) for place in range(num_stages)]


def _zero_bubble_v(num_stages: int, place: int, num_microbatches: int) -> Iterator[Entry]:
    # With fewer microbatches than fill the pipeline the others are left out.
    padded = max(num_microbatches, 2 * num_stages - 1)
    counts: dict[tuple[ActionKind, int], int] = {}

    def run(*what: tuple[ActionKind, int]) -> Iterator[Entry]:
        for key in what:
            m = counts[key] = counts.get(key, -1) + 1
            if m < num_microbatches:
                yield (*key, m)

    left = num_stages - place
    yield from run(*[(F, 0)] * (2 * left - 1))
    yield from run(*[(F, 1), (F, 0)] * place)
    yield from run(*[(F, 1), (B, 1), (W, 1)] * left)
    steady = padded - (2 * left - 1) - place
    for _ in range(steady):
        yield from run((F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    for _ in range(padded - num_stages - steady):
        yield from run((B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    yield from run(*[(B, 0), (B, 1)] * place)
    yield from run(*[(B, 0), (W, 0)] * left)
    yield from run(*[(W, 1)] * place)
    yield from run(*[(W, 0)] * place)


def _row(kind: ActionKind, num_microbatches: int) -> list[Entry]:
    return [(kind, 0, m) for m in range(num_microbatches)]


def _alternately(forwards: list[Entry], backwards: list[Entry], warmup: int) -> Iterator[Entry]:
    """Some forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


def _with_weights(entries: Iterable[Entry], late: int) -> list[Entry]:
    """Each ``W`` after that many further backwards."""
    found: list[Entry] = []
    waiting: list[Entry] = []
    for entry in entries:
        found.append(entry)
        kind, visit, m = entry
        if kind is B:
            waiting.append((W, visit, m))
            if len(waiting) > late:
                found.append(waiting.pop(0))
    return found + waiting
