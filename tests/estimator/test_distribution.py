"""check_distribution: what is refused, with which words, and what is filled in."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from smp_lite.config import ConfigError
from smp_lite.estimator.request.distribution import check_distribution

MPI = {"enabled": True, "processes_per_host": 8}


def smp(mpi: Any = MPI, **parameters: Any) -> dict[str, Any]:
    """A distribution with these parameters; partitions=2 and ddp=True unless they say otherwise."""
    modelparallel = {"enabled": True, "parameters": {"partitions": 2, "ddp": True, **parameters}}
    return {"smdistributed": {"modelparallel": modelparallel}, "mpi": mpi}


def modelparallel(block: Any, **others: Any) -> dict[str, Any]:
    return {"smdistributed": {"modelparallel": block}, "mpi": MPI, **others}


ON = {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}

REFUSED = [
    # Shapes and keys, from the top down.
    (["smdistributed"], "distribution must be a dictionary. Got distribution=['smdistributed'] (list)"),
    ({"smdistribuited": {}}, "unknown key 'smdistribuited' in distribution: did you mean 'smdistributed'?"),
    ({"zzz": {}}, "unknown key 'zzz' in distribution: the keys are smdistributed, mpi, "),
    ({7: {}}, "unknown key 7 in distribution: "),
    (
        {"smdistributed": "modelparallel"},
        "smdistributed strategy requires a dictionary. Got smdistributed='mod",
    ),
    (
        {"smdistributed": {"modelparalell": ON}},
        "Invalid smdistributed strategy provided: 'modelparalell'. did you mean 'modelparallel'?",
    ),
    (
        {"smdistributed": {"modelparallel": ON, "dataparallel": {"enabled": True}}},
        "Cannot use more than 1 smdistributed strategy. Got modelparallel and dataparallel: leave one",
    ),
    (modelparallel(True), "smdistributed.modelparallel must be a dictionary."),
    (
        modelparallel({"enable": True}),
        "unknown key 'enable' in smdistributed.modelparallel: did you mean 'enabled'?",
    ),
    (modelparallel({"parameters": {"partitions": 2}}), "smdistributed.modelparallel.enabled is missing, "),
    (
        modelparallel({**ON, "enabled": "yes"}),
        "smdistributed.modelparallel.enabled must be a value in: [True, False]. "
        "Got smdistributed.modelparallel.enabled='yes' (str)",
    ),
    (modelparallel({**ON, "enabled": 1}), "smdistributed.modelparallel.enabled must be a value in: [True, F"),
    # MPI.
    (
        {"smdistributed": {"modelparallel": ON}},
        'Cannot use Model Parallelism without MPI enabled! Got mpi=None: add "mpi"',
    ),
    (smp({"enabled": False}), "Cannot use Model Parallelism without MPI enabled! Got mpi={'enabled': False}"),
    (smp({"processes_per_host": 8}), "mpi.enabled is missing, "),
    (smp({**MPI, "enabled": "yes"}), "mpi.enabled must be a value in: [True, False]. Got mpi.enabled='yes'"),
    (smp({**MPI, "enabled": 1}), "mpi.enabled must be a value in: [True, False]."),
    (smp([]), "mpi must be a dictionary."),
    (smp(None), "mpi must be a dictionary."),
    (
        smp({"enabled": True, "process_per_host": 8}),
        "unknown key 'process_per_host' in mpi: did you mean 'processes_per_host'?",
    ),
    *(
        (
            smp({**MPI, "processes_per_host": bad}),
            "The number of processes_per_host must be a positive integer. Got mpi.processes_per_h",
        )
        for bad in (0, -1, True, 8.0, "8", None)
    ),
    (
        smp({"enabled": True}),
        "mpi.processes_per_host is missing, and the number of GPUs of the instance type",
    ),
    (smp({**MPI, "custom_mpi_options": ["-v"]}), "custom_mpi_options must be a str. Got mpi.custom_mpi_opt"),
    (smp({**MPI, "custom_mpi_options": None}), "custom_mpi_options must be a str."),
    (smp({**MPI, "custom_mpi_options": "--mca btl 'tcp"}), 'custom_mpi_options: "--mca btl \'tcp"'),
    (smp({**MPI, "custom_mpi_options": "-np 3"}), "custom_mpi_options: "),
    # Parameters: the details are Config's, and its tests'.
    (smp(partitons=2), "unknown parameter 'partitons': did you mean 'partitions'?"),
    (modelparallel({"enabled": True}), "'partitions' is a required parameter."),
    (modelparallel({"enabled": True, "parameters": {}}), "'partitions' is a required parameter."),
    (smp(partitions="2"), "The number of partitions must be a positive integer. Got partitions='2' (str)"),
    (smp(partitions=True), "The number of partitions must be a positive integer."),
    (smp(memory_weight=float("nan")), "memory_weight must be between 0.0 and 1.0!"),
    (smp(microbatches={1}), "The number of microbatches must be a positive integer."),
    (
        smp(sdp_gradient_clipping=Decimal(1)),
        "sdp_gradient_clipping cannot be written as JSON (Object of type",
    ),
    (smp(pipeline_parallel_degree=4), "partitions=2 and pipeline_parallel_degree=4 are two names of one"),
    (
        modelparallel({"enabled": True, "parameters": "no/such/file.json"}),
        "Expected a string path to an existing modelparallel config, or a dictionary. Received: 'no/su",
    ),
    (
        modelparallel({"enabled": True, "parameters": 3}),
        "Expected a string path to an existing modelparallel",
    ),
    # MPI without model parallelism is a launch, too.
    *(
        (
            {**others, "mpi": {**MPI, "custom_mpi_options": options}},
            f"custom_mpi_options: {start}",
        )
        for others in ({}, {"smdistributed": {"modelparallel": {"enabled": False}}})
        for options, start in (
            ("--mca a 1 --mca a 2", "--mca a 1 and --mca a 2 contradict each other"),
            ("--mca btl 'tcp", '"--mca btl \'tcp" cannot be split into words'),
            ("-np 3", "--np 3 contradicts -np 8"),
        )
    ),
    # What only shows when all is put together.
    (
        smp(partitions=3),
        "mpi.processes_per_host=8 on instance_count=1: the number of processes is not a multiple of",
    ),
    (
        smp(ddp=False),
        "mpi.processes_per_host=8 on instance_count=1: 8 processes hold 4 replicas of partitions=2",
    ),
    *(
        (
            smp() | {other: {"enabled": True}},
            f"smdistributed.modelparallel is launched by MPI, {other} by a lau",
        )
        for other in ("torch_distributed", "pytorchddp", "parameter_server")
    ),
    (
        smp() | {"instance_groups": []},
        "smdistributed.modelparallel runs on hosts of one kind: leave instance_",
    ),
]


@pytest.mark.parametrize(("distribution", "start"), REFUSED)
def test_what_the_launch_would_refuse_is_refused(distribution: Any, start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_distribution(distribution)
    assert str(caught.value).startswith(start)


PASSED_ON = [
    None,
    {},
    {"torch_distributed": {"enabled": True}},
    {"pytorchddp": {"enabled": True, "custom_mpi_options": "-verbose"}},
    {"smdistributed": {"dataparallel": {"enabled": True}}},
    {"parameter_server": {"enabled": True}},
    {"mpi": MPI},
    {"mpi": {**MPI, "custom_mpi_options": "-np 8 -x NCCL_DEBUG=WARN"}},
    {"mpi": {"enabled": False, "custom_mpi_options": "-np 3"}},
    {"smdistributed": {"modelparallel": {"enabled": False}}},
    modelparallel({"enabled": False, "parameters": {"whatever": 1}}),
]


@pytest.mark.parametrize("distribution", PASSED_ON)
def test_what_is_not_ours_passes_unchanged(distribution: Any) -> None:
    checked = check_distribution(distribution)
    assert checked.distribution == (distribution or {})
    assert checked.config is None
    assert checked.hyperparameters == {}


def test_ranks_of_mpi_without_model_parallelism() -> None:
    assert check_distribution({"mpi": MPI}).processes_per_host == 8
    assert check_distribution({"mpi": {"enabled": True}}, gpus_per_host=4).processes_per_host == 4
    assert (
        check_distribution({"mpi": {"enabled": True}}, gpus_per_host=4, local=True).processes_per_host is None
    )
    assert check_distribution({"mpi": {"enabled": False}}, gpus_per_host=4).processes_per_host is None


@pytest.mark.parametrize("distribution", [None, smp()])
def test_a_job_has_at_least_one_host(distribution: Any) -> None:
    with pytest.raises(ConfigError, match=r"^instance_count=0 must be at least 1: give the number of"):
        check_distribution(distribution, instance_count=0)


def test_hyperparameters_are_those_of_the_sdk() -> None:
    checked = check_distribution(
        smp({**MPI, "custom_mpi_options": "--mca btl_base_verbose 1"}, pipeline="simple")
    )
    assert checked.config is not None
    assert checked.config.partitions == 2
    assert list(checked.hyperparameters.items()) == [
        ("sagemaker_mpi_enabled", True),
        ("sagemaker_mpi_num_of_processes_per_host", 8),
        ("sagemaker_mpi_custom_mpi_options", "--mca btl_base_verbose 1"),
        ("mp_parameters", {"partitions": 2, "ddp": True, "pipeline": "simple"}),
        ("sagemaker_distributed_dataparallel_enabled", False),
    ]


def test_the_other_name_of_partitions_also_appears_as_partitions() -> None:
    parameters = {"pipeline_parallel_degree": 4, "ddp": True, "placement_strategy": "DPT"}
    checked = check_distribution(modelparallel({"enabled": True, "parameters": parameters}))
    assert checked.hyperparameters["mp_parameters"] == {**parameters, "partitions": 4}
    assert "partitions" not in parameters


def test_parameters_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps({"partitions": 8}))
    checked = check_distribution(modelparallel({"enabled": True, "parameters": str(file)}))
    assert checked.hyperparameters["mp_parameters"] == {"partitions": 8}
    file.write_text("{partitions")
    with pytest.raises(ConfigError, match=r"Cannot parse .*parameters\.json as a json file\."):
        check_distribution(modelparallel({"enabled": True, "parameters": str(file)}))


def test_ranks_of_all_hosts_count() -> None:
    assert check_distribution(smp(partitions=16), instance_count=2).processes_per_host == 8
    with pytest.raises(ConfigError, match="on instance_count=3: the number of processes is not a multiple"):
        check_distribution(smp(partitions=16), instance_count=3)
    assert check_distribution(smp(partitions=16), instance_count=None).processes_per_host == 8


def test_without_processes_per_host_the_launch_takes_the_gpus() -> None:
    checked = check_distribution(smp({"enabled": True}), gpus_per_host=4)
    assert checked.processes_per_host == 4
    assert "sagemaker_mpi_num_of_processes_per_host" not in checked.hyperparameters
    with pytest.raises(
        ConfigError, match=r"mpi\.processes_per_host=1 on instance_count=1: fewer processes than"
    ):
        check_distribution(smp({"enabled": True}), gpus_per_host=1)


GPU_JOBS: list[dict[str, Any]] = [
    {"smdistributed": {"modelparallel": ON}},
    {},
    {"smdistributed": {"modelparallel": {"enabled": False}}},
]


@pytest.mark.parametrize("others", GPU_JOBS)
def test_each_rank_needs_a_gpu_of_the_instance_type(others: dict[str, Any]) -> None:
    def check(mpi: dict[str, Any], instance_type: str = "ml.g5.12xlarge", **known: Any) -> int | None:
        distribution = {**others, "mpi": {"enabled": True, **mpi}}
        return check_distribution(distribution, instance_type=instance_type, **known).processes_per_host

    assert check({}) == 4
    assert check({"processes_per_host": 4}) == 4
    told = r"^mpi\.processes_per_host=8, but instance_type='ml\.g5\.12xlarge' has 4 GPUs, .* write 4 or less"
    with pytest.raises(ConfigError, match=told):
        check({"processes_per_host": 8})
    for variable in ("SMP_LITE_SHARE_GPUS=1", "SMP_LITE_DEVICE=cpu", "SMP_LITE_CUDA_AS_CPU=1"):
        name, _, value = variable.partition("=")
        assert check({"processes_per_host": 8}, environment={name: value}) == 8
    with pytest.raises(ConfigError, match=r"^environment: SMP_LITE_SHARE_GPUS='yes': it must be 0 or 1"):
        check({"processes_per_host": 4}, environment={"SMP_LITE_SHARE_GPUS": "yes"})
    # Of these nothing is known; a container counts what it has.
    assert check({"processes_per_host": 16}, "ml.p99.48xlarge") == 16
    assert check({"processes_per_host": 16}, "ml.c5.xlarge") == 16
    # Whose GPUs say nothing about a job on this machine, unless it is for its GPUs.
    assert check({"processes_per_host": 16}, local=True) == 16
    with pytest.raises(
        ConfigError, match=r"^mpi\.processes_per_host=4, but instance_type='local_gpu' has 2 GPU"
    ):
        check({"processes_per_host": 4}, "local_gpu", local=True, gpus_per_host=2)
    assert check({}, "local_gpu", local=True, gpus_per_host=4) == 4


@pytest.mark.parametrize("others", GPU_JOBS)
def test_gpus_that_no_rank_uses_are_told(others: dict[str, Any]) -> None:
    def idle(processes: int, **known: Any) -> str | None:
        mpi = {"enabled": True, "processes_per_host": processes}
        known = {"instance_type": "ml.p3.16xlarge", **known}
        return check_distribution({**others, "mpi": mpi}, **known).idle_gpus

    assert idle(8) is None
    told = "4 of 8 GPUs of instance_type='ml.p3.16xlarge' stay idle: mpi.processes_per_host=4"
    assert idle(4) == told
    assert idle(4, environment={"SMP_LITE_DEVICE": "cpu"}) is None
    assert idle(4, local=True) is None
    assert idle(4, instance_type="ml.c5.xlarge") is None


def test_without_processes_per_host_a_local_job_has_one_rank_for_each_partition() -> None:
    checked = check_distribution(smp({"enabled": True}), local=True)
    assert checked.hyperparameters["sagemaker_mpi_num_of_processes_per_host"] == 2
    rehearsal = check_distribution(smp({"enabled": True}), local=True, gpus_per_host=8)
    assert rehearsal.hyperparameters["sagemaker_mpi_num_of_processes_per_host"] == 8


def test_the_users_dictionary_stays_as_it_was() -> None:
    given = modelparallel(
        {"enabled": True, "parameters": {"pipeline_parallel_degree": 2}}, mpi={"enabled": True}
    )
    before = json.dumps(given)
    check_distribution(given, local=True)
    assert json.dumps(given) == before


def test_options_that_one_version_of_open_mpi_takes_pass() -> None:
    checked = check_distribution(
        smp({**MPI, "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none "})
    )
    assert checked.config is not None
    assert check_distribution(smp({**MPI, "custom_mpi_options": "--prtemca x_y 1"})).config is not None
