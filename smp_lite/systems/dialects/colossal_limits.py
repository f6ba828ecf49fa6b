"""What a configuration of Colossal-AI may say beside ``parallel`` that cannot be run as it says."""

from __future__ import annotations

from ...errors import SMPError
from ..plan.parallel_plan import ParallelPlan

__all__ = ["refuse_unsupported"]

_DATA = "DataParallelGradientHandler"
_SEQUENCE = "SequenceParallelGradientHandler"
_HANDLERS = (_DATA, "PipelineSharedModuleGradientHandler", _SEQUENCE)
"""What these ask for is always done: each gradient is reduced over all ranks that have a share of it."""


def refuse_unsupported(plan: ParallelPlan) -> None:
    """Raises SMPError, with the user's key."""
    _check_handlers(plan)
    for key, value in plan.others:
        if key.partition(".")[0] == "fp16" and value:
            raise SMPError(
                f"{key}={value!r}: mixed precision of Colossal-AI is not supported: leave fp16 out"
            )
        if key == "gradient_accumulation" and value not in (None, 1):
            raise SMPError(
                f"{key}={value!r} is not supported: leave it out, and call engine.zero_grad() and "
                "engine.step() once in so many steps"
            )


def _check_handlers(plan: ParallelPlan) -> None:
    named = plan.data_parallel.handlers
    if plan.data_parallel.policy != "handlers":
        return
    for name in named:
        if name not in _HANDLERS:
            raise SMPError(
                f"gradient_handler: {name} is not supported. Gradients are reduced over all ranks that have "
                f"a share of them; the handlers that ask for that are {', '.join(_HANDLERS)}"
            )
    covers = _DATA in named or (plan.tensor.mode == "sequence" and _SEQUENCE in named)
    if plan.dp_size > 1 and not covers:
        raise SMPError(
            f"gradient_handler names {', '.join(named) or 'no handler'}, so nothing would reduce gradients "
            f"over the {plan.dp_size} replicas, which would drift apart: add dict(type={_DATA!r}), or leave "
            "gradient_handler out"
        )
