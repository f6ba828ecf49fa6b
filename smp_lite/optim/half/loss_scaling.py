"""Loss scaling of one fp16 job: which scale the gradients at hand were made with, and whether they
overflowed.

The scale may change between a backward and the step of the optimizer, so gradients are divided by the scale
that they were made with, and gradients of two scales do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import SMPError
from .loss_scaler import LossScaler

__all__ = ["LossScaling"]


class LossScaling:
    """Of one optimizer.

    Args:
        scaler: decides the scale.
        dynamic: whether it changes by itself.
        have_gradients: whether any parameter here has a gradient that is not zero.

    Attributes:
        overflow: whether the last step was left out since a gradient was not finite.
    """

    def __init__(self, scaler: LossScaler, dynamic: bool, have_gradients: Callable[[], bool]) -> None:
        self.scaler, self.dynamic, self.overflow = scaler, dynamic, False
        self._have_gradients = have_gradients
        self._of_gradients: float | None = None
        self._other_scale: float | None = None  # of gradients that are there when a step begins

    @property
    def scale(self) -> float:
        """By which a backward that starts now multiplies its loss."""
        return self.scaler.loss_scale

    @property
    def scale_of_gradients(self) -> float:
        """By which the gradients at hand were multiplied."""
        return self.scale if self._of_gradients is None else self._of_gradients

    def begin(self) -> None:
        """A step function begins, or a backward outside of one: looks which gradients are there."""
        others = self._of_gradients not in (None, self.scale) and self._have_gradients()
        self._other_scale = self._of_gradients if others else None

    def before_backward(self) -> None:
        """A backward starts, with the scale of now.

        Raises:
            SMPError: it would add to gradients that were made with another one.
        """
        if self._other_scale is not None:
            raise SMPError(
                f"fp16: the gradients at hand were made with a loss scale of {self._other_scale:g}, and this "
                f"backward would add some of {self.scale:g} to them: call optimizer.zero_grad() after "
                "optimizer.step(), and set optimizer.loss_scale before the first backward"
            )
        self._of_gradients = self.scale

    def update(self, overflow: bool) -> None:
        """One step of the optimizer; raises SMPError where the scale can fall no further."""
        self.overflow = overflow
        self.scaler.update_scale(overflow)

    def state_dict(self) -> dict[str, Any]:
        """Under the names of SMP's files."""
        return {
            "loss_scaler": self.scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what was saved; raises ValueError if it is of another kind of scale."""
        self.scaler.load_state_dict(state["loss_scaler"])
        self.overflow = bool(state["overflow"])
