"""Reading a job's files: what comes out, and what each mistake is told as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smp_lite.entrypoints.container.job import Job

TWO_HOSTS = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth1"}


def write(root: Path, **files: Any) -> Path:
    """The files of a job below `root`; a str is written as it is, anything else as JSON."""
    config = root / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (config / f"{name}.json").write_text(text, encoding="utf-8")
    return root


def of(**framework_parameters: Any) -> Job:
    return Job({}, framework_parameters, {"current_host": "algo-1", "hosts": ["algo-1"]}, {})


def test_the_seeds_job_is_read_whole(tmp_path: Path) -> None:
    write(
        tmp_path,
        hyperparameters={
            "epochs": "1",
            "mp_parameters": '{"partitions": 2, "ddp": true}',
            "sagemaker_program": '"training-script.py"',
            "sagemaker_submit_directory": '"s3://bucket/JOB/source/sourcedir.tar.gz"',
            "sagemaker_job_name": '"JOB"',
            "sagemaker_mpi_enabled": "true",
            "sagemaker_mpi_num_of_processes_per_host": "8",
            "sagemaker_mpi_custom_mpi_options": '"--mca btl_vader_single_copy_mechanism none "',
            "sagemaker_instance_type": '"ml.p3.16xlarge"',
        },
        resourceconfig=TWO_HOSTS,
        inputdataconfig={"training": {"TrainingInputMode": "File"}, "test": {}},
    )
    job = Job.read(tmp_path)
    assert job.hyperparameters == {"epochs": 1, "mp_parameters": {"partitions": 2, "ddp": True}}
    assert job.mp_parameters == {"partitions": 2, "ddp": True}
    assert (job.program, job.job_name) == ("training-script.py", "JOB")
    assert job.submit_directory == "s3://bucket/JOB/source/sourcedir.tar.gz"
    assert (job.mpi_enabled, job.processes_per_host) == (True, 8)
    assert job.custom_mpi_options == "--mca btl_vader_single_copy_mechanism none "
    assert job.instance_type == "ml.p3.16xlarge"
    assert (job.hosts, job.current_host, job.network_interface) == (("algo-1", "algo-2"), "algo-2", "eth1")
    assert (job.first_host, job.is_first_host) == ("algo-1", False)
    assert job.channel_dir("test") == tmp_path / "input" / "data" / "test"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ('"text"', "text"),
        ('"8"', "8"),
        ("[1, 2]", [1, 2]),
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("plain text", "plain text"),
        ("True", "True"),
        ("", ""),
        ('"größe 🙂"', "größe 🙂"),
        (7, 7),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_a_value_is_decoded_once_and_is_a_text_where_it_is_not_json(
    tmp_path: Path, written: Any, value: Any
) -> None:
    job = Job.read(write(tmp_path, hyperparameters={"x": written}))
    assert job.hyperparameters == {"x": value}
    assert type(job.hyperparameters["x"]) is type(value)


def test_a_job_without_files_has_one_host_and_no_settings(tmp_path: Path) -> None:
    job = Job.read(write(tmp_path))
    assert (job.hosts, job.is_first_host, job.network_interface) == (("algo-1",), True, "eth0")
    assert (job.mpi_enabled, job.processes_per_host, job.custom_mpi_options) == (False, None, "")
    assert (job.mp_parameters, job.program, job.submit_directory, job.job_name) == (None, None, None, None)
    assert job.instance_type is None


def test_the_services_own_hyperparameters_are_not_the_users(tmp_path: Path) -> None:
    job = Job.read(write(tmp_path, hyperparameters={"_tuning_objective_metric": "loss", "lr": "0.1"}))
    assert job.hyperparameters == {"lr": 0.1}
    assert job.framework_parameters == {"_tuning_objective_metric": "loss"}


@pytest.mark.parametrize("written", [{"partitions": 2}, '{"partitions": 2}', '"{\\"partitions\\": 2}"'])
def test_parameters_may_be_an_object_or_its_text(tmp_path: Path, written: Any) -> None:
    job = Job.read(write(tmp_path, hyperparameters={"mp_parameters": written}))
    assert job.mp_parameters == {"partitions": 2}


def test_the_instance_type_of_this_host_goes_before_the_one_that_was_asked_for() -> None:
    resources = {"current_host": "a", "hosts": ["a"], "current_instance_type": "ml.p4d.24xlarge"}
    job = Job({}, {"sagemaker_instance_type": "ml.p3.16xlarge"}, resources, {})
    assert job.instance_type == "ml.p4d.24xlarge"


def test_a_folder_without_a_job_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"there is no job in {tmp_path}/nowhere.*input/config"):
        Job.read(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["hyperparameters", "resourceconfig", "inputdataconfig"])
@pytest.mark.parametrize(
    ("text", "told"), [('{"a": 1', "as JSON"), ("[1]", "holds a list"), ("\N{ZERO WIDTH SPACE}", "as JSON")]
)
def test_a_broken_file_is_told_by_name(tmp_path: Path, name: str, text: str, told: str) -> None:
    write(tmp_path, **{name: text})
    with pytest.raises(ValueError, match=rf"{name}\.json.*{told}"):
        Job.read(tmp_path)


@pytest.mark.parametrize(
    ("resources", "told"),
    [
        ({"current_host": "algo-1"}, "hosts=None"),
        ({"current_host": "algo-1", "hosts": []}, r"hosts=\[\]"),
        ({"current_host": "algo-1", "hosts": "algo-1"}, "hosts='algo-1' must list"),
        ({"current_host": "algo-1", "hosts": ["algo-1", 2]}, "must list"),
        ({"current_host": "a", "hosts": ["a", "a"]}, "names a host twice"),
        ({"hosts": ["algo-1"]}, "current_host=None is none of"),
        (
            {"current_host": "a", "hosts": ["a"], "instance_groups": [{}]},
            r"instance_groups=\[\{\}\] must be a list",
        ),
        ({"current_host": "algo-3", "hosts": ["algo-1", "algo-2"]}, "current_host='algo-3' is none of"),
    ],
)
def test_wrong_hosts_are_told_by_file_and_key(tmp_path: Path, resources: Any, told: str) -> None:
    with pytest.raises(ValueError, match=rf"resourceconfig\.json: .*{told}"):
        Job.read(write(tmp_path, resourceconfig=resources))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", [8]])
def test_processes_per_host_must_be_a_positive_integer(value: Any) -> None:
    name = "sagemaker_mpi_num_of_processes_per_host"
    with pytest.raises(ValueError, match=rf"hyperparameters\.json: {name}=.*set processes_per_host to"):
        of(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sagemaker_mpi_enabled", "yes"),
        ("sagemaker_mpi_enabled", 1),
        ("sagemaker_mpi_custom_mpi_options", ["-x", "A"]),
        ("sagemaker_program", 7),
    ],
)
def test_a_setting_of_the_wrong_type_is_told_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"hyperparameters\.json: {name}=.* must be of type"):
        of(**{name: value})


@pytest.mark.parametrize("value", [5, "text", [1], "[1]"])
def test_parameters_that_are_no_object_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"mp_parameters=.*must be a JSON object"):
        Job({"mp_parameters": value}, {}, TWO_HOSTS, {})
