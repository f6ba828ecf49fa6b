"""Deciding the partition of a model: from contexts, from a stored file, or by the solver.

The decision is made on rank 0's costs and sent to its peers and to the other replicas, so measured times,
which differ from process to process, cannot make them disagree.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from ...comm.groups.peers import Peers
from ...errors import SMPError
from ...plan.partitioning.partition import ModuleCost, Partition, manual_partition
from ...plan.partitioning.report import format_partition_table, partition_warnings, stage_summaries
from ...plan.partitioning.solver import TooFewModulesError
from ...plan.partitioning.tree import stage_visits
from ...plan.partitioning.virtual_stages import piece_stages, runs_of
from ...record.code.source_line import warn_once_at_user_line
from ...record.describe.effects import NeedsOpening
from ...record.describe.metadata import MetadataInference
from ...record.describe.module_times import measured_trace
from ...record.describe.tracing import ModuleTrace, cost_tree, trace_model
from ...session import Session
from .schedules import NothingFits, Schedules, decide_schedules, measures_for_choice, model_costs


def decide_partition(
    session: Session,
    module: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None,
    peers: Peers,
    *,
    measure_times: bool,
    stored: Partition | None = None,
) -> tuple[Partition, ModuleCost, Schedules | None]:
    """The partition, the costs that it was made from, and what schedules may be taken for it.

    Args:
        session: configuration and ``smp.partition`` assignments.
        module: the user's model, whole.
        example: (args, kwargs) of one call on one microbatch; None: partition by parameters alone.
        peers: the mp group.
        measure_times: balance measured seconds instead of flops.
        stored: a decision that was made before; it is used as it is.

    Raises:
        SMPError: there are too few modules, or nothing fits into ``memory_limit``; on all ranks.
    """
    config = session.cfg
    trace, why_not = None, "skip_tracing is set"
    if example is not None and not config.skip_tracing and session.num_stages > 1:
        session.is_tracing = True
        try:
            trace = _trace(session, module, example, measure_times=measure_times)
        except NeedsOpening as reason:
            why_not = f"the model cannot be traced: its code {reason}"
            warn_once_at_user_line(
                f"the model cannot be traced before the first step, since its code {reason}: it is "
                "partitioned by its parameters alone, as with skip_tracing"
            )
        finally:
            session.is_tracing = False
    costs = model_costs(session, module, trace)
    decided: tuple[Partition, Schedules | None] | str | None = None
    given = stored
    if given is None and config.load_partition:
        assert config.partition_file is not None
        given = load_partition(session, module, config.partition_file)
    elif given is None and not config.auto_partition:
        given = _manual(session, module, costs.balanced)
    if 0 in peers.stages:
        try:
            decided = decide_schedules(session, costs, trace, given, why_not)
        except (TooFewModulesError, NothingFits) as error:
            decided = str(error)
    decided = peers.share_object(decided, 0, "the partition")
    if session.world is not None and len(session.group("DP")) > 1:
        # Replicas must cut alike, or they would average gradients of different parameters.
        said = decided if session.world.group_rank("DP") == 0 else None
        decided = session.world.exchange(said, "DP", "the partition of the replicas")[0]
    if isinstance(decided, str):
        raise SMPError(decided)
    assert decided is not None
    partition, schedules = decided
    if session.rank == 0:
        is_stored = stored is not None or config.load_partition
        _warn_of_pieces(session, partition, costs.balanced, is_stored=is_stored)
    if config.partition_file and not config.load_partition and session.rank == 0:
        try:
            Path(config.partition_file).write_text(partition.to_json())
        except OSError as error:
            raise SMPError(f"partition_file={config.partition_file!r} cannot be written: {error}") from error
    return partition, costs.balanced, schedules


def _trace(
    session: Session,
    module: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    measure_times: bool,
) -> ModuleTrace:
    """With times where they are asked for, or where pieces are to be chosen by rank 0's."""
    inference = MetadataInference()
    if measure_times or not measures_for_choice(session, module):
        return trace_model(module, *example, inference, measure_times=measure_times)
    try:
        return measured_trace(module, *example, inference)
    except Exception:
        # What a real run says of the model, the recording of the step says too, on all ranks.
        return trace_model(module, *example, inference)


def report_partition(session: Session, partition: Partition, costs: ModuleCost) -> str:
    """The table; warns of an empty or a much too large stage."""
    summaries = stage_summaries(costs, partition)
    assert session.cfg.memory_weight is not None
    for text in partition_warnings(summaries, session.cfg.memory_weight):
        warn_once_at_user_line(text)
    return format_partition_table(summaries)


def load_partition(session: Session, module: nn.Module, path: str | os.PathLike[str]) -> Partition:
    """A stored partition, checked against the model.

    Raises:
        SMPError: the file cannot be read or is for another number of partitions.
        ValueError: it names other modules than the model has.
    """
    try:
        partition = Partition.from_json(Path(path).read_text())
    except OSError as error:
        raise SMPError(f"the partition file {os.fspath(path)!r} cannot be read: {error}") from error
    if partition.num_stages != session.num_stages:
        raise SMPError(
            f"the partition file {os.fspath(path)!r} holds {partition.num_stages} partitions, but "
            f"partitions={session.num_stages}: use as many, or partition anew"
        )
    partition.check(cost_tree(module, None, optimizer_states=0, microbatches_in_flight=1))
    return partition


def _warn_of_pieces(session: Session, partition: Partition, costs: ModuleCost, *, is_stored: bool) -> None:
    """Where another number of pieces was asked for than there is, or than the pipeline is made for."""
    asked, pipeline = session.cfg.virtual_stages, session.cfg.pipeline
    if session.num_stages == 1:
        if asked != 1:
            warn_once_at_user_line(f"virtual_stages={asked!r} changes nothing: partitions=1 cuts nothing")
        return
    visits = stage_visits(costs, partition.stage_of)
    in_order = f"the line of modules comes to the stages in the order {' '.join(map(str, visits))}"
    is_round = len(visits) > len(set(visits))
    is_v = visits == tuple(stage for stage, _ in runs_of(piece_stages(session.num_stages, "v")))
    if (pipeline == "interleaved_virtual" and not is_round) or (pipeline == "zero_bubble_v" and not is_v):
        wanted = "two pieces, there and back," if pipeline == "zero_bubble_v" else "several pieces"
        warn_once_at_user_line(
            f"pipeline={pipeline!r} is for {wanted} on each stage, and here {in_order}: a step is ordered as "
            "well as that allows. Place modules so, leave it to auto_partition, or use another pipeline"
        )
    if asked != 1 and is_stored and len(visits) < len(runs_of(piece_stages(session.num_stages, asked))):
        warn_once_at_user_line(
            f"virtual_stages={asked!r} was not applied: the partition is a stored one, used as it is, and "
            f"{in_order}. To have the model cut anew, leave load_partition out, or resume from a checkpoint "
            "that was saved with partial=False"
        )


def _manual(session: Session, module: nn.Module, costs: ModuleCost) -> Partition:
    names = {id(part): name for name, part in module.named_modules()}
    assigned = {names[key]: stage for key, (_, stage) in session.assigned_stages.items() if key in names}
    assert session.cfg.default_partition is not None
    return manual_partition(
        costs, session.num_stages, assigned=assigned, default=session.cfg.default_partition
    )
