"""``smp.should_stop()``: all ranks learn at the same step that the job is about to be stopped.

A signal reaches each process at its own time, in the middle of anything. A rank that stopped at once would
leave the others waiting in the next step. So each process only notes the notice
(:mod:`smp_lite.stop_notice`), and between steps the ranks ask each other.
"""

from __future__ import annotations

from ..errors import SMPError
from ..session import current
from ..stop_notice import was_given

__all__ = ["should_stop"]


def should_stop() -> bool:
    """Whether the process of any rank has been told to stop (SIGUSR1). Collective over all ranks.

    Call it on every rank at the same place between steps, say once an iteration, and save and leave the loop
    when it is true; it stays true then, and further calls need no other rank. A call costs some small
    messages.

    Raises:
        SMPTimeout: a rank did not call it; names it.
        SMPError: it was called inside a step function.
    """
    session = current()
    if session.step is not None:
        raise SMPError("smp.should_stop() was called inside a step function: call it between steps")
    if not session.is_stopping:
        told = [was_given()]
        if session.world is not None:
            told = session.world.exchange(told[0] or None, "WORLD", "smp.should_stop")
        session.is_stopping = any(told)
    return session.is_stopping
