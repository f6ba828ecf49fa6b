"""What the ranks that share a stage hold of a model, and where a schedule differs from what a plan says."""

from __future__ import annotations

import math

from ..nn.layout import layout_of
from ..plan.units import human_bytes
from ..session import Session
from ..systems.plan.parallel_plan import ParallelPlan
from ..systems.showing.text_parts import bullets
from ..tensor_parallel.split_record import split_of

__all__ = ["notes_on_schedule", "shares_text"]

_MOST_LINES = 12


def shares_text(session: Session) -> str | None:
    """Which modules are split, and how much of the parameters one rank of a stage holds; None: one rank is a
    stage."""
    axes = [(name, session.topology.axis_size(name)) for name in session.topology.stage_axes]
    ranks = math.prod(size for _, size in axes)
    if ranks == 1:
        return None
    root = session.model.module
    parameters = list(root.parameters())
    layouts = [layout_of(parameter) for parameter in parameters]
    split = [layout for layout in layouts if layout is not None and layout.axes]
    whole = sum(
        math.prod(p.shape if layout is None else layout.shape) * p.element_size()
        for p, layout in zip(parameters, layouts, strict=True)
    )
    own = sum(p.numel() * p.element_size() for p in parameters)
    over = " x ".join(f"{name} {size}" for name, size in axes if size > 1)
    lines = [
        f"each stage is shared by {ranks} ranks ({over}): {len(split)} of {len(parameters)} parameters are "
        f"split; a rank's parts of all stages are {human_bytes(own)} of the model's {human_bytes(whole)}"
    ]
    plan = split_of(root)
    if plan is None:
        return bullets(lines)
    shown = plan.lines()
    hidden = len(shown) - _MOST_LINES
    shown = shown[:_MOST_LINES] + ([f"and {hidden} more"] if hidden > 0 else [])
    lines.append(f"plan of the layers: {plan.origin_text}")
    return "\n".join([bullets(lines), *(f"    {line}" for line in shown)])


def notes_on_schedule(plan: ParallelPlan) -> list[str]:
    """Where the schedule that runs is another than the plan's, with the same results."""
    notes = []
    if plan.pp_size > 1 and plan.schedule.name == "sequential" and plan.microbatches.count > 1:
        notes.append(
            f"{plan.said('schedule').text()}: one stage at a time is asked for; here stages work at the same "
            "time where they can, which gives the same numbers"
        )
    if plan.stages.num_stages > plan.pp_size > 1:
        notes.append(
            f"{plan.said('stages').text()}: the {plan.stages.num_stages} stages are on {plan.pp_size} ranks "
            "of a pipeline; those of one rank are shown as one stage"
        )
    return notes
