"""``optimizer.step(closure)``: every rank evaluates the closure equally often.

A closure runs a training step, which takes all ranks, while each rank's optimizer decides for itself how
often it wants one. So the ranks meet before each evaluation and at the end: where one wants another and one
has finished, both stop with an error instead of waiting for each other. A rank whose stage owns no parameters
has no optimizer to decide, and goes along with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SMPMismatch

if TYPE_CHECKING:
    from ..session import Session

__all__ = ["step_with_closure", "with_hooks"]

_EVALUATE, _DONE, _FOLLOW = "evaluate", "done", "follow"


def step_with_closure(
    session: Session, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *, has_parameters: bool
) -> Any:
    """One step. Collective over all ranks.

    Args:
        session: the job's.
        optimizer: this rank's.
        closure: runs a training step and returns its loss.
        has_parameters: False: the closure is evaluated as often as on the others.

    Returns:
        What the optimizer returns; without parameters the first loss.

    Raises:
        SMPMismatch: the ranks want to evaluate it unequally often.
    """
    if session.world is None or session.world.size == 1:
        if has_parameters:
            return optimizer.step(closure)
        with torch.enable_grad():
            return with_hooks(optimizer, closure)
    meeting = _Meeting(session, type(optimizer).__name__)
    if not has_parameters:
        return with_hooks(optimizer, lambda: _follow(meeting, closure))

    def evaluate() -> Any:
        meeting.say(_EVALUATE)
        return closure()

    result = optimizer.step(evaluate)
    meeting.say(_DONE)
    return result


def with_hooks(optimizer: torch.optim.Optimizer, work: Callable[[], Any]) -> Any:
    """What stands for ``optimizer.step()`` where it has no parameters: many fail without any, but a script's
    hooks on steps are to run on every rank."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # it does not call torch's own constructor
        return work()
    return torch.optim.Optimizer.profile_hook_step(lambda *_, **__: work())(optimizer)


def _follow(meeting: _Meeting, closure: Callable[[], Any]) -> Any:
    losses = []
    while True:
        heard = meeting.say(_FOLLOW)
        # Nobody may have parameters: then once, as an optimizer without any would.
        if _EVALUATE not in heard and (_DONE in heard or losses):
            return losses[0] if losses else None
        with torch.enable_grad():
            losses.append(closure())


class _Meeting:
    """Compares what all ranks want to do next."""

    def __init__(self, session: Session, name: str) -> None:
        assert session.world is not None
        self._world, self._name = session.world, name
        self._evaluations = 0

    def say(self, wish: str) -> list[str]:
        """The wishes of all ranks."""
        heard = self._world.exchange(wish, "WORLD", "optimizer.step(closure)")
        if _EVALUATE in heard and _DONE in heard:
            more, fewer = heard.index(_EVALUATE), heard.index(_DONE)
            raise SMPMismatch(
                f"{self._name} on rank {fewer} has finished its step after evaluating the closure "
                f"{self._evaluations} times, but rank {more} wants to evaluate it again: how often may not "
                "depend on a rank's own parameters or loss. Use an optimizer that evaluates it once, or call "
                "step() without it"
            )
        self._evaluations += 1
        return heard
