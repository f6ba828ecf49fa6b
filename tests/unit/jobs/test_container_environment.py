"""The variables and arguments of a script, against what the real toolkit gave to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_lite.entrypoints.container.environment import container_environment, script_arguments
from smp_lite.entrypoints.container.job import Job

GOLDEN = Path(__file__).parent / "data" / "sm_env.golden.txt"
PARAMETERS = {
    "ddp": True,
    "microbatches": 4,
    "optimize": "speed",
    "partitions": 2,
    "pipeline": "interleaved",
    "placement_strategy": "spread",
}


def job(hyperparameters: dict[str, Any] | None = None, **changes: Any) -> Job:
    return Job(hyperparameters or {}, {}, {"current_host": "algo-1", "hosts": ["algo-1"]}, {}, **changes)


def environment(job: Job) -> dict[str, str]:
    return container_environment(job, num_cpus=2, num_gpus=0)


def test_every_variable_is_that_of_the_real_toolkit() -> None:
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": "ml.p3.16xlarge",
        "hosts": ["algo-1"],
    }
    golden_job = Job(
        hyperparameters={"mode": "ok", "mp_parameters": PARAMETERS, "epochs": 1},
        framework_parameters={
            "sagemaker_submit_directory": "/opt/ml/code/sourcedir",
            "sagemaker_program": "train.py",
            "sagemaker_container_log_level": 20,
            "sagemaker_region": "us-west-2",
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": 2,
            "sagemaker_mpi_custom_mpi_options": "",
            "sagemaker_distributed_dataparallel_enabled": False,
            "sagemaker_instance_type": "ml.p3.16xlarge",
        },
        resource_config={
            "current_host": "algo-1",
            "current_instance_type": "ml.p3.16xlarge",
            "current_group_name": "homogeneousCluster",
            "hosts": ["algo-1"],
            "instance_groups": [group],
            "network_interface_name": "lo",
        },
        input_data_config={
            "training": {
                "TrainingInputMode": "File",
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
        },
    )
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    golden = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert environment(golden_job) == golden


def test_folders_follow_the_root() -> None:
    variables = environment(
        Job({}, {}, {"current_host": "a", "hosts": ["a"]}, {"train": {}}, root="/jobs/7/")
    )
    assert variables["SM_MODEL_DIR"] == "/jobs/7/model"
    assert variables["SM_CHANNEL_TRAIN"] == "/jobs/7/input/data/train"
    assert variables["SM_MODULE_DIR"] == "/jobs/7/code"


def test_each_host_has_its_own_name_and_all_have_the_same_list() -> None:
    hosts = ["algo-1", "algo-2"]
    both = [environment(Job({}, {}, {"current_host": host, "hosts": hosts}, {})) for host in hosts]
    assert [variables["SM_CURRENT_HOST"] for variables in both] == hosts
    assert {variables["SM_HOSTS"] for variables in both} == {'["algo-1","algo-2"]'}


@pytest.mark.parametrize(
    ("value", "text", "argument"),
    [
        (1, "1", "1"),
        (0.001, "0.001", "0.001"),
        (True, "true", "True"),
        (None, "", ""),
        ("plain", "plain", "plain"),
        ("$HOME; rm *", "$HOME; rm *", "$HOME; rm *"),
        ([1, "a"], '[1,"a"]', "[1, 'a']"),
        ({"b": 2, "a": True}, '{"a":true,"b":2}', "a=True,b=2"),
        ("größe", "größe", "größe"),
        (["größe"], '["gr\\u00f6\\u00dfe"]', "['größe']"),
    ],
)
def test_how_a_hyperparameter_is_written(value: Any, text: str, argument: str) -> None:
    assert environment(job({"batch-size": value}))["SM_HP_BATCH-SIZE"] == text
    assert script_arguments(job({"batch-size": value})) == ["--batch-size", argument]


def test_arguments_are_sorted_and_a_name_of_one_letter_gets_one_dash() -> None:
    assert script_arguments(job({"lr": 0.1, "b": 2, "B": 3})) == ["-B", "3", "-b", "2", "--lr", "0.1"]


def test_a_script_gets_the_parameters_as_an_argument_only_if_asked() -> None:
    with_parameters = job({"mp_parameters": {"partitions": 2, "ddp": True}, "epochs": 1})
    assert script_arguments(with_parameters) == ["--epochs", "1"]
    assert script_arguments(with_parameters, pass_parameters=True) == [
        *("--epochs", "1"),
        *("--mp_parameters", "ddp=True,partitions=2"),
    ]


@pytest.mark.parametrize("hyperparameters", [{"a=b": 1}, {"a": "x\0y"}, {"a\0": 1}])
def test_what_no_variable_can_hold_is_told_by_name(hyperparameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"SM_HP_A.* cannot be passed in the environment"):
        environment(job(hyperparameters))
