"""Rules that look at more than one parameter, or at the number of processes.

Order and texts are those of the SageMaker SDK's ``validate_mp_config``. Rules are added where it
lets nonsense through: two different numbers of partitions, a negative ``default_partition``, a port
above the largest, and ``load_partition`` without a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from smp_lite.config.errors import ConfigError, complaint
from smp_lite.config.v1_parameters import LaterParameters

__all__ = ["SHAPES", "check_across_fields", "check_world_size"]

_LARGEST_PORT = 65535
_MOST_PIECES = 1 << 20  # more than any job has ranks; lists of that length are made

#: Pipelines that are made for several pieces on each partition -> the virtual_stages that they mean.
SHAPES: Mapping[str, int | str] = {"interleaved_virtual": 2, "zero_bubble_v": "v"}


def check_across_fields(config: LaterParameters) -> None:
    """Raises ConfigError for the first rule that ``config``, whose types are right, breaks."""
    if config.partitions != config.pipeline_parallel_degree:
        raise ConfigError(
            f"partitions={config.partitions} and pipeline_parallel_degree="
            f"{config.pipeline_parallel_degree} are two names of one parameter and must agree: "
            "leave one of them out"
        )
    _check_number_of_pieces(config)
    _check_partition_file(config)
    _check_default_partition(config)
    _check_virtual_stages(config)
    if not 0.0 <= config.memory_weight <= 1.0:
        _fail(
            "memory_weight must be between 0.0 and 1.0!",
            config,
            "memory_weight",
            "0.0 balances computation only, 1.0 memory only",
        )
    _check_data_parallel(config)
    if config.tensor_parallel_degree > 1 and not (config.ddp or config.horovod):
        _fail(
            "tensor_parallel_degree above 1 needs `ddp` to be set as well.",
            config,
            "tensor_parallel_degree",
            "add ddp=True, or write 1",
        )
    if config.fp16 and config.bf16:
        _fail(
            "'fp16' and 'bf16' cannot be simultaneously enabled.", config, "bf16", "leave one of the two out"
        )
    if config.fp16_params and config.tensor_parallel_degree > 1 and not config.fp16:
        _fail(
            "fp16_params with tensor parallelism needs 'fp16' to be set as well.",
            config,
            "fp16_params",
            "add fp16=True, which makes all parameters half-precision ones and keeps masters, or write False",
        )
    if config.sharded_data_parallel_degree > 1 and config.shard_optimizer_state:
        _fail(
            "sharded_data_parallel_degree above 1 and 'shard_optimizer_state' cannot be used together.",
            config,
            "shard_optimizer_state",
            "write False: sharded data parallelism has the optimizer's state in pieces anyway",
        )


def _check_number_of_pieces(config: LaterParameters) -> None:
    """Before anything is as long as there are partitions."""
    partitions, virtual_stages = config.partitions, config.virtual_stages
    if partitions > _MOST_PIECES:
        _fail(
            f"partitions (or pipeline_parallel_degree) is above {_MOST_PIECES}.",
            config,
            "partitions",
            "write one for each rank of a pipeline",
        )
    if isinstance(virtual_stages, int) and partitions * virtual_stages > _MOST_PIECES:
        _fail(
            f"virtual_stages x partitions is above {_MOST_PIECES}.",
            config,
            "virtual_stages",
            f"write how many pieces of the model each of the {partitions} partitions gets",
        )


def _check_partition_file(config: LaterParameters) -> None:
    if "partition_file" in config.model_fields_set and config.partition_file is None:
        _fail("'partition_file' must be a str.", config, "partition_file", "write a path")
    if config.load_partition and not config.partition_file:
        _fail(
            "load_partition needs 'partition_file' to be set as well.",
            config,
            "load_partition",
            "give the path of the stored decision, or leave load_partition out",
        )


def _check_default_partition(config: LaterParameters) -> None:
    if not config.auto_partition and "default_partition" not in config.model_fields_set:
        _fail(
            "default_partition must be supplied if auto_partition is set to False!",
            config,
            "auto_partition",
            "with default_partition=0, modules outside any smp.partition context go to partition 0",
        )
    way_out = f"write a number from 0 to {config.partitions - 1}"
    if config.default_partition < 0:
        _fail("default_partition must not be negative.", config, "default_partition", way_out)
    if config.default_partition >= config.partitions:
        _fail(
            "default_partition must be less than the number of partitions!",
            config,
            "default_partition",
            f"{way_out}, as partitions is {config.partitions}",
        )


def _check_virtual_stages(config: LaterParameters) -> None:
    if config.virtual_stages != 1 and not config.auto_partition:
        _fail(
            "virtual_stages is for auto_partition, which is False.",
            config,
            "virtual_stages",
            "leave it out: smp.partition and smp.set_partition may simply come to a partition again, as in "
            "0, 1, 0, 1 for four pieces",
        )
    if config.virtual_stages != 1 and not config.contiguous:
        _fail(
            "virtual_stages and contiguous=False are two ways to give a partition several pieces.",
            config,
            "virtual_stages",
            "leave one of them out",
        )
    decides = config.auto_partition and not config.load_partition and config.partitions > 1
    wanted = SHAPES.get(config.pipeline)
    if not decides or wanted is None:
        return
    fits = config.virtual_stages == wanted if wanted == "v" else config.virtual_stages != 1
    if not fits:
        has = "two pieces, there and back," if wanted == "v" else "several pieces"
        _fail(
            f"pipeline={config.pipeline!r} is for {has} on each partition.",
            config,
            "virtual_stages",
            f"leave it out, which means {wanted!r}, or use another pipeline",
        )


def _check_data_parallel(config: LaterParameters) -> None:
    given = config.model_fields_set
    for key in ("ddp_port", "ddp_dist_backend"):
        if key in given and "ddp" not in given:
            _fail(
                f"`{key}` needs `ddp` to be set as well.",
                config,
                key,
                f"add ddp=True, or leave {key} out",
            )
    port = config.ddp_port
    if "ddp_port" in given and (port is None or not 0 <= port <= _LARGEST_PORT):
        _fail(
            f"Invalid port number {port}.",
            config,
            "ddp_port",
            f"write an integer from 0 to {_LARGEST_PORT}, or leave it out",
        )
    if config.ddp and config.horovod:
        _fail(
            "'ddp' and 'horovod' cannot be simultaneously enabled.",
            config,
            "horovod",
            "leave one of the two out",
        )


def _fail(text: str, config: LaterParameters, key: str, way_out: str) -> None:
    raise ConfigError(complaint(text, key, getattr(config, key), way_out))


def check_world_size(config: LaterParameters, world_size: int) -> None:
    """Raises ConfigError unless ``world_size`` processes hold a whole number of model replicas.

    Args:
        config: the checked parameters.
        world_size: number of processes of the job.
    """
    partitions, tp = config.partitions, config.tensor_parallel_degree
    of_replica = partitions * tp
    keys, said = "partitions", f"partitions={partitions}"
    if tp > 1:
        keys, said = "partitions x tensor_parallel_degree", f"{said} x tensor_parallel_degree={tp}"
    if world_size < of_replica:
        smaller = f"set partitions to {world_size} or less" if tp == 1 else "choose smaller ones"
        raise ConfigError(
            f"fewer processes than {keys}: {world_size} < {said}; start "
            f"{of_replica} processes or a multiple of that, or {smaller}"
        )
    num_replicas, rest = divmod(world_size, of_replica)
    if rest:
        divide = f"let partitions divide {world_size}" if tp == 1 else f"choose ones that divide {world_size}"
        raise ConfigError(
            f"the number of processes is not a multiple of {keys}: {world_size} processes, "
            f"{said}; start {num_replicas * of_replica} or "
            f"{(num_replicas + 1) * of_replica} processes, or {divide}"
        )
    if num_replicas > 1 and not (config.ddp or config.horovod):
        raise ConfigError(
            f"{world_size} processes hold {num_replicas} replicas of {said}, but "
            f"data parallelism is off: set ddp: True, or start exactly {of_replica} processes"
        )
    sharded = config.sharded_data_parallel_degree
    if sharded > 1 and num_replicas % sharded:
        divisors = [str(d) for d in range(1, num_replicas + 1) if num_replicas % d == 0]
        raise ConfigError(
            f"sharded_data_parallel_degree={sharded} must divide dp_size, which is {num_replicas} "
            f"({world_size} processes, {said}): choose one of {', '.join(divisors)}, or start "
            f"{of_replica * sharded} processes or a multiple of that"
        )
