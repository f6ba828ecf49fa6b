"""Which schedules a model's partition may run under, and with ``pipeline: auto`` which partition that is.

With ``auto`` the pieces of each stage are chosen before the first step, while every rank still has all
parameters: :mod:`smp_lite.plan.choosing.shape_choice` tries the shapes on the trace's costs. Where the
partition is given, only the schedules are compared. Rank 0 decides, prints the table and tells the others.
What the first steps then take decides once more, among the schedules of that shape
(:mod:`smp_lite.runtime.choosing`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ...deferred import has_deferred
from ...errors import SMPError
from ...plan.choosing.pieces import ModelCosts
from ...plan.choosing.shape_choice import (
    FLOPS,
    PARAMETERS,
    SECONDS,
    Candidate,
    ShapeChoice,
    Taken,
    candidate_of,
    choose_shape,
    shape_candidates,
)
from ...plan.partitioning.partition import Partition
from ...plan.partitioning.solver import solve_partition
from ...plan.step.work import Policy
from ...plan.units import human_bytes
from ...record.code.source_line import warn_once_at_user_line
from ...record.describe.tracing import ModuleTrace, cost_tree
from ...runtime.choosing import ScheduleChooser
from ...session import Session

__all__ = [
    "NothingFits",
    "Schedules",
    "decide_schedules",
    "first_policy",
    "measures_for_choice",
    "memory_limit_of",
    "model_costs",
    "optimizer_states",
    "schedule_chooser",
]


class NothingFits(SMPError):
    """Nothing fits into ``memory_limit``."""


@dataclass(frozen=True)
class Schedules:
    """What every rank knows of the choice.

    Args:
        taken: the best; None: there was nothing to compare.
        shown: everything that was tried, on the rank that decided.
    """

    taken: Taken
    shown: ShapeChoice | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """For other ranks: the simulated schedules stay here."""
        return {"taken": self.taken, "shown": None}


def model_costs(session: Session, module: nn.Module, trace: ModuleTrace | None) -> ModelCosts:
    """Of the trace: seconds, if it has them."""
    use_times = trace is not None and trace.measured
    states = optimizer_states(session.optimizer)
    is_simple = session.cfg.pipeline == "simple"

    def tree(microbatches: int, losses: int) -> Any:
        return cost_tree(
            module,
            trace,
            optimizer_states=states,
            microbatches_in_flight=microbatches,
            losses_in_flight=losses,
            use_times=use_times,
        )

    return ModelCosts(
        tree(_in_flight(session), session.cfg.microbatches if is_simple else 1), tree(1, 0), tree(0, 1)
    )


def decide_schedules(
    session: Session, costs: ModelCosts, trace: ModuleTrace | None, given: Partition | None, why_not: str
) -> tuple[Partition, Schedules | None]:
    """The partition, and the schedules to choose among; prints the table on rank 0.

    Args:
        costs: of :func:`model_costs`.
        trace: that they are from; None: parameters alone are known.
        given: a partition that is not to be made.
        why_not: there is no trace.

    Raises:
        TooFewModulesError: for the pieces that were asked for.
        NothingFits: ``memory_limit`` is too small.
    """
    config = session.cfg
    is_auto, limit = config.pipeline == "auto", memory_limit_of(session)
    assert config.memory_weight is not None
    chooses = given is None and config.chooses_pieces and trace is not None
    if given is None and not chooses:
        given = solve_partition(
            costs.balanced,
            session.num_stages,
            memory_weight=config.memory_weight,
            contiguous=config.contiguous,
            virtual_stages=config.virtual_stages,
        )
    if session.num_stages == 1 or not (is_auto or limit is not None):
        assert given is not None
        return given, None
    if limit is not None and trace is None:
        warn_once_at_user_line(
            f"memory_limit={limit}: activations are not counted, since {why_not}; only parameters, gradients "
            "and optimizer state are"
        )
    notes: list[str] = []
    if given is not None:
        candidates: list[Candidate] = [candidate_of(costs, given, () if is_auto else (config.pipeline,))]
    else:
        candidates, notes = shape_candidates(
            costs, session.num_stages, config.microbatches, memory_weight=config.memory_weight
        )
    if not candidates[0].graph.segments:
        return candidates[0].partition, None  # a model without parameters
    unit = PARAMETERS if trace is None else SECONDS if trace.measured else FLOPS
    policy = session.policy()
    choice = choose_shape(candidates, config.microbatches, policy, unit, memory_limit=limit, notes=notes)
    taken = choice.taken
    if taken is None:
        raise NothingFits(_nothing_fits_text(session, choice))
    if session.rank == 0 and is_auto:
        print(_table_text(session, choice, trace, why_not), flush=True)
    return taken.partition, Schedules(taken, choice)


def memory_limit_of(session: Session) -> int | None:
    """The bound that is kept; warns where there is one that nobody can look at."""
    limit = session.cfg.memory_limit
    if limit is None:
        return None
    if session.num_stages == 1:
        why_not = "with partitions=1 there is nothing to choose"
    elif session.cfg.pipeline == "_only_forward":
        why_not = "without backwards nothing is kept"
    elif session.shard_axes or session.cfg.shard_optimizer_state:
        why_not = "parameters or optimizer state lie in pieces on several ranks, which no estimate counts"
    else:
        return limit
    warn_once_at_user_line(f"memory_limit={limit} is not looked at: {why_not}")
    return None


def measures_for_choice(session: Session, module: nn.Module) -> bool:
    """Whether this rank runs the model for the times of its modules.

    Rank 0 alone does, so that the others do not slow it down; where several ranks share a stage, modules talk
    to each other, and operations are counted instead. So they are where nothing is to run (``smp-lite plan``)
    and while parameters have no memory.
    """
    return (
        session.cfg.chooses_pieces
        and session.rank == 0
        and session.on_planned is None
        and session.replica_size == session.num_stages
        and not session.has_own_batches
        and not has_deferred(module)
    )


def first_policy(session: Session, schedules: Schedules | None) -> Policy:
    """What the first step runs under."""
    policy = session.policy()
    if schedules is None or session.cfg.pipeline != "auto":
        return policy
    return replace(policy, pipeline=schedules.taken.pipeline)


def schedule_chooser(session: Session, schedules: Schedules | None) -> ScheduleChooser | None:
    """What chooses the schedule once steps have been seen; None: the configuration names one, one alone fits,
    or no step is to run."""
    if session.cfg.pipeline != "auto" or schedules is None or session.on_planned is not None:
        return None
    taken, limit = schedules.taken, memory_limit_of(session)
    if len(taken.pipelines) < 2:
        return None
    return ScheduleChooser(
        session.policy(),
        session.exchange_over_world,
        pipelines=taken.pipelines,
        memory=taken.memory if limit is not None else None,
        memory_limit=limit,
    )


def _table_text(session: Session, choice: ShapeChoice, trace: ModuleTrace | None, why_not: str) -> str:
    head = f"pipeline auto, by simulation of {choice.unit.origin}:"
    if trace is None and session.cfg.chooses_pieces:
        head = f"pipeline auto, one piece for each partition, since {why_not}; by {choice.unit.origin}:"
    text = f"{head}\n{choice.table()}"
    taken = choice.taken
    if taken is not None and len(taken.pipelines) == 1:
        text += f"\nof the schedules of that shape only {taken.pipeline} is within the bound: it stays"
    return text


def _nothing_fits_text(session: Session, choice: ShapeChoice) -> str:
    config = session.cfg
    limit = config.memory_limit
    assert limit is not None
    least = min(max(outcome.peaks) for outcome in choice.outcomes)
    return (
        f"memory_limit={limit} ({human_bytes(limit)}) is less than pipeline={config.pipeline!r} needs on a "
        f"rank, by estimate; {math.ceil(least)} would do. Raise it, or use more partitions, smaller "
        f"microbatches, or activation checkpointing:\n{choice.table()}"
    )


def _in_flight(session: Session) -> int:
    """Microbatches whose activations a stage holds at once."""
    if session.cfg.pipeline == "simple":
        return session.cfg.microbatches
    assert session.cfg.active_microbatches is not None
    return min(session.cfg.microbatches, session.cfg.active_microbatches, session.num_stages)


def optimizer_states(optimizer: Any) -> float:
    """Numbers kept for each parameter element: Adam's two moments, SGD's momentum; two if not known."""
    if optimizer is None:
        return 2.0
    inner = getattr(optimizer, "optimizer", optimizer)
    defaults = getattr(inner, "defaults", {})
    if "betas" in defaults:
        return 3.0 if defaults.get("amsgrad") else 2.0
    if "momentum" in defaults:
        return 1.0 if defaults["momentum"] else 0.0
    return 1.0
