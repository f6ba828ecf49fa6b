"""``smp.progress``: a bar with loss and samples per second, on rank 0."""

from __future__ import annotations

from . import session as session_module
from .views.progress import Progress


def progress(total: int | None, description: str = "") -> Progress:
    """A context manager; ``update(loss=..., samples=...)`` after each step.

    Shows a bar where rank 0's output is a terminal, else a plain line now and then; nothing on other ranks.
    """
    enabled = not session_module.is_initialized() or session_module.current().rank == 0
    return Progress(total, description, enabled=enabled)
