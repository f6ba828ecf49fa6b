"""In which order each stage runs its forwards, backwards and ``W``: a pure function.

:func:`greedy_order` replays the stages as machines in simulated time. Whenever a stage is free it takes
the best of the segments that are ready; what "best" means is the policy.

- ``simple``: every forward, then every backward (GPipe, Huang et al. 2019).
- ``interleaved``: a ready backward beats any forward. Where the microbatch's graph is a chain of stages
  and ``optimize`` is ``memory``, the result is 1F1B (PipeDream, Narayanan et al. 2019).
- ``zero_bubble`` (ZB-H1), ``interleaved_virtual`` (Megatron-LM), ``zero_bubble_v`` (ZB-V): the same, and with
  the two of zero bubble ``W`` (gradients of parameters) run when nothing else can.
- ``_only_forward``: evaluation; a backward is an error.

:func:`compute_order` has better ones for the last three, and for ``interleaved`` where stages are visited
again, if all microbatches are alike and nothing of them has run: see :mod:`.candidates`, which also says
how it counts what is in flight. For what it leaves to the machines:

How many microbatches may be in flight (started on a stage, their backward there not yet done):

- ``optimize="memory"``: as many as a full pipeline needs: the number of segments between the stage's
  first one and the end of the forward pass. On a chain of S stages that is S - stage_index.
- ``optimize="speed"``: a microbatch may start while earlier ones are still about, up to
  ``active_microbatches``.
- In both cases never more than ``active_microbatches`` in the whole pipeline.

The oldest unfinished microbatch is exempt from every bound, so a schedule always exists. Runs of the same
visit of a stage go by microbatch, in every policy: gradients and buffers then see the microbatches in the
same order, and the result does not depend on the schedule to the bit. Where microbatches took different
branches a module may be in other visits of each, and where several visits change the same state (running
statistics of a module that is called twice) their order counts: there all runs of a stage go by microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..collecting import without_gc
from ..step.actions import Action
from ..step.work import BACKWARD_COST_RATIO, PIPELINES, Costs, Policy, Work
from .candidates import chosen_order
from .stage_machines import run_machines
from .task_table import TaskTable, forward_depth

__all__ = [
    "BACKWARD_COST_RATIO",
    "PIPELINES",
    "Policy",
    "Work",
    "compute_order",
    "forward_depth",
    "greedy_order",
]


@without_gc()
def compute_order(
    works: Sequence[Work], policy: Policy, *, costs: Costs | None = None, latency: float = 0.0
) -> list[Action]:
    """Orders all pending forwards and backwards, and ``W`` where the policy splits backwards.

    Args:
        works: microbatches, or what is left of them.
        policy: how.
        costs: as measured; None: the recorded ones, a backward twice the forward.
        latency: of a message, in the unit of the costs: counts in the choice among several orders.

    Returns:
        These actions of all stages in order of their simulated start; the entries of one
        stage, in this order, are that stage's list.

    Raises:
        ValueError: ``_only_forward`` was asked for and a microbatch has a backward.
    """
    if not any(work.graph.segments for work in works):
        return []  # a step that does not use the model, or has not yet
    chosen = chosen_order(works, policy, costs, latency)
    return greedy_order(works, policy, costs=costs) if chosen is None else chosen


@without_gc()
def greedy_order(works: Sequence[Work], policy: Policy, *, costs: Costs | None = None) -> list[Action]:
    """What the machines of :mod:`.stage_machines` make of it; the same as :func:`compute_order` otherwise."""
    table = TaskTable(works, splits=policy.splits_backward, costs=costs)
    if policy.pipeline == "_only_forward" and table.num_backwards:
        raise ValueError(
            "pipeline is '_only_forward', but the step calls model.backward(): "
            "remove the call, or set pipeline to 'interleaved' or 'simple'"
        )
    return table.actions(run_machines(table, policy))
