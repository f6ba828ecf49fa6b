"""The ``parameters`` of SageMaker's model-parallel library, checked by :class:`smp_lite.config.Config`."""

from __future__ import annotations

from ...config import Config, ConfigError
from ...config.v1_parameters import PRIVATE_HINTS
from ...plan.partitioning.virtual_stages import piece_stages, runs_of
from ...plan.topology import Topology
from ..plan.parallel_plan import (
    DataParallel,
    Microbatches,
    ParallelPlan,
    Said,
    Schedule,
    ScheduleName,
    TensorMode,
)
from ..plan.stage_assignment import StageRule
from ..reading.written import Written, unknown_key

__all__ = ["SCHEDULES", "compile_plan", "partitioner_rule", "path_of"]

DIALECT = "sagemaker"
SCHEDULES: dict[str, ScheduleName] = {
    "interleaved": "1f1b",
    "simple": "gpipe",
    "zero_bubble": "zero_bubble",
    "interleaved_virtual": "virtual",
    "zero_bubble_v": "zero_bubble_v",
    "auto": "auto",
    "_only_forward": "forward",
}
#: Fields that the plan has a place for; the others are carried under their own names.
_PLANNED = frozenset(
    {
        "pipeline",
        "placement_strategy",
        "optimize",
        "microbatches",
        "partitions",
        "pipeline_parallel_degree",
        "active_microbatches",
        "auto_partition",
        "load_partition",
        "partition_file",
        "default_partition",
        "memory_weight",
        "virtual_stages",
        "horovod",
        "ddp",
        "tensor_parallel_degree",
    }
)


def path_of(key: str) -> tuple[str, ...]:
    """The path of a command-line key."""
    if key not in Config.model_fields and key not in PRIVATE_HINTS:
        raise ConfigError(unknown_key(key, key, Config.model_fields))
    return (key,)


def compile_plan(written: Written, world_size: int | None) -> ParallelPlan:
    """Returns the plan of the parameters.

    Args:
        written: the parameters.
        world_size: number of ranks; None: that of one replica, where ``ddp`` is off.

    Raises:
        ConfigError: a parameter is wrong, or the ranks hold no whole replicas.
    """
    config = Config.from_parameters(written.tree)
    pp, tp = config.partitions, config.tensor_parallel_degree
    with_data = config.ddp or config.horovod
    if world_size is None:
        if with_data:
            said = f"partitions={pp}" + (f" x tensor_parallel_degree={tp}" if tp > 1 else "")
            raise ConfigError(
                f"the number of ranks is not known: with ddp it may be any multiple of {said}; add "
                f"--world-size (world_size=), for example {2 * pp * tp}"
            )
        world_size = pp * tp
    config.check_world_size(world_size)
    named_pp = "partitions" if written.has("partitions") else "pipeline_parallel_degree"
    written.limit(world_size, "ranks", named_pp)
    topology = Topology.from_placement(world_size, pp, tp, config.placement_strategy)

    stages, said_stages = _stages(written, config, named_pp)
    policy = "ddp" if config.ddp else "horovod" if config.horovod else "none"
    others = tuple(
        (key, getattr(config, key))
        for key in type(config).model_fields
        if key in config.model_fields_set and key not in _PLANNED and written.has(key)
    )
    hints = config.hints_text()
    return ParallelPlan(
        dialect=DIALECT,
        topology=topology,
        stages=stages,
        microbatches=Microbatches(config.microbatches, "slice"),
        schedule=Schedule(
            "sequential" if pp == 1 else SCHEDULES[config.pipeline],
            max_in_flight=config.active_microbatches,
            strict=config.optimize == "memory",
        ),
        tensor=TensorMode("smp" if tp > 1 else None),
        data_parallel=DataParallel(policy),
        others=others,
        provenance=(
            ("axes", written.said("placement_strategy", how=config.placement_strategy)),
            ("axis.pp", written.said(named_pp)),
            ("axis.tp", written.said("tensor_parallel_degree")),
            ("axis.dp", _said_replicas(written, with_data, world_size, pp * tp)),
            ("placement", written.said("placement", how="rank by rank")),
            ("stages", said_stages),
            ("microbatches", written.said("microbatches")),
            ("schedule", written.said("pipeline", how=config.pipeline)),
            ("tensor", written.said("tensor_parallel_degree")),
            ("rules", written.said("rules", how="none")),
            ("data_parallel", written.said("horovod" if config.horovod else "ddp")),
            *((f"others.{key}", written.said(key)) for key, _ in others),
        ),
        warnings=tuple(written.warnings),
        notes=(hints,) if hints else (),
    )


def _said_replicas(written: Written, with_data: bool, world_size: int, replica: int) -> Said:
    if with_data:
        return written.said(
            "data_parallel", how=f"{world_size} ranks / {replica} of a replica", is_inferred=True
        )
    return written.said("data_parallel", how="ddp is off")


def _stages(written: Written, config: Config, named_pp: str) -> tuple[StageRule, Said]:
    owners = tuple(range(config.partitions))
    if config.load_partition:
        return (
            StageRule("file", owners, file=config.partition_file, key=named_pp),
            written.said("partition_file"),
        )
    if not config.auto_partition:
        rule = StageRule("contexts", owners, default_stage=config.default_partition, key=named_pp)
        return rule, written.said("auto_partition")
    rule = partitioner_rule(config, named_pp)
    if rule.num_chunks == 1:
        return rule, written.said("auto_partition")
    return rule, written.said("virtual_stages" if written.has("virtual_stages") else "pipeline")


def partitioner_rule(config: Config, key: str) -> StageRule:
    """The stages of ``auto_partition``, with the pieces of each one by one."""
    pieces = piece_stages(config.partitions, config.virtual_stages)
    if len(runs_of(pieces)) == config.partitions:
        pieces = tuple(range(config.partitions))
    num_chunks = len(pieces) // config.partitions
    key = key if num_chunks == 1 else f"{key} and virtual_stages"
    return StageRule("partitioner", pieces, num_chunks, memory_weight=config.memory_weight, key=key)
