"""No distribution may pass here and fail in the container: hundreds of them, broken in all ways at once."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.config import Config, ConfigError
from smp_lite.entrypoints.container.environment import container_environment, script_arguments
from smp_lite.entrypoints.container.job import Job
from smp_lite.entrypoints.mpi.launch_plan import plan_job
from smp_lite.estimator.request.distribution import CheckedDistribution, check_distribution

NUM_EXAMPLES = 500


@st.composite
def good_distributions(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A distribution and a number of hosts that fit together."""
    partitions = draw(st.integers(1, 4))
    replicas = draw(st.integers(1, 3))
    num_hosts = draw(st.sampled_from([n for n in (1, 2, 3) if partitions * replicas % n == 0]))
    parameters: dict[str, Any] = {
        draw(st.sampled_from(["partitions", "pipeline_parallel_degree"])): partitions,
        "ddp": replicas > 1 or draw(st.booleans()),
    }
    optional = st.fixed_dictionaries(
        {},
        optional={
            "microbatches": st.integers(1, 8),
            "pipeline": st.sampled_from(["simple", "interleaved", "_only_forward"]),
            "optimize": st.sampled_from(["speed", "memory"]),
            "placement_strategy": st.sampled_from(["spread", "cluster", "DPT", "PDT"]),
            "memory_weight": st.floats(0, 1),
            "default_partition": st.integers(0, partitions - 1),
            "active_microbatches": st.integers(1, 8),
            "fp16": st.just(False),
        },
    )
    mpi: dict[str, Any] = {"enabled": True, "processes_per_host": partitions * replicas // num_hosts}
    if draw(st.booleans()):
        mpi["custom_mpi_options"] = draw(st.sampled_from(GOOD_OPTIONS))
    modelparallel = {"enabled": True, "parameters": parameters | draw(optional)}
    return {"smdistributed": {"modelparallel": modelparallel}, "mpi": mpi}, num_hosts


GOOD_OPTIONS = [
    "",
    "--mca btl_vader_single_copy_mechanism none ",
    "-x NCCL_DEBUG=WARN",
    "--mca pml ob1 -verbose",
]
BAD_OPTIONS = [
    "-np 7",
    "--app x",
    "evil.sh",
    "--mca btl",
    "'",
    "-x",
    "--hostfile h",
    "$(reboot)",
    "-x A=1 -x A=2",
]
ODD_VALUES = st.one_of(
    st.sampled_from([True, False, None, 0, 1, -1, 1.0, 2, 3, 5, 10**9, math.nan, math.inf, "", "yes", "2"]),
    st.sampled_from([[], {}, (1,), {1}, b"2", [2], {"enabled": True}, object()]),
    st.sampled_from(BAD_OPTIONS),
    st.text(max_size=8),
)


def containers(value: Any) -> Iterator[dict[Any, Any]]:
    """The dictionary and those within it."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from containers(inner)


def spoil(draw: st.DrawFn, distribution: dict[str, Any]) -> None:
    """One change anywhere, which may well be harmless."""
    blocks = [block for block in containers(distribution) if block]
    if not blocks:
        return
    block = draw(st.sampled_from(blocks))
    key = draw(st.sampled_from(sorted(block, key=repr)))
    change = draw(st.sampled_from(["drop", "misspell", "retype", "stray", "swap", "add"]))
    if change == "drop":
        del block[key]
    elif change == "misspell":
        block[draw(st.sampled_from(misspellings(str(key))))] = block.pop(key)
    elif change == "retype":
        block[key] = draw(ODD_VALUES)
    elif change == "stray" and isinstance(block[key], int):
        block[key] = block[key] + draw(st.integers(-5, 5))
    elif change == "swap":
        other = draw(st.sampled_from(sorted(block, key=repr)))
        block[key], block[other] = block[other], block[key]
    elif change == "add":
        name = draw(
            st.sampled_from(["torch_distributed", "custom_mpi_options", "parameters", "horovod", "bf16"])
        )
        block[name] = draw(ODD_VALUES)


def misspellings(key: str) -> list[str]:
    return [key[:-1], key + "s", key.upper(), key.replace("_", "-"), key[1::-1] + key[2:], f" {key}"]


@st.composite
def distributions(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    distribution, num_hosts = copy.deepcopy(draw(good_distributions()))
    for _ in range(draw(st.integers(0, 3))):
        spoil(draw, distribution)
    return distribution, num_hosts


@pytest.mark.slow
@settings(max_examples=NUM_EXAMPLES, derandomize=True, database=None)
@given(distributions())
def test_what_passes_here_passes_in_the_container(case: tuple[dict[str, Any], int]) -> None:
    distribution, num_hosts = case
    try:
        checked = check_distribution(distribution, instance_count=num_hosts)
    except ConfigError:
        return
    if checked.config is None:
        assert not is_on(distribution), "switched off in silence"
        if checked.distribution.get("mpi", {}).get("enabled"):
            plan_the_launch(mpi_alone(checked), num_hosts)
    else:
        run_the_container(checked, num_hosts)


@settings(max_examples=100, derandomize=True, database=None)
@given(good_distributions())
def test_what_fits_passes(case: tuple[dict[str, Any], int]) -> None:
    distribution, num_hosts = case
    checked = check_distribution(distribution, instance_count=num_hosts)
    assert checked.config is not None
    run_the_container(checked, num_hosts)


def is_on(distribution: dict[str, Any]) -> bool:
    """Whether the user meant to switch model parallelism on, however that is written."""
    block = distribution.get("smdistributed", {}).get("modelparallel", {})
    return bool(block.get("enabled", "parameters" in block))


def run_the_container(checked: CheckedDistribution, num_hosts: int) -> None:
    """As the container would, with the parameters checked as it checks them."""
    job = plan_the_launch(checked.hyperparameters, num_hosts)
    assert job.mpi_enabled
    assert job.mp_parameters is not None
    assert job.processes_per_host is not None
    Config.from_parameters(job.mp_parameters).check_world_size(job.processes_per_host * num_hosts)


def mpi_alone(checked: CheckedDistribution) -> dict[str, Any]:
    """The hyperparameters that the SDK makes of `mpi`."""
    mpi = checked.distribution["mpi"]
    return {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": mpi.get("processes_per_host", 1),
        "sagemaker_mpi_custom_mpi_options": mpi.get("custom_mpi_options", ""),
    }


def plan_the_launch(given: Mapping[str, Any], num_hosts: int) -> Job:
    """All that the container does with a request before it starts mpirun, by its own functions."""
    hyperparameters = {key: json.dumps(value) for key, value in given.items()}
    hosts = [f"algo-{number + 1}" for number in range(num_hosts)]
    with TemporaryDirectory() as root:
        config = Path(root) / "input" / "config"
        config.mkdir(parents=True)
        (config / "hyperparameters.json").write_text(json.dumps(hyperparameters))
        resources = {"current_host": "algo-1", "hosts": hosts, "network_interface_name": "eth0"}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        job = Job.read(root)
    assert job.processes_per_host is not None
    plan_job(
        job,
        processes_per_host=job.processes_per_host,
        mpirun="mpirun",
        mpi_version=(5, 0),
        python="python",
        environment=container_environment(job, num_cpus=1, num_gpus=0),
        script=("train.py", *script_arguments(job)),
        is_root=True,
    )
    return job


PATHS = [
    ("smdistributed",),
    ("smdistributed", "modelparallel"),
    ("smdistributed", "modelparallel", "enabled"),
    ("smdistributed", "modelparallel", "parameters"),
    ("smdistributed", "modelparallel", "parameters", "partitions"),
    ("smdistributed", "modelparallel", "parameters", "ddp"),
    ("mpi",),
    ("mpi", "enabled"),
    ("mpi", "processes_per_host"),
    ("mpi", "custom_mpi_options"),
]


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_misspelt_key_is_refused_wherever_it_stands(path: tuple[str, ...]) -> None:
    for misspelt in misspellings(path[-1]):
        if misspelt == path[-1]:
            continue
        distribution: dict[str, Any] = {
            "smdistributed": {
                "modelparallel": {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}
            },
            "mpi": {"enabled": True, "processes_per_host": 4, "custom_mpi_options": ""},
        }
        block = distribution
        for key in path[:-1]:
            block = block[key]
        block[misspelt] = block.pop(path[-1])
        with pytest.raises(ConfigError, match=r"(?i)unknown|invalid smdistributed|required"):
            check_distribution(distribution)
