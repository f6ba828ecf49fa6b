"""What a plan makes of a model, as text: a row for each kind of tensor, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...plan.text_table import text_table
from ..plan.model_placement import ModelPlacement, TensorPlacement
from ..plan.parallel_plan import ParallelPlan, ShardingRule
from .text_parts import WIDTH, bullets, dims_text, group_text, shortened

__all__ = ["explain_model"]


def explain_model(plan: ParallelPlan, placement: ModelPlacement, source: str) -> str:
    """Returns a table of the model's tensors; those of layers that are alike are one row.

    Args:
        plan: of the configuration.
        placement: what it makes of the model.
        source: name of the model, for the title.
    """
    collapsed = _collapsed(placement.tensors)
    rows = [
        (
            _shape(tensor.shape),
            dims_text(tensor.dims),
            _how(tensor),
            _shape(tensor.local_shape),
            "?" if tensor.stage is None else str(tensor.stage),
        )
        for _, tensor in collapsed
    ]
    header = ("shape", "split over", "how", "local shape", "stage")
    taken = sum(max(map(len, column)) + 2 for column in zip(header, *rows))
    named = [(shortened(name, max(WIDTH - taken, 24)), *row) for (name, _), row in zip(collapsed, rows)]
    table = text_table(
        ("tensor", *header), named, left={"tensor", "shape", "split over", "how", "local shape"}
    )
    parts = [f"{source}: what becomes of its tensors on {plan.world_size} ranks", table]
    if placement.outputs:
        outputs = [
            (rule.name or '""', dims_text(rule.dims), _listed([name or "(model)" for name in names], 60))
            for rule, names in _by_rule(placement.outputs)
        ]
        parts.append(
            text_table(
                ("output of", "split over", "modules"), outputs, left={"output of", "split over", "modules"}
            )
        )
    problems = _by_kind(placement.problems)
    if problems:
        parts.append("does not fit:\n" + bullets(problems))
    ties = [f"note: {t.name} is the same tensor as {t.tied_to}" for t in placement.tensors if t.tied_to]
    notes = [*ties[:3], *(f"note: {note}" for note in placement.notes)]
    if notes:
        parts.append(bullets(notes))
    return "\n\n".join(parts)


def _collapsed(tensors: Sequence[TensorPlacement]) -> list[tuple[str, TensorPlacement]]:
    """One tensor for all that differ only in the numbers of their names."""
    found: dict[object, list[TensorPlacement]] = {}
    for tensor in tensors:
        generic = tuple("*" if part.isdecimal() else part for part in tensor.name.split("."))
        tie = None if tensor.tied_to is None else tensor.tied_to
        key = (generic, tensor.shape, tensor.dims, tensor.layout, tensor.local_shape, tensor.stage, tie)
        found.setdefault(key, []).append(tensor)
    return [(_merged_name([t.name for t in alike]), alike[0]) for alike in found.values()]


def _merged_name(names: Sequence[str]) -> str:
    """``h.0-3.weight`` for the names of four layers."""
    columns = zip(*(name.split(".") for name in names))
    return ".".join(_merged_part(column) for column in columns)


def _merged_part(column: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(column))
    if len(distinct) == 1:
        return distinct[0]
    numbers = sorted(map(int, distinct))
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return group_text(numbers)


def _how(tensor: TensorPlacement) -> str:
    if tensor.layout == "undecided":
        return tensor.layout
    if tensor.tied_to is not None:
        return "tied"
    generic = ".".join("*" if part.isdecimal() else part for part in tensor.name.split("."))
    return "by rule" if tensor.layout in (tensor.name, generic) else shortened(tensor.layout, 18)


def _by_rule(outputs: Sequence[tuple[str, ShardingRule]]) -> list[tuple[ShardingRule, list[str]]]:
    found: dict[ShardingRule, list[str]] = {}
    for name, rule in outputs:
        found.setdefault(rule, []).append(name)
    return list(found.items())


def _by_kind(problems: Sequence[str]) -> list[str]:
    """Problems that differ only in the numbers of layers are told once."""
    found: dict[str, list[str]] = {}
    for text in problems:
        found.setdefault(re.sub(r"\.\d+\b", ".*", text), []).append(text)
    return [
        texts[0] + (f" (and {len(texts) - 1} more layers)" if len(texts) > 1 else "")
        for texts in found.values()
    ]


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _listed(names: Sequence[str], width: int) -> str:
    merged = (
        [_merged_name(names)] if len(names) > 1 and len({n.count(".") for n in names}) == 1 else list(names)
    )
    return shortened(", ".join(merged), width)
