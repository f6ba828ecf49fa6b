"""Rules about values, about several parameters, and about the number of processes."""

from __future__ import annotations

from typing import Any

import pytest

from smp_lite.config import Config, ConfigError


@pytest.mark.parametrize(
    ("parameters", "start"),
    [
        ({"partition_file": 3}, "'partition_file' must be a str. Got partition_file=3 (int)"),
        ({"partition_file": None}, "'partition_file' must be a str."),
        (
            {"virtual_stages": 0},
            "virtual_stages must be a positive integer or 'v'. Got virtual_stages=0",
        ),
        ({"virtual_stages": "V"}, "virtual_stages must be a positive integer or 'v'."),
        ({"virtual_stages": True}, "virtual_stages must be a positive integer or 'v'."),
        (
            {"virtual_stages": 2, "auto_partition": False, "default_partition": 0},
            "virtual_stages is for auto_partition, which is False.",
        ),
        (
            {"virtual_stages": "v", "contiguous": False},
            "virtual_stages and contiguous=False are two ways to give a partition several pieces.",
        ),
        (
            {"virtual_stages": 1, "pipeline": "interleaved_virtual"},
            "pipeline='interleaved_virtual' is for several pieces on each partition. Got virtual_stages=1",
        ),
        (
            {"virtual_stages": 2, "pipeline": "zero_bubble_v"},
            "pipeline='zero_bubble_v' is for two pieces, there and back, on each partition.",
        ),
        ({"load_partition": True}, "load_partition needs 'partition_file' to be set as well."),
        (
            {"load_partition": True, "partition_file": ""},
            "load_partition needs 'partition_file' to be set as well.",
        ),
        (
            {"auto_partition": False},
            "default_partition must be supplied if auto_partition is set to False!",
        ),
        (
            {"default_partition": 2},
            "default_partition must be less than the number of partitions!",
        ),
        ({"default_partition": -1}, "default_partition must not be negative. Got default_pa"),
        ({"default_partition": "0"}, "default_partition must be an integer. Got default_par"),
        ({"default_partition": True}, "default_partition must be an integer."),
        ({"memory_weight": 1.5}, "memory_weight must be between 0.0 and 1.0! Got memory_weigh"),
        ({"memory_weight": -0.1}, "memory_weight must be between 0.0 and 1.0!"),
        ({"memory_weight": float("nan")}, "memory_weight must be between 0.0 and 1.0!"),
        ({"memory_weight": "0.5"}, "memory_weight must be between 0.0 and 1.0! Got memory_weigh"),
        ({"memory_weight": True}, "memory_weight must be between 0.0 and 1.0!"),
        ({"ddp_port": 1}, "`ddp_port` needs `ddp` to be set as well. Got ddp_port=1 (int)"),
        ({"ddp_dist_backend": "nccl"}, "`ddp_dist_backend` needs `ddp` to be set as well."),
        ({"ddp": True, "ddp_port": -1}, "Invalid port number -1. Got ddp_port=-1 (int)"),
        ({"ddp": True, "ddp_port": 65536}, "Invalid port number 65536."),
        ({"ddp": True, "ddp_port": "80"}, "Invalid port number 80. Got ddp_port='80' (str)"),
        ({"ddp": True, "ddp_port": True}, "Invalid port number True."),
        ({"ddp": True, "ddp_port": None}, "Invalid port number None."),
        (
            {"ddp": True, "horovod": True},
            "'ddp' and 'horovod' cannot be simultaneously enabled.",
        ),
        (
            {"partitions": 10**12},
            "partitions (or pipeline_parallel_degree) is above 1048576. Got partitions=1000000000000 (int)",
        ),
        (
            {"virtual_stages": 10**12},
            "virtual_stages x partitions is above 1048576. Got virtual_stages=1000000000000 (int)",
        ),
        (
            {"pipeline_parallel_degree": 3},
            "partitions=2 and pipeline_parallel_degree=3 are two names of one parameter",
        ),
    ],
)
def test_failures(parameters: dict[str, Any], start: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_parameters({"partitions": 2, **parameters})

    assert str(error.value).startswith(start)


@pytest.mark.parametrize("world_size", [1, 3])
def test_fewer_processes_than_partitions(world_size: int) -> None:
    with pytest.raises(ConfigError) as error:
        Config(partitions=4, ddp=True).check_world_size(world_size)

    assert f"fewer processes than partitions: {world_size} < partitions=4" in str(error.value)
    assert "start 4 processes" in str(error.value)


@pytest.mark.parametrize("ddp", [True, False])
def test_a_number_of_processes_that_is_not_a_multiple(ddp: bool) -> None:
    with pytest.raises(ConfigError) as error:
        Config(partitions=4, ddp=ddp).check_world_size(6)

    assert "not a multiple of partitions: 6 processes, partitions=4" in str(error.value)
    assert "start 4 or 8 processes" in str(error.value)


def test_replicas_need_a_kind_of_data_parallelism() -> None:
    with pytest.raises(ConfigError, match=r"4 processes hold 2 replicas .* set ddp: True"):
        Config(partitions=2).check_world_size(4)

    Config(partitions=2).check_world_size(2)
    Config(partitions=2, ddp=True).check_world_size(4)
    Config(partitions=2, ddp=True).check_world_size(2)
    Config(partitions=2, horovod=True).check_world_size(6)
