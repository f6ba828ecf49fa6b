"""Loss scaling: all ranks skip a step, or none does.

torch's ``GradScaler`` looks for infinities in the gradients that an optimizer holds, which after partition
are those of one stage. Left alone, one stage would skip its step and lower its scale while the others go on.
So what is found is agreed on where it is found (``GradScaler._unscale_grads_``, through which ``step``,
``unscale_`` and optimizers that unscale by themselves all go), over all ranks: replicas hold the same
gradients, but a script may have changed them on one. It is replaced in torch's class while a session is open,
and does nothing for optimizers of other models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .errors import SMPError
from .optim.inner import torch_optimizer
from .optim.norms.whole_model import refuse_inside_step

if TYPE_CHECKING:
    from .session import Session

__all__ = ["GradScaler", "overflows_of_the_whole_model"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` over the whole model; use it like torch's, with the same arguments.

    ``model.backward(scaler.scale(loss))`` in the step function; after it ``scaler.unscale_(optimizer)`` if
    gradients are clipped, ``scaler.step(optimizer)`` and ``scaler.update()``, on every rank: the first of
    them is collective over all ranks. torch's own class does the same while a session is open.
    """


@contextlib.contextmanager
def overflows_of_the_whole_model(session: Session) -> Iterator[None]:
    """Within: a ``GradScaler`` finds the infinities of all stages of this session's model."""
    scaler_class = torch.amp.GradScaler
    original = scaler_class._unscale_grads_

    def _unscale_grads_(
        self: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if not _is_of_the_model(session, optimizer):
            return original(self, optimizer, inv_scale, found_inf, allow_fp16)
        if session.cfg.fp16:
            raise SMPError(
                "a GradScaler with fp16: True, where smp.DistributedOptimizer scales the loss itself "
                "(dynamic_loss_scale=True): leave the scaler out, and call model.backward(loss), "
                "optimizer.clip_master_grads() and optimizer.step()"
            )
        refuse_inside_step(session, "GradScaler.step() or unscale_()")
        _check_name(session, self, optimizer)
        found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        if session.world is None or session.world.size == 1:
            return found
        here = any(bool(value) for value in found.values()) if found else None
        heard = session.world.exchange(here, "WORLD", "GradScaler.step() or unscale_()")
        if all(value is None for value in heard):
            return found  # no gradients at all: torch has an error for that
        devices = list(found) or [found_inf.device]
        return {device: torch.full_like(found_inf, float(any(heard)), device=device) for device in devices}

    scaler_class._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign]
    try:
        yield
    finally:
        scaler_class._unscale_grads_ = original  # type: ignore[method-assign]


def _is_of_the_model(session: Session, optimizer: Any) -> bool:
    model = session.model
    if model is None or model.own_parameters is None:
        return False
    if any(optimizer is ours or ours.is_around(optimizer) for ours in session.optimizers):
        return True  # it may hold no parameters on this rank
    given = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return model.own_parameters.holds_any_of(given)  # type: ignore[no-any-return]


def _check_name(session: Session, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Raises SMPError where the scaler has unscaled these gradients, under another object's name: it knows an
    optimizer by the object that it is given, and a wrapped one is two."""
    for ours in session.optimizers:
        if optimizer is not ours and not ours.is_around(optimizer):
            continue
        names = (ours, ours.optimizer, torch_optimizer(ours.optimizer))
        others = [each for each in names if each is not optimizer]
        if any(scaler._per_optimizer_states.get(id(each), {}).get("found_inf_per_device") for each in others):
            raise SMPError(
                "GradScaler: one of unscale_() and step() was given the smp.DistributedOptimizer, and the "
                "other the optimizer inside it, so the same gradients would be divided by the scale twice: "
                "give both the smp.DistributedOptimizer"
            )
