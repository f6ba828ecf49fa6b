"""Collectives of ``torch.distributed`` that a step function calls on values of a stage.

The ranks of that stage run the call later, in the order in which it is recorded. So nobody can wait for it
where it stands: one that is asked not to block (``async_op=True``) blocks when it runs, and what it returns
has ended. And ranks of other stages never come to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from ...errors import SMPError

__all__ = ["EndedWork", "as_it_runs", "is_collective"]

_MODULE = "torch.distributed.distributed_c10d"


class EndedWork:
    """What ``async_op=True`` returns inside a step, in the place of a ``torch.distributed.Work``."""

    def wait(self, timeout: Any = None) -> bool:
        """True, at once."""
        return True

    def is_completed(self) -> bool:
        """True: what comes after it in the step comes after it when it runs."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def get_future(self) -> Any:
        """A future that has ended.

        Raises:
            SMPError: always: what is called when it ends would be called too early.
        """
        raise SMPError(
            "get_future() of a collective inside an smp.step: it runs later, on the ranks of one stage; "
            "write what comes after it on the next line"
        )


def is_collective(func: Callable[..., Any]) -> bool:
    """Whether it is a function of torch.distributed."""
    return getattr(func, "__module__", None) == _MODULE


def as_it_runs(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stage: int,
    ranks: Collection[int],
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments with which it is recorded, and whether its result was to be waited for.

    Args:
        func: what is called, of torch.distributed.
        stage: of the values.
        ranks: that hold the stage; empty: not known.

    Raises:
        SMPError: it is over other ranks too, or leaves something to wait for whatever it is told.
    """
    name = getattr(func, "__name__", "a collective")
    bound = inspect.signature(func).bind(*args, **kwargs)
    if "async_op" not in inspect.signature(func).parameters:
        raise SMPError(
            f"torch.distributed.{name}() inside an smp.step on a value of stage {stage}: only collectives "
            "that can block are run there. Call it on a result when the step has returned"
        )
    if coalescing := dist.distributed_c10d._world.pg_coalesce_state:
        coalescing.clear()  # an error goes through the manager without ending it
        raise SMPError(
            f"torch.distributed.{name}() inside an smp.step on a value of stage {stage}, in a coalescing "
            "manager, which would run it where it ends, before there is a value: call it outside"
        )
    group = bound.arguments.get("group")
    # Ranks of other stages hold other groups (smp.get_dp_process_group()), and do not run it.
    if ranks and dist.is_initialized() and (group is None or dist.get_rank() in ranks):
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        if others := sorted(set(members) - set(ranks)):
            raise SMPError(
                f"torch.distributed.{name}() over the ranks {sorted(members)} inside an smp.step, on a value "
                f"of stage {stage}: only the ranks of that stage, {sorted(ranks)}, run it, and would wait "
                f"for {others}. Pass group=smp.get_dp_process_group(), or call it on a result when the step "
                "has returned"
            )
    was_async = bool(bound.arguments.get("async_op", False))
    if was_async:
        bound.arguments["async_op"] = False
    return bound.args, dict(bound.kwargs), was_async
