"""What a plan may say that this version cannot run yet."""

from __future__ import annotations

from ..errors import SMPError
from .parallel_plan import ParallelPlan

__all__ = ["refuse_unsupported"]


def refuse_unsupported(plan: ParallelPlan) -> None:
    """Raises SMPError, with the user's key, for what this version cannot run."""
    policy = plan.data_parallel.policy
    axes = dict(plan.topology.axes)
    over = axes["fsdp"] if policy == "fsdp" and "fsdp" in axes else plan.dp_size
    if over > 1 and policy not in ("none", "ddp", "horovod", "handlers"):
        raise SMPError(
            f"{plan.said('data_parallel').text()}: {policy} over {over} ranks is not supported yet: "
            "parameters and optimizer state are whole on each replica"
        )
    for role in ("ep", "cp"):
        if plan.role_size(role) > 1:
            axis = plan.role_axes(role)[0]
            raise SMPError(f"{plan.said(f'axis.{axis}').text()}: the axis {axis!r} is not supported yet")
    if plan.tp_size > 1 and plan.tensor.mode == "sequence":
        raise SMPError(f"{plan.said('tensor').text()}: mode 'sequence' is not supported yet")
