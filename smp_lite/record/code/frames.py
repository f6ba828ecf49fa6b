"""Where the user's code is: the step function when it calls ``model.backward()``, a hook when it runs."""

from __future__ import annotations

import sys
import types

import torch

from .bytecode import names_after
from .watch import is_users_code

__all__ = ["Frame", "frames_of_the_step", "users_line"]

_OURS = __name__.partition(".")[0]


class Frame:
    """A function of the user's within a step function that has called ``model.backward()``.

    Attributes:
        later: names that its code mentions after ``model.backward()``, which may see what the backward has
            changed.
        later_variables: those of them that are local variables, and their values.
    """

    def __init__(self, frame: types.FrameType) -> None:
        self.code, self.namespace = frame.f_code, frame.f_globals
        variables = frame.f_locals
        self.later = names_after(frame.f_code, frame.f_lasti)
        self.later_variables = {
            # To hold a tensor would keep its data until the step ends.
            name: variables[name]
            for name in self.later & variables.keys()
            if not isinstance(variables[name], torch.Tensor)
        }


def frames_of_the_step() -> list[Frame]:
    """The user's frames between ``model.backward()``, which is running, and the library that called them."""
    found: list[Frame] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        first = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if is_users_code(frame.f_code, frame.f_globals):
            found.append(Frame(frame))
        elif found and first == _OURS:
            break
        frame = frame.f_back
    return found


def users_line() -> str:
    """``file:line`` of the innermost function of the user's that runs now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_code(frame.f_code, frame.f_globals):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
