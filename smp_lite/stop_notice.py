"""The notice that a job is about to be stopped: SIGUSR1, noted until somebody asks.

It is SIGUSR1 and not SIGTERM, because mpirun answers SIGTERM by killing its ranks a moment later, but passes
SIGUSR1 on to all of them and goes on. (Slurm sends it as well: ``#SBATCH --signal=USR1@120``.) The signal's
default action would end the process, and the note must not disturb what the process is doing: system calls
that it interrupts start again.

mpirun signals the rank's whole process group, and a handler does not outlive ``exec``: programs that the
script has started die of the notice, unless they ignore it; workers that were only forked do not.

Only the standard library is used, so that a launcher can listen before the script starts.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

__all__ = ["NOTICE", "listen", "stop_listening", "was_given"]

NOTICE = signal.SIGUSR1

_given = False
_before: signal._HANDLER = signal.SIG_DFL


def listen() -> None:
    """From now on a notice is noted; a Python handler that is there already is called as well.

    A handler that is installed later wins, as always with signals: the notice is its own then. Outside the
    main thread, where Python allows no handlers, nothing happens.
    """
    global _before
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(NOTICE) is _note:
        return
    _before = signal.signal(NOTICE, _note)
    signal.siginterrupt(NOTICE, False)


def stop_listening() -> None:
    """Forgets a notice and puts the handler back that was there before (tests, notebooks)."""
    global _given
    _given = False
    # None: it was not installed from Python, and cannot be put back from there.
    if signal.getsignal(NOTICE) is _note and _before is not None:
        signal.signal(NOTICE, _before)


def was_given() -> bool:
    """Whether this process has got the notice."""
    return _given


def _note(number: int, frame: FrameType | None) -> None:
    global _given
    _given = True
    if callable(_before):
        _before(number, frame)
