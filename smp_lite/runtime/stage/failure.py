"""A step that fails on one rank fails on all, by the same error, and the next one works.

The plan is known to every rank. So a rank on which an action fails computes no more, but still makes all the
transfers that the others count on, with zeros where it has nothing; no message is left over that a later
step would take for its own, and no memory is freed before its transfer has ended. When their lists are done
the ranks tell each other how it went. If one has failed, nothing of the step stays: gradients are dropped,
and buffers are put back.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import SMPError
from ...plan.step.actions import Action

__all__ = ["Failure", "StepFailed", "error_like", "failure_kind", "step_failure"]


@dataclass
class Failure:
    """What went wrong on one stage.

    Attributes:
        stage_index: of the stage.
        action: during which it happened, such as ``1F2``.
        text: type and message of the error, with the line of the user's code.
        kind: the error's class, pickled; empty if it cannot be.
        held: what the stage had in memory, where there was too little of it.
        rank: world rank; -1 until it is known.
        time_ns: when, to tell the cause from its consequences.
    """

    stage_index: int
    action: str
    text: str
    kind: bytes
    held: str = ""
    rank: int = -1
    time_ns: int = field(default_factory=time.time_ns)

    @classmethod
    def of(cls, error: Exception, stage_index: int, action: Action, doing: str) -> Failure:
        """From the error that ended an action; ``doing`` names the command that ran."""
        kind = failure_kind(error)
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        during = f"{action}, {doing}" if doing else str(action)
        return cls(stage_index, during, f"{type(error).__name__}: {error}{place}", kind)


class StepFailed(SMPError):
    """An action of a step failed on some rank; also an instance of that error's own class."""


def step_failure(failures: Sequence[Failure], *, touched_gradients: bool) -> SMPError:
    """The error that all ranks raise: the earliest failure, and whether gradients are dropped.

    It is an instance of the class of the original error too, so that ``except torch.OutOfMemoryError`` works
    on every rank.
    """
    first = min(failures, key=lambda failure: failure.time_ns)
    where = (
        f"rank {first.rank} (stage {first.stage_index})" if first.rank >= 0 else f"stage {first.stage_index}"
    )
    gradients = "are None, those of earlier steps too," if touched_gradients else "are as before it,"
    text = (
        f"the step failed on {where} in action {first.action}: {first.text}. Nothing of the step has stayed: "
        f"gradients {gradients} and buffers are as before it. The next step can run"
    )
    return error_like(first.kind, f"{text}\n{first.held}" if first.held else text)


def failure_kind(error: BaseException) -> bytes:
    """The error's class, pickled; empty if it cannot be."""
    kind = type(error)
    if isinstance(error, StepFailed):
        kind = next((base for base in kind.__mro__[1:] if not issubclass(base, SMPError)), SMPError)
    try:
        return pickle.dumps(kind)
    except Exception:
        return b""


def error_like(pickled: bytes, text: str) -> SMPError:
    """An error of ours that is also an instance of the pickled class."""
    try:
        kind = pickle.loads(pickled) if pickled else SMPError
    except Exception:
        kind = SMPError
    if not issubclass(kind, SMPError) and kind is not RuntimeError:
        try:
            both = type("StepFailed", (StepFailed, kind), {"__module__": __name__, "__str__": _text})
            error: SMPError = both.__new__(both, text)
            error.args = (text,)
            return error
        except TypeError:  # their memory layouts do not go together
            pass
    elif kind is not SMPError and kind is not RuntimeError:
        try:
            return kind(text)
        except TypeError:
            pass
    return StepFailed(text)


def _text(error: BaseException) -> str:
    return str(error.args[0])
