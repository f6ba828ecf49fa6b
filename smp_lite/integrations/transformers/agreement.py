"""Decisions that all ranks take alike.

Callbacks run on every rank. What they decide (to stop, to save, to evaluate) the ranks put together before
it is acted upon, and any rank's yes counts: a callback that looks at the clock, or at a file of one host,
stops all. Metrics are rank 0's everywhere, since the best checkpoint, learning rates and callbacks go by
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...session import Session

__all__ = ["agreeing", "exchange", "of_rank_0"]

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")

ACTED_UPON_AFTER = ("on_step_end", "on_substep_end", "on_epoch_end", "on_log", "on_evaluate", "on_save")
"""Events after which the Trainer reads what callbacks have decided."""


def agreeing(session: Session, call_event: Callable[..., Any]) -> Callable[..., Any]:
    """``CallbackHandler.call_event``, after which all ranks hold the same decisions."""

    def call(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = call_event(event, args, state, control, **kwargs)
        if event in ACTED_UPON_AFTER:
            own = [bool(getattr(control, flag)) for flag in FLAGS]
            found = exchange(session, own, "WORLD", f"what callbacks decided in {event}")
            for flag, decided in zip(FLAGS, zip(*found, strict=True), strict=True):
                setattr(control, flag, any(decided))
        return control

    return call


def exchange(session: Session, value: Any, kind: str, what: str) -> list[Any]:
    """The values of the ranks of a group. Collective over it.

    Args:
        session: with the ranks.
        value: picklable.
        kind: of the group; one of this rank alone needs nobody.
        what: names the call in errors.
    """
    if session.world is None or len(session.group(kind)) == 1:
        return [value]
    return session.world.exchange(value, kind, what)


def of_rank_0(session: Session, value: Any, what: str) -> Any:
    """Rank 0's value, on all ranks. Collective over all ranks."""
    return exchange(session, value, "WORLD", what)[0]
