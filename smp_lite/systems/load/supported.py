"""What a plan may say that this version cannot run yet."""

from __future__ import annotations

from ...errors import SMPError
from ..dialects.colossal_limits import refuse_unsupported as refuse_of_colossal
from ..plan.parallel_plan import ParallelPlan

__all__ = ["refuse_unsupported"]


def refuse_unsupported(plan: ParallelPlan) -> None:
    """Raises SMPError, with the user's key, for what this version cannot run."""
    if plan.dialect == "colossal":
        refuse_of_colossal(plan)
    for role in ("ep", "cp"):
        if plan.role_size(role) > 1:
            axis = plan.role_axes(role)[0]
            raise SMPError(f"{plan.said(f'axis.{axis}').text()}: the axis {axis!r} is not supported yet")
