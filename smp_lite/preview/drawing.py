"""The picture of a planned step, and with ``pipeline: auto`` of everything that was tried for it."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.step.memory import StageMemory
from ..plan.step.simulate import Simulation
from ..plan.units import human_bytes
from ..session import Session

__all__ = ["draw", "pipeline_text"]


def pipeline_text(session: Session) -> str:
    """As it is set; of ``auto`` what it has come to."""
    schedules = session.model.schedules
    if session.cfg.pipeline != "auto" or schedules is None:
        return session.cfg.pipeline
    return f"auto ({schedules.taken.pipeline})"


def draw(
    session: Session,
    simulation: Simulation,
    path: str,
    title: str,
    stages: Sequence[StageMemory],
) -> None:
    """The step; with ``pipeline: auto`` all that was tried."""
    schedules = session.model.schedules
    if session.cfg.pipeline != "auto" or schedules is None:
        from ..views.schedule_picture import draw_schedule

        draw_schedule(simulation, path, title=title, time_unit="GFLOP", memory=stages)
        return
    from ..views.alternatives_picture import draw_alternatives

    tried = schedules.shown
    draw_alternatives(
        tried.choice, path, title=title, time_unit=tried.unit.name, scale=tried.unit.scale, peak=_bytes_text
    )


def _bytes_text(num_bytes: float) -> str:
    return human_bytes(round(num_bytes))
