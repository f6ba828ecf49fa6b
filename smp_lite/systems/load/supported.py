"""What a plan may say that this version cannot run yet."""

from __future__ import annotations

import warnings

from ...errors import SMPError
from ..dialects.colossal_limits import refuse_unsupported as refuse_of_colossal
from ..plan.parallel_plan import ParallelPlan

__all__ = ["refuse_unsupported"]

_OF_THE_TRAINER = {
    "train.amp.enabled": "use torch.autocast in the step function, or smp's fp16 or bf16",
    "train.activation_checkpoint.enabled": "call smp.set_activation_checkpointing",
}


def refuse_unsupported(plan: ParallelPlan) -> None:
    """Raises SMPError, with the user's key, for what this version cannot run.

    What a system's own trainer would do, and the script has to do here, is a warning.
    """
    if plan.dialect == "colossal":
        refuse_of_colossal(plan)
    for key, value in plan.others:
        if plan.dialect == "libai" and key in _OF_THE_TRAINER and value is True:
            warnings.warn(
                f"{key}: True is done by LiBai's trainer, not here: {_OF_THE_TRAINER[key]}", stacklevel=3
            )
    for role in ("ep", "cp"):
        if plan.role_size(role) > 1:
            axis = plan.role_axes(role)[0]
            raise SMPError(f"{plan.said(f'axis.{axis}').text()}: the axis {axis!r} is not supported yet")
