"""The launch as data: whole argument lists, compared for equality."""

from __future__ import annotations

import pytest

from smp_lite.entrypoints.mpi.launch_plan import LaunchPlan, plan_launch, plan_mpirun


def test_a_script_with_parameters_as_root() -> None:
    plan = plan_launch(
        processes=4,
        parameters={"partitions": 2, "ddp": True},
        script="train.py",
        args=["--steps", "3"],
        python="/venv/bin/python",
        mpirun="/venv/bin/mpirun",
        is_root=True,
    )
    assert plan == LaunchPlan(
        argv=(
            "/venv/bin/mpirun",
            "--bind-to",
            "none",
            "--map-by",
            ":OVERSUBSCRIBE",
            "-np",
            "4",
            "/venv/bin/python",
            "-P",
            "-m",
            "smp_lite.entrypoints.rank_main",
            "train.py",
            "--steps",
            "3",
        ),
        environment={
            "PYTHONUNBUFFERED": "1",
            "SM_HP_MP_PARAMETERS": '{"partitions": 2, "ddp": true}',
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        environment_defaults={"OMP_NUM_THREADS": "1"},
    )


def test_a_module_without_parameters_as_a_plain_user() -> None:
    plan = plan_launch(processes=1, script="pkg.train", module=True, python="py", mpirun="mpirun")
    assert plan == LaunchPlan(
        argv=(
            "mpirun",
            "--bind-to",
            "none",
            "--map-by",
            ":OVERSUBSCRIBE",
            "-np",
            "1",
            "py",
            "-P",
            "-m",
            "smp_lite.entrypoints.rank_main",
            "-m",
            "pkg.train",
        ),
        environment={"PYTHONUNBUFFERED": "1"},
        environment_defaults={"OMP_NUM_THREADS": "1"},
    )


def test_the_users_environment_yields_only_to_what_the_launch_decides() -> None:
    plan = LaunchPlan(argv=(), environment={"A": "plan"}, environment_defaults={"B": "1", "C": "1"})
    inherited = {"A": "user", "B": "2", "D": "user"}
    assert plan.full_environment(inherited) == {"A": "plan", "B": "2", "C": "1", "D": "user"}
    assert inherited == {"A": "user", "B": "2", "D": "user"}


@pytest.mark.parametrize("processes", [0, -1])
def test_fewer_than_one_process_is_refused(processes: int) -> None:
    with pytest.raises(ValueError, match=f"processes must be at least 1, got {processes}"):
        plan_mpirun(processes=processes, command=("true",), mpirun="mpirun", environment={})
