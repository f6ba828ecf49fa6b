"""What the launch refuses, the strict estimators refuse before, in the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sagemaker.pytorch
from sagemaker.workflow.parameters import ParameterInteger
from sagemaker.workflow.pipeline_context import PipelineSession

from smp_lite.config import ConfigError
from smp_lite.entrypoints.hosts.run_job import run_job
from smp_lite.estimator import Estimator, LocalMPISession, PyTorch, request_of
from tests.estimator.aws import EXAMPLE_INPUTS, boto_session, example, example_distribution
from tests.sampling import one_in

MPI = {"enabled": True, "processes_per_host": 2}
OFF = {"modelparallel": {"enabled": False, "parameters": {"partitions": 2}}}

REFUSED_BY_THE_LAUNCH: dict[str, dict[str, Any]] = {
    "options that contradict each other": {
        "distribution": {"mpi": {**MPI, "custom_mpi_options": "--mca a 1 --mca a 2"}}
    },
    "options with an open quotation": {"distribution": {"mpi": {**MPI, "custom_mpi_options": "--mca a 'b"}}},
    "another number of ranks": {
        "distribution": {"smdistributed": OFF, "mpi": {**MPI, "custom_mpi_options": "-np 3"}}
    },
    "options without MPI": {"distribution": {"mpi": {"enabled": False, "custom_mpi_options": "-np 3"}}},
    "parameters without MPI": {"hyperparameters": {"mp_parameters": {"partitions": 2}}},
    "parameters that do not fit": {
        "hyperparameters": {"mp_parameters": {"partitions": 3}},
        "distribution": {"mpi": MPI},
    },
    "a misspelt parameter": {
        "hyperparameters": {"mp_parameters": {"partitons": 2}},
        "distribution": {"mpi": MPI},
    },
    "parameters that are no dictionary": {
        "hyperparameters": {"mp_parameters": [2]},
        "distribution": {"mpi": MPI},
    },
    "a script of the shell": {"entry_point": "train.sh", "distribution": example_distribution()},
    "torch_distributed": {"distribution": {"torch_distributed": {"enabled": True}}},
    "pytorchddp": {"distribution": {"pytorchddp": {"enabled": True}}},
    "parameter_server": {"distribution": {"parameter_server": {"enabled": True}}},
}


def local_job(folder: Path, **changes: Any) -> dict[str, Any]:
    """The arguments of a job that smp_lite's own entry point starts."""
    arguments = example(folder / "source", **{"distribution": None, "instance_type": "local", **changes})
    (folder / "source" / "train.sh").write_text("true")
    versions = {"framework_version": "2.0.0", "py_version": "py310"}
    return arguments | versions | {"sagemaker_session": LocalMPISession(folder / "jobs")}


def refusal_of_the_launch(folder: Path, arguments: dict[str, Any]) -> str:
    """What the entry point says to the request that the SDK's own class would send."""
    request = request_of(sagemaker.pytorch.PyTorch(**arguments, image_uri="any"), job_name="JOB")
    location = {"sagemaker_submit_directory": json.dumps(arguments["source_dir"])}
    config = folder / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text(json.dumps(request["HyperParameters"] | location))
    try:
        run_job(folder / "ml", None)
    except ValueError as error:
        return str(error)
    raise AssertionError("the launch refuses nothing")


@pytest.mark.slow
@pytest.mark.parametrize("job", one_in(2, REFUSED_BY_THE_LAUNCH))
def test_what_the_launch_refuses_is_refused_before(job: str, tmp_path: Path) -> None:
    arguments = local_job(tmp_path, **REFUSED_BY_THE_LAUNCH[job])
    with pytest.raises(ConfigError) as caught:
        PyTorch(**arguments).fit()
    assert str(caught.value) == refusal_of_the_launch(tmp_path, arguments)
    assert not (tmp_path / "jobs").exists(), "nothing was packed"
    with pytest.raises(ConfigError):
        PyTorch(**arguments).dry_run()


def test_a_job_without_a_script_is_refused(tmp_path: Path) -> None:
    arguments = local_job(tmp_path, image_uri="any")
    for name in ("framework_version", "py_version", "entry_point", "source_dir"):
        del arguments[name]
    with pytest.raises(ConfigError, match="give the estimator an entry_point"):
        Estimator(**arguments).dry_run()


def test_our_entry_point_in_an_image_of_the_users_needs_python(tmp_path: Path) -> None:
    arguments = example(tmp_path / "source", entry_point="train.sh", image_uri="mine:1")
    (tmp_path / "source" / "train.sh").write_text("true")
    with pytest.raises(ConfigError, match=r"the entry point 'train\.sh' must be a Python file"):
        PyTorch(**arguments).dry_run(EXAMPLE_INPUTS)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "changes",
    [
        {"distribution": {"torch_distributed": {"enabled": True}}},
        {"distribution": None, "hyperparameters": {"mp_parameters": {"partitions": 1}}},
        {"entry_point": "train.sh"},
    ],
)
def test_the_launcher_of_an_image_of_aws_may_know_more(changes: dict[str, Any], tmp_path: Path) -> None:
    versions = {"framework_version": "2.0.0", "py_version": "py310"}
    arguments = example(tmp_path / "source", **versions, **changes)
    (tmp_path / "source" / "train.sh").write_text("true")
    PyTorch(**arguments).dry_run(EXAMPLE_INPUTS)


def test_a_number_of_hosts_that_is_not_known_yet_is_not_guessed(tmp_path: Path) -> None:
    distribution = example_distribution()
    distribution["smdistributed"]["modelparallel"]["parameters"]["partitions"] = 16
    session = PipelineSession(boto_session(), default_bucket="b")
    arguments = example(tmp_path / "source", distribution=distribution, sagemaker_session=session)
    PyTorch(**arguments | {"instance_count": ParameterInteger("N")}).dry_run(EXAMPLE_INPUTS)
