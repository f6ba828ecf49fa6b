"""The launch of a training job: whole argument lists, compared for equality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from smp_lite.entrypoints.container.job import Job
from smp_lite.entrypoints.mpi.launch_plan import LaunchPlan, plan_job

SEED_OPTIONS = "--mca btl_vader_single_copy_mechanism none "
ONE = ("algo-1",)
TWO = ("algo-1", "algo-2")


def job(hosts: tuple[str, ...], options: str = "", instance_type: str = "ml.c5.xlarge") -> Job:
    resources = {
        "hosts": list(hosts),
        "current_host": hosts[0],
        "current_instance_type": instance_type,
        "network_interface_name": "eth0",
    }
    return Job({}, {"sagemaker_mpi_custom_mpi_options": options}, resources, {})


def plan(job: Job, **changes: Any) -> LaunchPlan:
    arguments: dict[str, Any] = {
        "processes_per_host": 4,
        "mpirun": "mpirun",
        "mpi_version": (5, 0),
        "python": "python",
        "environment": {"SMP_LITE_ERROR_DIR": "/run/7"},
        "script": ("train.py", "--epochs", "1"),
        "is_root": False,
    }
    return plan_job(job, **{**arguments, **changes})


@dataclass(frozen=True)
class Case:
    """`argv` is in words, without the rank's command at its end, which is the same for all."""

    name: str
    mpi_major: int
    job: Job
    argv: str
    agent: str | None = None
    one_machine: bool = False
    device: str | None = None


# In the order of the launch: where, how many, over which network, how robust, with which variables.
CASES = (
    Case(
        "one host",
        5,
        job(ONE),
        "mpirun --bind-to none --map-by :OVERSUBSCRIBE -np 4"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
    ),
    Case(
        "one host",
        4,
        job(ONE),
        "mpirun --bind-to none --map-by slot --oversubscribe -np 4"
        " --mca orte_abort_on_non_zero_status 1"
        " --mca pml ob1 --mca btl ^openib --mca btl_vader_single_copy_mechanism none"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
    ),
    Case(
        "two hosts on one machine",
        5,
        job(TWO),
        "mpirun --bind-to none --map-by :OVERSUBSCRIBE -np 8"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
        one_machine=True,
    ),
    Case(
        "two hosts",
        5,
        job(TWO),
        "mpirun --host algo-1:4,algo-2:4 --bind-to none --map-by slot -np 8"
        " --mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0"
        " --prtemca plm_ssh_no_tree_spawn 1 --mca btl_tcp_progress_thread 1"
        " --prtemca plm_ssh_agent /opt/agent"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
        agent="/opt/agent",
    ),
    Case(
        "two hosts",
        4,
        job(TWO),
        "mpirun --host algo-1:4,algo-2:4 --bind-to none --map-by slot -np 8"
        " --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0"
        " --mca plm_rsh_no_tree_spawn 1 --mca plm_rsh_agent /opt/agent"
        " --mca orte_abort_on_non_zero_status 1"
        " --mca pml ob1 --mca btl ^openib --mca btl_vader_single_copy_mechanism none"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
        agent="/opt/agent",
    ),
    Case(
        "two hosts by ssh",
        5,
        job(TWO),
        "mpirun --host algo-1:4,algo-2:4 --bind-to none --map-by slot -np 8"
        " --mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0 --prtemca plm_ssh_no_tree_spawn 1"
        " --mca btl_tcp_progress_thread 1"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
    ),
    Case(
        "EFA",
        5,
        job(ONE, instance_type="ml.p3dn.24xlarge"),
        "mpirun --bind-to none --map-by :OVERSUBSCRIBE -np 4"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS"
        " -x FI_PROVIDER -x NCCL_PROTO",
    ),
    Case(
        "EFA with RDMA",
        5,
        job(ONE, instance_type="ml.p4d.24xlarge"),
        "mpirun --bind-to none --map-by :OVERSUBSCRIBE -np 4"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS"
        " -x FI_PROVIDER -x NCCL_PROTO -x FI_EFA_USE_DEVICE_RDMA -x RDMAV_FORK_SAFE",
    ),
    Case(
        "EFA, played on one machine that has none",
        5,
        job(TWO, instance_type="ml.p4d.24xlarge"),
        "mpirun --bind-to none --map-by :OVERSUBSCRIBE -np 8"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
        one_machine=True,
    ),
    Case(
        "GPUs of one host",
        5,
        job(ONE, instance_type="ml.g5.12xlarge"),
        "mpirun --bind-to none --map-by :OVERSUBSCRIBE -np 4"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS"
        " -x SMP_LITE_DEVICE -x FI_PROVIDER -x NCCL_PROTO",
        device="cuda",
    ),
    Case(
        "GPUs of two hosts",
        5,
        job(TWO, instance_type="ml.p3.8xlarge"),
        "mpirun --host algo-1:4,algo-2:4 --bind-to none --map-by slot -np 8"
        " --mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0 --prtemca plm_ssh_no_tree_spawn 1"
        " --mca btl_tcp_progress_thread 1"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS"
        " -x SMP_LITE_DEVICE -x NCCL_SOCKET_IFNAME",
        device="cuda",
    ),
    Case(
        "processors of a machine that has GPUs",
        5,
        job(TWO, instance_type="local"),
        "mpirun --bind-to none --map-by :OVERSUBSCRIBE -np 8"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS -x SMP_LITE_DEVICE",
        one_machine=True,
        device="cpu",
    ),
    Case(
        "what the user says of GPUs and the network between them",
        4,
        job(
            ONE,
            "-x SMP_LITE_DEVICE=cpu -x FI_PROVIDER=tcp -x NCCL_PROTO=LL128 -x FI_EFA_USE_DEVICE_RDMA=0"
            " -x RDMAV_FORK_SAFE=0",
            instance_type="ml.p5.48xlarge",
        ),
        "mpirun --bind-to none --map-by slot --oversubscribe -np 4"
        " --mca orte_abort_on_non_zero_status 1"
        " --mca pml ob1 --mca btl ^openib --mca btl_vader_single_copy_mechanism none"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS"
        " -x SMP_LITE_DEVICE=cpu -x FI_PROVIDER=tcp -x NCCL_PROTO=LL128 -x FI_EFA_USE_DEVICE_RDMA=0"
        " -x RDMAV_FORK_SAFE=0",
        device="cuda",
    ),
    Case(
        "the seed's options",
        5,
        job(ONE, SEED_OPTIONS),
        "mpirun --bind-to none --map-by :OVERSUBSCRIBE -np 4"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS"
        " --mca btl_vader_single_copy_mechanism none",
    ),
    Case(
        "the seed's options, once",
        4,
        job(ONE, SEED_OPTIONS),
        "mpirun --bind-to none --map-by slot --oversubscribe -np 4"
        " --mca orte_abort_on_non_zero_status 1"
        " --mca pml ob1 --mca btl ^openib --mca btl_vader_single_copy_mechanism none"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
    ),
    Case(
        "defaults that the user decides otherwise",
        4,
        job(ONE, "-bind-to core -mca btl self,tcp -x OMP_NUM_THREADS=8 --NCCL_DEBUG INFO -verbose"),
        "mpirun --bind-to core --map-by slot --oversubscribe -np 4"
        " --mca orte_abort_on_non_zero_status 1"
        " --mca pml ob1 --mca btl self,tcp --mca btl_vader_single_copy_mechanism none"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS=8 -x NCCL_DEBUG=INFO --verbose",
    ),
    Case(
        "what the launch does anyway",
        5,
        job(TWO, "-np 8 -map-by slot -x PYTHONUNBUFFERED -mca oob_tcp_if_include eth0 --tag-output"),
        "mpirun --host algo-1:4,algo-2:4 --bind-to none --map-by slot -np 8"
        " --mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0 --prtemca plm_ssh_no_tree_spawn 1"
        " --mca btl_tcp_progress_thread 1"
        " -x PYTHONUNBUFFERED -x SMP_LITE_ERROR_DIR -x OMP_NUM_THREADS",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, Open MPI {case.mpi_major}")
def test_the_whole_argument_list(case: Case) -> None:
    made = plan(
        case.job,
        mpi_version=(case.mpi_major, 0),
        agent=case.agent,
        one_machine=case.one_machine,
        device=case.device,
    )
    command = "python -P -m smp_lite.entrypoints.rank_main train.py --epochs 1"
    assert " ".join(made.argv) == f"{case.argv} {command}"


def test_values_stand_in_the_environment_and_not_on_the_command_line() -> None:
    made = plan(job(TWO, instance_type="ml.p4d.24xlarge"), environment={"TOKEN": "s3cret"}, is_root=True)
    assert "s3cret" not in " ".join(made.argv)
    assert made.environment == {
        "PYTHONUNBUFFERED": "1",
        "TOKEN": "s3cret",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    assert made.environment_defaults == {
        "OMP_NUM_THREADS": "1",
        "FI_PROVIDER": "efa",
        "NCCL_PROTO": "simple",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "RDMAV_FORK_SAFE": "1",
    }


def test_the_users_variables_go_before_those_of_the_network() -> None:
    made = plan(job(TWO, instance_type="ml.p4d.24xlarge"), device="cuda")
    assert {name: made.environment_defaults[name] for name in ("SMP_LITE_DEVICE", "NCCL_SOCKET_IFNAME")} == {
        "SMP_LITE_DEVICE": "cuda",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    users = {"SMP_LITE_DEVICE": "cpu", "NCCL_SOCKET_IFNAME": "lo", "NCCL_PROTO": "LL", "FI_PROVIDER": "tcp"}
    assert users.items() <= made.full_environment(users).items()


def test_a_given_variable_is_no_default_and_exported_once() -> None:
    made = plan(job(ONE), environment={"OMP_NUM_THREADS": "3"})
    assert made.argv.count("OMP_NUM_THREADS") == 1
    assert made.full_environment({"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "3"
    with pytest.raises(ValueError, match="-x OMP_NUM_THREADS=4 contradicts -x OMP_NUM_THREADS"):
        plan(job(ONE, "-x OMP_NUM_THREADS=4"), environment={"OMP_NUM_THREADS": "3"})


def test_words_of_the_user_stay_single_words() -> None:
    made = plan(job(ONE, "-x 'A=b; $(c)'"), script=("my train.py", "--text", "", "$HOME"))
    *options, python, _, _, _ = made.argv[:-4]
    assert options[-2:] == ["-x", "A=b; $(c)"]
    assert python == "python"
    assert made.argv[-4:] == ("my train.py", "--text", "", "$HOME")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("-np 3", "-np 3 contradicts -np 8"),
        ("--mca btl_tcp_if_include lo", "contradicts --mca btl_tcp_if_include eth0"),
        ("--mca oob_tcp_if_exclude lo", "contradicts --prtemca prte_if_include eth0"),
        ("-x SMP_LITE_ERROR_DIR=/elsewhere", "contradicts -x SMP_LITE_ERROR_DIR"),
        ("-x SM_CURRENT_HOST", "each host has its own value"),
        ("-x SM_HP_MP_PARAMETERS={}", "each host has its own value"),
        ("-x A=\0", "NUL"),
    ],
)
def test_an_option_against_the_launch_is_refused(options: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan(job(TWO, options))


def test_a_lone_colon_does_not_cut_the_command_line() -> None:
    argv = plan(job(ONE), script=("train.py", "--separator", ":")).argv
    assert argv[-2:] == ("--encoded", '["train.py", "--separator", ":"]')


def test_several_instance_groups_are_refused() -> None:
    groups = [{"instance_group_name": name, "hosts": [host]} for name, host in zip("ab", TWO, strict=True)]
    resources = {"hosts": list(TWO), "current_host": "algo-1", "instance_groups": groups}
    with pytest.raises(ValueError, match="2 instance groups"):
        plan(Job({}, {}, resources, {}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"processes_per_host": 0}, "processes_per_host must be at least 1, got 0"),
        ({"mpi_version": (3, 1)}, "mpirun is Open MPI 3; install version 4 or 5"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan(job(ONE), **changes)
