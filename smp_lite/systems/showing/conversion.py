"""A plan said in another system's words, and what cannot be said there.

What is lost is found, not listed by hand: the text is read again, and the two plans are compared.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from ...config.errors import ConfigError
from ..load.detect import DIALECTS
from ..load.loading import load_plan
from ..plan.model_placement import ModelPlacement
from ..plan.parallel_plan import ParallelPlan
from .explain import SYSTEMS, data_text, microbatches_text, schedule_text, stages_text, tensor_text
from .writers import SUFFIXES, WRITERS

__all__ = ["Conversion", "compare_plans", "convert", "load_text"]

_ROLES = {"pp": "pipeline", "dp": "data", "tp": "tensor", "ep": "expert", "cp": "context"}


@dataclass(frozen=True)
class Conversion:
    """A configuration of another system.

    Attributes:
        dialect: that system.
        text: of the file.
        world_size: number of ranks that it is for.
        plan: what it is read as.
        losses: what of the first plan is not in it, or otherwise.
    """

    dialect: str
    text: str
    world_size: int
    plan: ParallelPlan
    losses: tuple[str, ...]


def convert(
    plan: ParallelPlan,
    dialect: str,
    *,
    model: ModelPlacement | None = None,
    stage_of_layer: tuple[int, ...] | None = None,
) -> Conversion:
    """Returns the nearest configuration of another system.

    Args:
        plan: to be said there.
        dialect: ``sagemaker``, ``enflame``, ``colossal``, ``libai`` or ``torchprime``.
        model: what the plan makes of a model, for systems that name tensors.
        stage_of_layer: by layer of a model, for systems that list stages.
    """
    if dialect not in DIALECTS:
        raise ConfigError(f"unknown dialect {dialect!r}: choose from {', '.join(DIALECTS)}")
    text = WRITERS[dialect](plan, model, stage_of_layer)
    world_size = _world_size(plan, dialect)
    back = load_text(text, dialect, world_size)
    return Conversion(dialect, text, world_size, back, compare_plans(plan, back))


def load_text(text: str, dialect: str, world_size: int | None = None) -> ParallelPlan:
    """Returns the plan of a configuration's text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"configuration{SUFFIXES[dialect]}")
        path.write_text(text, encoding="utf-8")
        plan = load_plan(path, world_size=world_size, dialect=dialect)

    def named(place: str) -> str:
        return place.replace(f"{folder}{os.sep}", "")

    said = ((key, replace(s, file=None if s.file is None else named(s.file))) for key, s in plan.provenance)
    return replace(plan, provenance=tuple(said), warnings=tuple(map(named, plan.warnings)))


def compare_plans(plan: ParallelPlan, other: ParallelPlan) -> tuple[str, ...]:
    """Returns a line for each thing that ``other`` has otherwise than ``plan``, whoever said it."""
    lines = []
    if plan.world_size != other.world_size:
        lines.append(f"ranks: {plan.world_size}; there {other.world_size}")
    for role, word in _ROLES.items():
        if plan.role_size(role) != other.role_size(role):
            lines.append(f"{word} size: {plan.role_size(role)}; there {other.role_size(role)}")
    if not lines and _places(plan) != _places(other):
        rank = next(r for r, (a, b) in enumerate(zip(_places(plan), _places(other))) if a != b)
        lines.append(f"layout: rank {rank} is at {_place(plan, rank)}; there at {_place(other, rank)}")
    if plan.placement != other.placement:
        lines.append(
            f"devices: {plan.placement.labels[0]} ... {plan.placement.labels[-1]} are not said there"
            if plan.placement.labels
            else "devices: none are said; there they are"
        )
    if _stages(plan) != _stages(other):
        lines.append(f"stages: {stages_text(plan)}; there {stages_text(other)}")
    if _microbatches(plan) != _microbatches(other):
        lines.append(f"microbatches: {microbatches_text(plan)}; there {microbatches_text(other)}")
    if schedule_text(plan) != schedule_text(other):
        lines.append(f"schedule: {schedule_text(plan)}; there {schedule_text(other)}")
    if (plan.tensor, _own_batches(plan)) != (other.tensor, _own_batches(other)):
        lines.append(f"layers are shared by {tensor_text(plan)}; there by {tensor_text(other)}")
    if plan.rules != other.rules:
        lines.append(f"sharding rules by name: {len(plan.rules)}; there {len(other.rules)}")
    if plan.strict_rules != other.strict_rules:
        lines.append(f"strict rules: {plan.strict_rules}; there {other.strict_rules}")
    if _shared(plan) != _shared(other):
        lines.append(f"replicas share {data_text(plan)}; there {data_text(other)}")
    theirs = dict(other.others)
    lost = [
        f"{key}={value}"
        for key, value in plan.others
        if (key not in theirs or theirs[key] != value) and not plan.said(f"others.{key}").is_default
    ]
    if lost and plan.dialect != other.dialect:
        lines.append(f"keys of {SYSTEMS[plan.dialect]} alone: {', '.join(lost)}")
    elif lost:
        lines.append(f"keys: {', '.join(lost)}")
    return tuple(lines)


def _world_size(plan: ParallelPlan, dialect: str) -> int:
    """The ranks of the axes that a system has."""
    pp, dp, tp = plan.pp_size, plan.dp_size, plan.tp_size
    if dialect == "torchprime":
        return plan.world_size if plan.dialect == "torchprime" else dp * tp
    if dialect == "enflame":
        others = dict(plan.others)
        return pp if others.get("mode") == "pipeline" else pp * tp
    return pp * dp * tp


def _places(plan: ParallelPlan) -> list[tuple[int, ...]]:
    return [tuple(plan.role_rank(role, rank) for role in _ROLES) for rank in range(plan.world_size)]


def _place(plan: ParallelPlan, rank: int) -> str:
    return ", ".join(
        f"{word} {plan.role_rank(role, rank)}" for role, word in _ROLES.items() if plan.role_size(role) > 1
    )


def _stages(plan: ParallelPlan) -> tuple[object, ...]:
    """What a rule of stages says; with one stage there is nothing to say."""
    rule = plan.stages
    if rule.num_stages == 1:
        return (1,)
    words = (rule.kind, rule.owners, rule.num_chunks, rule.num_layers, rule.table)
    return (*words, rule.allow_empty, rule.default_stage, rule.file, rule.memory_weight)


def _microbatches(plan: ParallelPlan) -> tuple[object, ...]:
    """One microbatch is a batch, wherever it comes from."""
    batch = plan.microbatches
    return (batch.count, batch.source if batch.count > 1 else "", batch.size, batch.global_batch_size)


def _own_batches(plan: ParallelPlan) -> bool:
    """Whether the ranks that share a layer see different samples, as SMP's do if nothing is said."""
    return plan.dialect == "sagemaker" and plan.tp_size > 1 and not dict(plan.others).get("prescaled_batch")


def _shared(plan: ParallelPlan) -> object:
    """One replica shares nothing, whatever the switches of gradients say."""
    is_alone = plan.dp_size == 1 and plan.data_parallel.policy in ("none", "ddp", "horovod")
    return None if is_alone else plan.data_parallel
