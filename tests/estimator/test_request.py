"""The request: what `fit` sends, what the service accepts, and that `dry_run` tells it beforehand."""

from __future__ import annotations

import io
import json
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sagemaker.estimator
import sagemaker.pytorch
from botocore.exceptions import ParamValidationError
from botocore.validate import ParamValidator
from sagemaker.debugger import DebuggerHookConfig
from sagemaker.inputs import FileSystemInput, TrainingInput

from smp_lite.config import ConfigError
from smp_lite.estimator import Estimator, LocalMPISession, PyTorch, request_of
from tests.estimator.aws import (
    BUCKET,
    EXAMPLE_INPUTS,
    EXAMPLE_REQUEST,
    ROLE,
    boto_session,
    example,
    moto_server,
    without_telemetry,
)
from tests.sampling import one_in

pytestmark = pytest.mark.sampled(3)

IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def aws(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every client of boto3 talks to the server in this process; returns its S3."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    without_telemetry(monkeypatch)
    return boto_session().client("s3")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection was opened: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def sent_by_fit(estimator: Any, inputs: Any, job_name: str) -> dict[str, Any]:
    """The body of the POST that `fit` makes."""
    bodies = []
    client = estimator.sagemaker_session.sagemaker_client
    client.meta.events.register(
        "before-send.sagemaker.CreateTrainingJob", lambda request, **_: bodies.append(request.body)
    )
    estimator.fit(inputs, job_name=job_name, wait=False)
    (body,) = bodies
    request: dict[str, Any] = json.loads(body)
    return request


def with_name(request: dict[str, Any], new: str, old: str = "JOB") -> dict[str, Any]:
    """The request of a job (the recorded one is called JOB) as it is under another name."""
    renamed: dict[str, Any] = json.loads(json.dumps(request).replace(old, new))
    return renamed


@pytest.mark.parametrize("estimator_class", [sagemaker.pytorch.PyTorch, PyTorch])
@pytest.mark.usefixtures("no_network")
def test_a_dry_run_of_the_example_is_the_recorded_request(estimator_class: Any, tmp_path: Path) -> None:
    estimator = estimator_class(**example(tmp_path / "utils"))
    assert request_of(estimator, EXAMPLE_INPUTS, job_name="JOB") == EXAMPLE_REQUEST


@pytest.mark.parametrize("estimator_class", [sagemaker.pytorch.PyTorch, PyTorch])
def test_fit_of_the_example_sends_the_recorded_request(
    estimator_class: Any, tmp_path: Path, aws: Any
) -> None:
    name = f"recorded-{estimator_class.__module__.split('.')[0].replace('_', '-')}"
    estimator = estimator_class(**example(tmp_path / "utils", output_path=f"s3://{BUCKET}/"))
    assert sent_by_fit(estimator, EXAMPLE_INPUTS, name) == with_name(EXAMPLE_REQUEST, name)
    echo = estimator.sagemaker_session.sagemaker_client.describe_training_job(TrainingJobName=name)
    told = with_name(EXAMPLE_REQUEST, name)
    del told["ProfilerConfig"]  # which the server forgets
    for key, value in told.items():
        if isinstance(value, dict):  # the server adds metrics that nobody asked for
            assert echo[key] | value == echo[key]
        else:
            assert echo[key] == value


JOBS: dict[str, dict[str, Any]] = {
    "the example": {},
    "two hosts": {"instance_count": 2},
    "an image of the user's": {"image_uri": IMAGE, "framework_version": None, "py_version": None},
    "the same without smp_lite": {"image_uri": IMAGE, "ship_package": False},
    "the same with an entry point": {"image_uri": IMAGE, "container_entry_point": ["/run"]},
    "no network": {"image_uri": IMAGE, "enable_network_isolation": True},
    "no network in an image of AWS": {"enable_network_isolation": True},
    "another place for the code": {"code_location": f"s3://{BUCKET}/code/of/mine"},
    "another place for the output": {"output_path": f"s3://{BUCKET}/output/of/mine"},
    "many options": {
        "hyperparameters": {"epochs": 3, "name": "text", "nested": {"a": [1, 2.5]}, "flag": True},
        "environment": {"A": "b"},
        "tags": [{"Key": "team", "Value": "a"}],
        "use_spot_instances": True,
        "max_run": 3600,
        "max_wait": 7200,
        "checkpoint_s3_uri": f"s3://{BUCKET}/checkpoints",
        "checkpoint_local_path": "/opt/ml/checkpoints",
        "metric_definitions": [{"Name": "loss", "Regex": "loss=(.*)"}],
        "subnets": ["subnet-1"],
        "security_group_ids": ["sg-1"],
        "encrypt_inter_container_traffic": True,
        "output_kms_key": "key",
        "max_retry_attempts": 2,
        "debugger_hook_config": DebuggerHookConfig(hook_parameters={"save_interval": "10"}),
    },
    "an order of letters": {"parameters": {"partitions": 2, "placement_strategy": "PDT", "ddp": True}},
    "another name of partitions": {"parameters": {"pipeline_parallel_degree": 8, "default_partition": 1}},
    "no model parallelism": {
        "distribution": {"torch_distributed": {"enabled": True}},
        "framework_version": "2.2.0",
        "py_version": "py310",
    },
}


def arguments_of(job: str, source_dir: Path) -> dict[str, Any]:
    changes = dict(JOBS[job])
    parameters = changes.pop("parameters", None)
    arguments = example(source_dir, **{"output_path": f"s3://{BUCKET}/", **changes})
    if parameters is not None:
        arguments["distribution"]["smdistributed"]["modelparallel"]["parameters"] = parameters
    return arguments


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize("job", one_in(2, JOBS))
def test_a_dry_run_is_what_fit_sends_and_the_service_accepts(job: str, tmp_path: Path) -> None:
    name = job.replace(" ", "-").replace("'", "")
    estimator = PyTorch(**arguments_of(job, tmp_path / "source"))
    before = estimator.dry_run(EXAMPLE_INPUTS, job_name=name)
    assert_accepted(before)
    sent = sent_by_fit(estimator, EXAMPLE_INPUTS, name)
    assert before == sent
    assert estimator.dry_run(EXAMPLE_INPUTS, job_name=name) == sent


@pytest.mark.usefixtures("aws")
def test_a_dry_run_makes_no_difference_to_fit(tmp_path: Path) -> None:
    first, second = (PyTorch(**arguments_of("an image of the user's", tmp_path / "source")) for _ in range(2))
    first.dry_run({"other": "s3://b/other"}, job_name="A1")
    assert sent_by_fit(first, EXAMPLE_INPUTS, "B1") == with_name(
        sent_by_fit(second, EXAMPLE_INPUTS, "B2"), "B1", "B2"
    )


def assert_accepted(request: dict[str, Any]) -> None:
    """By the service's own description of CreateTrainingJob, as botocore has it."""
    model = boto_session().client("sagemaker").meta.service_model
    report = ParamValidator().validate(request, model.operation_model("CreateTrainingJob").input_shape)
    assert not report.has_errors(), report.generate_report()


NOT_SENT = [
    ({"environment": {"A": 1}}, EXAMPLE_INPUTS, r"type for parameter Environment\.A, value: 1"),
    ({"max_run": None}, EXAMPLE_INPUTS, r"StoppingCondition\.MaxRuntimeInSeconds, value: None"),
    ({"tags": [{"K": 1}]}, EXAMPLE_INPUTS, r'Missing required parameter in Tags\[0\]: "Key"'),
    ({}, {"train": "file:///data"}, 'parameter in InputDataConfig.*"FileDataSource"'),
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("changes", "inputs", "text"), NOT_SENT)
@pytest.mark.usefixtures("aws")
def test_a_dry_run_refuses_what_the_client_refuses(
    changes: dict[str, Any], inputs: Any, text: str, tmp_path: Path
) -> None:
    estimator = PyTorch(**example(tmp_path / "source", output_path=f"s3://{BUCKET}/", **changes))
    with pytest.raises(ParamValidationError, match=text) as in_fit:
        estimator.fit(inputs, job_name="refused", wait=False)
    with pytest.raises(ParamValidationError) as in_dry_run:
        estimator.dry_run(inputs, job_name="refused")
    assert str(in_dry_run.value) == str(in_fit.value)


INPUTS = [
    None,
    {"train": "s3://b/train", "test": TrainingInput("s3://b/test", content_type="text/csv")},
    TrainingInput("s3://b/train", input_mode="FastFile"),
    FileSystemInput("fs-0123456789abcdef0", "EFS", "/data"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize("number", range(len(INPUTS)))
def test_every_kind_of_inputs_is_told(number: int, tmp_path: Path) -> None:
    arguments = example(
        tmp_path / "source", output_path=f"s3://{BUCKET}/", subnets=["s"], security_group_ids=["g"]
    )
    estimator = PyTorch(**arguments)
    request = estimator.dry_run(INPUTS[number], job_name=f"inputs{number}")
    assert request == sent_by_fit(estimator, INPUTS[number], f"inputs{number}")


@pytest.mark.usefixtures("no_network")
def test_a_dry_run_sends_nothing_and_changes_nothing(tmp_path: Path) -> None:
    estimator = PyTorch(**arguments_of("an image of the user's", tmp_path / "source"))
    before = describe(estimator)
    estimator.dry_run({"train": TrainingInput("s3://b/train")}, job_name="J")
    assert describe(estimator) == before


def describe(estimator: Any) -> str:
    return repr(sorted((name, repr(value)) for name, value in vars(estimator).items()))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"role": "R"},
            "dry_run cannot know the default bucket|dry_run cannot know the name of the default bucket",
        ),
        (
            {"role": "R", "output_path": "s3://b/"},
            r"cannot know the ARN of role='R' .*arn:aws:iam::<account>:role/R",
        ),
        ({"git_config": {"repo": "https://example.org/r.git"}}, "git_config needs one: clone the repository"),
    ],
)
def test_what_only_the_network_knows_is_an_error(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    estimator = PyTorch(**example(tmp_path / "source", **changes))
    with pytest.raises(ValueError, match=text):
        estimator.dry_run(EXAMPLE_INPUTS)


def test_the_source_travels_with_smp_lite(tmp_path: Path, aws: Any) -> None:
    estimator = PyTorch(**example(tmp_path / "source", output_path=f"s3://{BUCKET}/"))
    estimator.fit(EXAMPLE_INPUTS, job_name="travels", wait=False)
    names = names_in_archive(aws, "travels")
    assert {"training-script.py", "smp_lite/__init__.py", "smp_lite/entrypoints/train.py"} <= names
    assert estimator.dependencies == []

    estimator.ship_package = False
    estimator.fit(EXAMPLE_INPUTS, job_name="alone", wait=False)
    assert names_in_archive(aws, "alone") == {"training-script.py"}


def names_in_archive(s3: Any, job_name: str) -> set[str]:
    body = s3.get_object(Bucket=BUCKET, Key=f"{job_name}/source/sourcedir.tar.gz")["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        return {member.name for member in archive if member.isfile()}


def test_a_job_with_an_image_of_its_own_starts_with_our_entry_point(tmp_path: Path) -> None:
    estimator = PyTorch(**arguments_of("an image of the user's", tmp_path / "source"))
    request = estimator.dry_run(EXAMPLE_INPUTS, job_name="JOB")
    command = request["AlgorithmSpecification"]["ContainerEntrypoint"]
    assert command[:2] == ["python3", "-c"]
    assert all(len(word) <= 256 for word in command), "the limit of the service"
    (code,) = (channel for channel in request["InputDataConfig"] if channel["ChannelName"] == "code")
    assert code["DataSource"]["S3DataSource"]["S3Uri"] == f"s3://{BUCKET}/JOB/source/sourcedir.tar.gz"
    submit_directory = json.loads(request["HyperParameters"]["sagemaker_submit_directory"])
    assert submit_directory == sagemaker.estimator.EstimatorBase.CONTAINER_CODE_CHANNEL_SOURCEDIR_PATH


@pytest.mark.usefixtures("aws")
def test_the_entry_point_goes_when_it_is_not_wanted_any_more(tmp_path: Path) -> None:
    estimator = PyTorch(**arguments_of("no network", tmp_path / "source"))
    first = sent_by_fit(estimator, EXAMPLE_INPUTS, "wanted")
    assert "ContainerEntrypoint" in first["AlgorithmSpecification"]
    estimator.ship_package = False
    second = estimator.dry_run(EXAMPLE_INPUTS, job_name="unwanted")
    assert "ContainerEntrypoint" not in second["AlgorithmSpecification"]
    # The SDK's own channel of a container without network stays.
    assert [channel["ChannelName"] for channel in second["InputDataConfig"]] == ["training", "code"]


def test_the_generic_estimator_sends_the_same_hyperparameters(tmp_path: Path) -> None:
    arguments = arguments_of("an image of the user's", tmp_path / "source")
    for name in ("framework_version", "py_version"):
        del arguments[name]
    arguments |= {"hyperparameters": {"epochs": 3}}
    generic = Estimator(**arguments).dry_run(EXAMPLE_INPUTS, job_name="JOB")
    ours = PyTorch(**arguments).dry_run(EXAMPLE_INPUTS, job_name="JOB")
    assert generic["HyperParameters"] == ours["HyperParameters"]
    assert generic["AlgorithmSpecification"] == ours["AlgorithmSpecification"]
    assert generic["InputDataConfig"] == ours["InputDataConfig"]


@pytest.mark.slow
def test_a_dry_run_of_a_local_job_is_told_too(tmp_path: Path) -> None:
    from smp_lite.estimator import LocalMPISession

    arguments = example(tmp_path / "source", instance_type="local", role=ROLE)
    arguments["sagemaker_session"] = LocalMPISession(tmp_path / "jobs")
    request = PyTorch(**arguments).dry_run({"train": "file:///data"}, job_name="JOB")
    assert request["HyperParameters"]["sagemaker_mpi_num_of_processes_per_host"] == "8"
    assert not (tmp_path / "jobs" / "JOB").exists()
    (channel,) = request["InputDataConfig"]
    assert channel["DataSource"]["FileDataSource"]["FileUri"] == "file:///data"
    arguments["environment"] = {"A": 1}
    with pytest.raises(ParamValidationError, match=r"Environment\.A"):
        PyTorch(**arguments).dry_run({"train": "file:///data"})


SECRET = "SMP_LITE_JOB_SECRET"


def of_two_hosts(source_dir: Path, **changes: Any) -> PyTorch:
    return PyTorch(**arguments_of("an image of the user's", source_dir) | {"instance_count": 2, **changes})


@pytest.mark.slow
@pytest.mark.usefixtures("aws")
def test_each_job_over_several_hosts_gets_a_secret_of_its_own(tmp_path: Path) -> None:
    estimator = of_two_hosts(tmp_path / "source", environment={"A": "b"})
    requests = [
        estimator.dry_run(EXAMPLE_INPUTS, job_name="dry"),
        sent_by_fit(estimator, EXAMPLE_INPUTS, "first-of-two-hosts"),
        sent_by_fit(estimator, EXAMPLE_INPUTS, "second-of-two-hosts"),
        estimator.dry_run(EXAMPLE_INPUTS, job_name="dry"),
    ]
    secrets = {request["Environment"].pop(SECRET) for request in requests}
    assert len(secrets) == len(requests)
    assert {len(secret) for secret in secrets} == {43}
    assert [request["Environment"] for request in requests] == [{"A": "b"}] * len(requests)
    assert requests[0] == requests[3] == with_name(requests[1], "dry", "first-of-two-hosts")
    assert_accepted(requests[0] | {"Environment": {SECRET: secrets.pop()}})
    estimator.instance_count = 1
    assert estimator.dry_run(EXAMPLE_INPUTS)["Environment"] == {"A": "b"}


def test_the_users_own_secret_stays(tmp_path: Path) -> None:
    given = {SECRET: "s" * 32}
    estimator = of_two_hosts(tmp_path / "source", environment=given)
    for _ in range(2):
        assert estimator.dry_run(EXAMPLE_INPUTS)["Environment"] == given


def test_a_secret_that_could_be_guessed_is_refused_before_the_upload(tmp_path: Path) -> None:
    estimator = of_two_hosts(tmp_path / "source", environment={SECRET: "hunter2"})
    with pytest.raises(ConfigError, match="SMP_LITE_JOB_SECRET is 7 characters long, and needs 32") as raised:
        estimator.dry_run(EXAMPLE_INPUTS)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"instance_count": 1},
        {"image_uri": None, "framework_version": "2.2.0", "py_version": "py310"},
        {"sagemaker_session": "local", "instance_type": "local"},
    ],
    ids=["one host", "an image of AWS, whose launcher is another", "on this machine"],
)
def test_a_job_whose_hosts_use_no_port_gets_no_secret(changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("sagemaker_session") == "local":
        changes = {**changes, "sagemaker_session": LocalMPISession(tmp_path / "jobs")}
    request = of_two_hosts(tmp_path / "source", **changes).dry_run()
    assert SECRET not in request.get("Environment", {})


def test_a_job_of_the_generic_estimator_gets_a_secret(tmp_path: Path) -> None:
    arguments = arguments_of("an image of the user's", tmp_path / "source") | {"instance_count": 2}
    for name in ("framework_version", "py_version"):
        del arguments[name]
    assert len(Estimator(**arguments).dry_run(EXAMPLE_INPUTS)["Environment"][SECRET]) == 43
