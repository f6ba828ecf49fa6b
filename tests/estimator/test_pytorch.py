"""The strict estimators: refused before anything is uploaded, and what they fill in."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from sagemaker.workflow.parameters import ParameterInteger, ParameterString
from sagemaker.workflow.pipeline_context import PipelineSession

from smp_lite.config import ConfigError
from smp_lite.estimator import Estimator, LocalMPISession, PyTorch
from tests.estimator.aws import (
    EXAMPLE_INPUTS,
    ROLE,
    boto_session,
    example,
    example_distribution,
    session,
    without_telemetry,
)

IMAGE = "mine:1"


class NothingMayBeSent:
    """In the place of a session's S3 and SageMaker clients."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session that fails a test which sends anything."""
    without_telemetry(monkeypatch)
    sealed = session()
    sealed.s3_resource = sealed.sagemaker_client = NothingMayBeSent()
    return sealed


def test_the_seal_breaks_when_something_is_sent(tmp_path: Path, sealed: Any) -> None:
    estimator = PyTorch(**example(tmp_path / "source", sagemaker_session=sealed, output_path="s3://b/"))
    with pytest.raises(AssertionError, match="Object was used"):
        estimator.fit(EXAMPLE_INPUTS)


def wrong_distribution() -> dict[str, Any]:
    distribution = example_distribution()
    distribution["mpi"]["process_per_host"] = distribution["mpi"].pop("processes_per_host")
    return distribution


@pytest.mark.parametrize("estimator_class", [PyTorch, Estimator])
def test_a_wrong_distribution_is_refused_at_once(estimator_class: Any, tmp_path: Path) -> None:
    arguments = example(tmp_path / "source", image_uri=IMAGE, distribution=wrong_distribution())
    with pytest.raises(ConfigError, match=r"unknown key 'process_per_host' in mpi: did you mean"):
        estimator_class(**arguments)


@pytest.mark.parametrize("estimator_class", [PyTorch, Estimator])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_runn": 3}, "unknown argument 'max_runn' of .*: did you mean 'max_run'"),
        ({"instance_typo": "ml.x"}, "unknown argument 'instance_typo' of .*: did you mean 'instance_type'"),
        ({"enviroment": {"A": "1"}}, "unknown argument 'enviroment' of .*: did you mean 'environment'"),
        ({"ship_pakage": False}, "unknown argument 'ship_pakage' of .*: did you mean 'ship_package'"),
        (
            {"hyperparameters": [1]},
            r"hyperparameters must be a dictionary. Got hyperparameters=\[1\] \(list\)",
        ),
        ({"hyperparameters": ""}, r"hyperparameters must be a dictionary. Got hyperparameters='' \(str\)"),
        ({"environment": "A=1"}, r"environment must be a dictionary. Got environment='A=1' \(str\)"),
        ({"dependencies": "lib"}, r"dependencies must be a list of paths. .*: write dependencies=\['lib'\]"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    estimator_class: Any, arguments: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        estimator_class(**example(tmp_path / "source", image_uri=IMAGE, **arguments))


def test_an_argument_that_the_sdk_drops_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="unknown argument 'zzz' of PyTorch: the SDK has none of this name"):
        PyTorch(**example(tmp_path / "source", zzz=1))


def test_arguments_of_the_sdk_and_of_a_class_of_the_users_own_are_known(tmp_path: Path) -> None:
    class Mine(PyTorch):
        def __init__(self, *args: Any, zzz: int, **kwargs: Any) -> None:
            super().__init__(*args, zzz=zzz, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made = Mine(
            **example(tmp_path / "source", zzz=1, train_max_run=5, use_spot_instances=True, tags={"a": "b"})
        )
    assert (made.max_run, made.use_spot_instances) == (5, True)


def test_hyperparameters_that_were_changed_are_checked_again(tmp_path: Path, sealed: Any) -> None:
    estimator = PyTorch(**example(tmp_path / "source", sagemaker_session=sealed))
    estimator._hyperparameters = [1]
    with pytest.raises(ConfigError, match="hyperparameters must be a dictionary"):
        estimator.dry_run()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("estimator_class", [PyTorch, Estimator])
@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("distribution", wrong_distribution(), "unknown key 'process_per_host'"),
        ("instance_count", 0, "^instance_count=0 must be at least 1"),
        ("entry_point", "train.py", 'No file named "train.py" was found in directory ".*source"'),
        ("input_mode", "Pipe", "input_mode='Pipe' would make a pipe of the channel that carries the source"),
        ("source_dir", "no/such/folder", "source_dir='no/such/folder' is not a folder"),
        ("dependencies", ["no/such/folder"], "dependencies: 'no/such/folder' does not exist"),
        ("_hyperparameters", {"list": {1}}, "hyperparameter 'list' cannot be written as JSON"),
        ("_hyperparameters", {"text": "x" * 2501}, "hyperparameter 'text' is 250[0-9] characters long"),
        ("_hyperparameters", {"sep": "\0"}, "NUL character"),
        ("_hyperparameters", {"mp_parameters": {}}, "mp_parameters are given twice"),
        ("_hyperparameters", {"sagemaker_mpi_enabled": False}, "sagemaker_mpi_enabled are given twice"),
        ("_hyperparameters", {"sagemaker_lr": 3}, "'sagemaker_lr': names that begin with sagemaker_ are"),
        ("_hyperparameters", {"sagemaker_region": 3}, "'sagemaker_region' is written over by the SDK: give"),
        ("dependencies", "lib", "dependencies must be a list of paths"),
        ("environment", {"SM_HP_MP_PARAMETERS": "{}"}, "environment gives SM_HP_MP_PARAMETERS"),
        ("environment", {"A=B": "1"}, "environment: 'A=B' is no name for a variable"),
        (
            "checkpoint_local_path",
            "/opt/ml/kept",
            "checkpoint_local_path='/opt/ml/kept' without checkpoint_s",
        ),
    ],
)
def test_what_was_changed_since_is_checked_at_fit(
    estimator_class: Any, attribute: str, value: Any, text: str, tmp_path: Path, sealed: Any
) -> None:
    arguments = example(tmp_path / "source", image_uri=IMAGE, sagemaker_session=sealed, output_path="s3://b/")
    estimator = estimator_class(**arguments)
    setattr(estimator, attribute, value)
    with pytest.raises(ConfigError, match=text):
        estimator.fit(EXAMPLE_INPUTS)


def test_hyperparameters_that_the_sdk_adds_are_there_for_the_next_job(tmp_path: Path) -> None:
    arguments = example(tmp_path / "source", instance_type="local", framework_version=None, py_version=None)
    estimator = PyTorch(**arguments | {"sagemaker_session": LocalMPISession(tmp_path / "jobs")})
    for name in ("first", "second"):
        estimator._prepare_for_training(name)
        assert estimator.hyperparameters()["sagemaker_job_name"] == f'"{name}"'
    estimator.set_hyperparameters(sagemaker_job_name="mine")
    with pytest.raises(ConfigError, match="'sagemaker_job_name' is written over by the SDK: give job_name"):
        estimator.dry_run()


def test_what_the_sdk_refuses_after_the_upload_is_refused_before(tmp_path: Path, sealed: Any) -> None:
    arguments = example(tmp_path / "source", sagemaker_session=sealed, output_path="s3://b/")
    estimator = PyTorch(**arguments | {"framework_version": "99.0", "py_version": "py311"})
    with pytest.raises(ValueError, match=r"Unsupported pytorch version: 99\.0"):
        estimator.fit(EXAMPLE_INPUTS)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, sealed: Any) -> None:
    arguments = example(tmp_path / "source", sagemaker_session=sealed, output_path="s3://b/")
    (tmp_path / "source" / "data").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"source/data', which would be sent with the job, cannot be read"):
        PyTorch(**arguments).fit(EXAMPLE_INPUTS)


@pytest.mark.slow
def test_jobs_before_it_are_neither_read_nor_sent(tmp_path: Path) -> None:
    session = LocalMPISession(tmp_path / "source" / "jobs")
    changes = {"instance_type": "local", "distribution": None, "sagemaker_session": session}
    estimator = PyTorch(**example(tmp_path / "source", **changes))
    session.directory.joinpath("earlier").mkdir(parents=True)
    session.directory.joinpath("earlier", "data").symlink_to(tmp_path / "gone")
    estimator.dry_run()
    (tmp_path / "source" / "data").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"source/data', which would be sent with the job, cannot be read"):
        estimator.dry_run()


def test_an_archive_in_s3_cannot_take_smp_lite_along(tmp_path: Path, sealed: Any) -> None:
    arguments = example(tmp_path / "source", image_uri=IMAGE, sagemaker_session=sealed)
    estimator = PyTorch(**arguments | {"source_dir": "s3://b/sourcedir.tar.gz"})
    with pytest.raises(ConfigError, match=r"is packed already.* or ship_package=False"):
        estimator.fit(EXAMPLE_INPUTS)


def test_parameters_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "parameters.json"
    file.write_text('{"partitions": 8, "placement_strategy": "TDP"}')
    arguments = example(tmp_path / "source")
    arguments["distribution"]["smdistributed"]["modelparallel"]["parameters"] = str(file)
    request = PyTorch(**arguments).dry_run(EXAMPLE_INPUTS)
    assert request["HyperParameters"]["mp_parameters"] == '{"partitions": 8, "placement_strategy": "TDP"}'


def test_gpus_of_the_instance_type_are_counted(tmp_path: Path) -> None:
    arguments = example(tmp_path / "source")
    arguments["distribution"]["mpi"] = {"enabled": True}
    hyperparameters = PyTorch(**arguments).dry_run(EXAMPLE_INPUTS)["HyperParameters"]
    assert "sagemaker_mpi_num_of_processes_per_host" not in hyperparameters
    with pytest.raises(ConfigError, match=r"mpi.processes_per_host=1 on instance_count=1: fewer processes"):
        PyTorch(**arguments | {"instance_type": "ml.p3.2xlarge"})
    with pytest.raises(ConfigError, match=r"mpi.processes_per_host is missing, and the number of GPUs"):
        PyTorch(**arguments | {"instance_type": "ml.c5.xlarge"})


def test_more_ranks_than_gpus_are_refused_before_anything_is_sent(tmp_path: Path, sealed: Any) -> None:
    arguments = example(tmp_path / "source", instance_type="ml.g5.12xlarge", sagemaker_session=sealed)
    told = r"^mpi\.processes_per_host=8, but instance_type='ml\.g5\.12xlarge' has 4 GPUs, and each rank"
    with pytest.raises(ConfigError, match=told):
        PyTorch(**arguments)
    for variable in ("SMP_LITE_SHARE_GPUS=1", "SMP_LITE_DEVICE=cpu"):
        name, _, value = variable.partition("=")
        estimator = PyTorch(**arguments, environment={name: value})
        assert estimator.dry_run(EXAMPLE_INPUTS)["Environment"] == {name: value}
        estimator.environment = None
        with pytest.raises(ConfigError, match=told):
            estimator.fit(EXAMPLE_INPUTS)
    unknown = ParameterString("Device")  # of a pipeline: the container will look
    PyTorch(**arguments, environment={"SMP_LITE_DEVICE": unknown})


def test_gpus_that_no_rank_uses_are_a_warning_of_each_request(tmp_path: Path) -> None:
    arguments = example(tmp_path / "source", instance_type="ml.p3.16xlarge")
    arguments["distribution"]["mpi"]["processes_per_host"] = 2
    estimator = PyTorch(**arguments)
    with pytest.warns(UserWarning, match=r"^6 of 8 GPUs of instance_type='ml\.p3\.16xlarge' stay idle"):
        estimator.dry_run(EXAMPLE_INPUTS)
    estimator.distribution["mpi"]["processes_per_host"] = 8
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        estimator.dry_run(EXAMPLE_INPUTS)


@pytest.mark.slow
def test_local_gpu_takes_the_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def job(processes: int | None, **changes: Any) -> PyTorch:
        distribution = example_distribution()
        if processes is None:
            del distribution["mpi"]["processes_per_host"]
        else:
            distribution["mpi"]["processes_per_host"] = processes
        (tmp_path / "train.py").touch()
        local = {"entry_point": "train.py", "role": ROLE, "instance_type": "local_gpu", "instance_count": 1}
        return PyTorch(**{**local, "distribution": distribution, **changes})

    def ranks(estimator: PyTorch) -> str:
        hyperparameters: dict[str, str] = estimator.dry_run()["HyperParameters"]
        return hyperparameters["sagemaker_mpi_num_of_processes_per_host"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert ranks(job(None)) == "4"
    assert ranks(job(8, environment={"SMP_LITE_SHARE_GPUS": "1"})) == "8"
    with pytest.raises(
        ConfigError, match=r"^mpi\.processes_per_host=8, but instance_type='local_gpu' has 4 GPUs"
    ):
        job(8)
    two_hosts = job(4)
    two_hosts.instance_count = 2  # which the SDK refuses only when the estimator is made
    with pytest.raises(
        ValueError, match=r"^instance_count=2 with instance_type='local_gpu': the GPUs of this"
    ):
        two_hosts.dry_run()
    # "local" does not look at them.
    assert ranks(job(8, instance_type="local")) == "8"
    assert ranks(job(None, instance_type="local")) == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        ConfigError, match=r"^instance_type='local_gpu' takes the GPUs of this machine, and none is"
    ):
        job(2)


@pytest.mark.parametrize("instance_type", ["local", "local_gpu"])
def test_a_local_job_needs_neither_versions_nor_an_image_nor_a_session(
    instance_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join("01234567"))
    estimator = PyTorch(
        entry_point="train.py",
        role=ROLE,
        instance_type=instance_type,
        instance_count=1,
        distribution=example_distribution(),
    )
    assert isinstance(estimator.sagemaker_session, LocalMPISession)
    assert estimator.image_uri == "smp-lite-local"


@pytest.mark.slow
def test_a_local_job_runs_with_a_rank_for_each_partition(tmp_path: Path) -> None:
    distribution = example_distribution()
    del distribution["mpi"]["processes_per_host"]
    arguments = example(tmp_path / "source", instance_type="local", distribution=distribution)
    (tmp_path / "source" / "training-script.py").write_text(
        "import os\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    open(os.environ['SM_MODEL_DIR'] + '/size', 'w').write(str(MPI.COMM_WORLD.size))\n"
    )
    estimator = PyTorch(**arguments | {"sagemaker_session": LocalMPISession(tmp_path / "jobs")})
    estimator.fit()
    with tarfile.open(urlsplit(estimator.model_data).path) as model:
        assert model.extractfile("size").read() == b"2"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["hyperparameters", "instance_type", "instance_count"])
def test_a_step_of_a_pipeline_may_have_variables(name: str, tmp_path: Path) -> None:
    variable = ParameterString("P", default_value="ml.p3.16xlarge")
    values = {
        "hyperparameters": {"epochs": variable},
        "instance_type": variable,
        "instance_count": ParameterInteger("N"),
    }
    changes = {name: values[name], "sagemaker_session": PipelineSession(boto_session(), default_bucket="b")}
    request = PyTorch(**example(tmp_path / "source", **changes)).dry_run(EXAMPLE_INPUTS)
    assert request["HyperParameters"]["sagemaker_mpi_enabled"] == "true"


def test_a_job_in_the_cloud_still_needs_its_versions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="framework_version or py_version was None, yet image_uri was also"):
        PyTorch(**example(tmp_path / "source", framework_version=None))


@pytest.mark.parametrize(
    "distribution", [{"torch_distributed": {"enabled": True}}, {"mpi": {"enabled": True}}]
)
def test_the_generic_estimator_drops_no_distribution_in_silence(
    distribution: dict[str, Any], tmp_path: Path
) -> None:
    arguments = example(tmp_path / "source", image_uri=IMAGE, distribution=distribution)
    with pytest.raises(
        ConfigError, match=r"Estimator takes distribution for smdistributed\.modelparallel only"
    ):
        Estimator(**arguments)


@pytest.mark.parametrize("distribution", [None, {}])
def test_the_generic_estimator_works_without_a_distribution(distribution: Any, tmp_path: Path) -> None:
    arguments = example(tmp_path / "source", image_uri=IMAGE, distribution=distribution)
    hyperparameters = Estimator(**arguments).dry_run(EXAMPLE_INPUTS)["HyperParameters"]
    assert "sagemaker_mpi_enabled" not in hyperparameters


def test_it_takes_its_arguments_by_position_as_the_sdk_does(tmp_path: Path) -> None:
    arguments = example(tmp_path / "source")
    first = ("entry_point", "framework_version", "py_version", "source_dir")
    estimator = PyTorch(*[arguments.pop(name) for name in first], **arguments)
    assert estimator.source_dir == str(tmp_path / "source")


@pytest.mark.slow
def test_importing_the_estimators_is_quiet_and_loads_no_torch() -> None:
    program = (
        "import sys\nfrom smp_lite.estimator import PyTorch\nprint({'torch', 'mpi4py'} & set(sys.modules))"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SAGEMAKER")}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "set()\n", result.stderr
    assert "SageMaker Python SDK v2" not in result.stderr


def test_checking_a_distribution_does_not_load_the_sdk() -> None:
    program = (
        "import sys\nfrom smp_lite.estimator import check_distribution\nprint('sagemaker' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr
