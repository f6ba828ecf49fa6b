"""How the scale of an fp16 loss follows from overflows: a machine without tensors.

Gradients of a half-precision model are made from a loss times a scale, so that small ones do not vanish, and
divided by it again in fp32 (Micikevicius et al. 2018, "Mixed Precision Training"). A static scale stays. A
dynamic one falls by ``factor`` after an overflow and grows by it after ``window`` steps without one; with
``delayed_shift`` above 1 that many overflows are borne before it falls. The rules and their defaults are
those of Megatron-LM's and apex's scalers, which SMP's examples document.

A scale that has gone as low as it may, and still overflows step after step, trains nothing: after
:data:`MOST_AT_SMALLEST` such steps in a row that is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import SMPError

__all__ = ["ARGUMENTS", "MOST_AT_SMALLEST", "DynamicLossScaler", "LossScaler", "scaler_of"]

ARGUMENTS = frozenset(
    ["init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"]
)
"""Arguments of dynamic loss scaling, which may also stand for themselves."""

MOST_AT_SMALLEST = 100


class LossScaler:
    """A static scale.

    Args:
        scale: of the loss.

    Attributes:
        overflows_at_smallest: how many of the last updates, without another between, were overflows although
            the scale could not fall.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = _positive("static_loss_scale", scale)
        self.overflows_at_smallest = 0

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied by."""
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.cur_scale = _positive("loss_scale", value)

    @property
    def smallest(self) -> float:
        """As low as the scale may go."""
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """One step of the optimizer.

        Args:
            overflow: whether any gradient was not finite, so that the step was left out.

        Raises:
            SMPError: it is one of many overflows in a row at the smallest scale.
        """
        stuck = overflow and self.cur_scale <= self.smallest
        self.overflows_at_smallest = self.overflows_at_smallest + 1 if stuck else 0
        if self.overflows_at_smallest >= MOST_AT_SMALLEST:
            raise SMPError(
                f"fp16: gradients were not finite in {self.overflows_at_smallest} steps in a row at the "
                f"smallest loss scale, {self.cur_scale:g}, so nothing is trained any more: the loss or the "
                "activations have become infinite or NaN. Look for that (a learning rate that is too high, a "
                "division by zero), use bf16: True, or a smaller min_scale (static_loss_scale, if it is "
                "static)"
            )
        self._update(overflow)

    def _update(self, overflow: bool) -> None:
        """A static scale stays."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what another of the same kind has saved.

        Raises:
            ValueError: it is of the other kind.
        """
        if state.keys() != vars(self).keys():
            raise ValueError(
                f"optimizer.load_state_dict: the loss scaler was saved with {sorted(state)}, and this one "
                f"has {sorted(vars(self))}: one is static and the other dynamic. Give "
                "smp.DistributedOptimizer the dynamic_loss_scale that it was saved with"
            )
        vars(self).update(state)


class DynamicLossScaler(LossScaler):
    """A scale that seeks the highest value without overflows.

    Args:
        init_scale: to begin with.
        scale_factor: by which it falls and grows.
        scale_window: it grows after so many steps without an overflow.
        min_scale: it does not fall below.
        delayed_shift: how many overflows it takes to fall ("hysteresis").
        consecutive_hysteresis: whether a step without overflow makes up for those before it; else only growth
            does.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        super().__init__(_positive("init_scale", init_scale))
        self.scale_factor = _positive("scale_factor", scale_factor)
        if self.scale_factor <= 1:
            raise ValueError(f"dynamic_loss_args: scale_factor must be above 1, got {scale_factor!r}")
        self.scale_window = _count("scale_window", scale_window)
        self.min_scale = _positive("min_scale", min_scale)
        if self.min_scale > self.cur_scale:
            raise ValueError(
                f"dynamic_loss_args: min_scale={min_scale!r} is above init_scale={init_scale!r}: write a "
                "smaller one"
            )
        self.delayed_shift = _count("delayed_shift", delayed_shift)
        if not isinstance(consecutive_hysteresis, bool):
            raise ValueError(
                f"dynamic_loss_args: consecutive_hysteresis must be True or False, got "
                f"{consecutive_hysteresis!r}"
            )
        self.consecutive_hysteresis = consecutive_hysteresis
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = self.delayed_shift

    @property
    def smallest(self) -> float:
        """As low as the scale may go."""
        return self.min_scale

    def _update(self, overflow: bool) -> None:
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def scaler_of(
    static_loss_scale: float | None,
    dynamic_loss_scale: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
    more: Mapping[str, Any],
) -> LossScaler:
    """What the arguments of ``DistributedOptimizer`` ask for.

    Args:
        static_loss_scale: None: 1.
        dynamic_loss_scale: wins over the static one. Without it the arguments of a dynamic scale mean
            nothing; scripts give them all the same.
        dynamic_loss_args, more: of :class:`DynamicLossScaler`.

    Raises:
        TypeError: there is no such argument.
        ValueError: a value is wrong.
    """
    if not dynamic_loss_scale:
        return LossScaler(1.0 if static_loss_scale is None else static_loss_scale)
    given = dict(dynamic_loss_args or {})
    if unknown := given.keys() - ARGUMENTS:
        raise TypeError(
            f"smp.DistributedOptimizer: dynamic_loss_args has no {min(unknown)!r}; there are "
            f"{', '.join(sorted(ARGUMENTS))}"
        )
    if twice := given.keys() & more.keys():
        raise TypeError(
            f"smp.DistributedOptimizer: {min(twice)!r} is given in dynamic_loss_args and beside it: give "
            "it once"
        )
    return DynamicLossScaler(**given, **more)


def _positive(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def _count(name: str, value: Any) -> int:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(whole, int) or isinstance(whole, bool) or whole < 1:
        raise ValueError(f"dynamic_loss_args: {name} must be a whole number of 1 or more, got {value!r}")
    return whole
