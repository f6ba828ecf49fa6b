"""The picture of a planned step, and with ``pipeline: auto`` of everything that was tried for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..plan.step.memory import StageMemory
from ..plan.step.simulate import Simulation
from ..plan.units import human_bytes
from ..session import Session

__all__ = ["check_picture", "draw", "pipeline_text"]


def check_picture(path: str) -> None:
    """Before all that takes long.

    Raises:
        ValueError: ``--png`` names no file that a picture can be written to, or matplotlib is missing.
    """
    file = Path(path)
    if not path or file.is_dir():
        raise ValueError(f"--png {path!r} is no file: name one that ends in .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise ValueError(f"--png {path}: there is no folder {file.parent}")
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        text = 'it needs matplotlib: pip install "smp-lite[plot]", or read the same as text, without --png'
        raise ValueError(f"--png {path}: {text}") from None
    if file.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"--png {path}: the suffix says how to draw: name a .png, .svg or .pdf file")


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
    """The step; with ``pipeline: auto`` all that was tried.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        _draw(session, simulation, path, title, stages)
    except OSError as error:
        raise ValueError(f"--png {path} cannot be written: {error.strerror or error}") from error


def _draw(
    session: Session, simulation: Simulation, path: str, title: str, stages: Sequence[StageMemory]
) -> None:
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
