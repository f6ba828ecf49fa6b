"""Local MPI mode: the SDK's own estimators, with the job run here instead of in the cloud.

    PyTorch(..., sagemaker_session=LocalMPISession()).fit({"train": "file://data"})

The seam is the session, not the estimator. The estimator builds the real CreateTrainingJob request,
our client takes it in place of AWS's and runs it as MPI processes. So one contract serves laptop
and cloud, and whatever a user gives the estimator keeps its meaning.

It derives from the SDK's LocalSession because the SDK asks for that class where `instance_type` is
"local". What it takes over is what would need Docker (`sagemaker_client`), AWS (the account's
bucket, the role) or a network (telemetry).
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import ClientError
from sagemaker.estimator import _TrainingJob
from sagemaker.exceptions import UnexpectedStatusException
from sagemaker.local import LocalSession
from sagemaker.session import _check_job_status

from .local_job import ENDED, LocalTrainingJob
from .local_store import LOCAL_BUCKET, LocalS3Resource, Store
from .quiet import TELEMETRY_OPT_OUT, quieten_telemetry

__all__ = ["LocalMPISession"]

_DEFAULT_REGION = "us-west-2"
_POLL_S = 0.1


class LocalMPISession(LocalSession):
    """A session whose training jobs run on this machine, under MPI, without Docker or AWS.

    Args:
        directory: where jobs keep everything: source, logs, outputs. The session's bucket,
            `s3://smp-lite-local`, is this folder.
        boto_session: for buckets of your own; credentials are only needed for these.
        default_bucket: a real bucket in place of the folder.
        s3_endpoint_url: another S3 service.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] = "smp_lite_jobs",
        boto_session: boto3.Session | None = None,
        default_bucket: str | None = None,
        s3_endpoint_url: str | None = None,
    ) -> None:
        quieten_telemetry()
        self.directory = Path(os.path.abspath(directory))
        self._bucket = default_bucket or LOCAL_BUCKET
        boto_session = boto_session or boto3.Session()
        if boto_session.region_name is None:
            boto_session = boto3.Session(region_name=_DEFAULT_REGION)
        super().__init__(
            boto_session=boto_session,
            s3_endpoint_url=s3_endpoint_url,
            disable_local_code=True,  # code goes the way it goes to the cloud: packed, with dependencies
            sagemaker_config=TELEMETRY_OPT_OUT,
        )

    def _initialize(self, boto_session: boto3.Session, **_: Any) -> None:
        # Not the parent's: it makes S3 clients, for which boto3 looks for credentials on the network.
        self.boto_session = boto_session
        self._region_name = boto_session.region_name
        self.local_mode = True
        self.sagemaker_config = TELEMETRY_OPT_OUT
        self.config = {"local": {"local_code": False}}
        self.s3_client = _Late(lambda: boto_session.client("s3", endpoint_url=self.s3_endpoint_url))
        resource = _Late(lambda: boto_session.resource("s3", endpoint_url=self.s3_endpoint_url))
        self.s3_resource = LocalS3Resource(self.directory, resource)
        store = Store(self.directory, self.s3_client)
        self.sagemaker_client = _LocalMPIClient(self.directory, store, self._region_name)

    def default_bucket(self) -> str:
        """The bucket of this session; asks nobody."""
        return self._bucket

    def expand_role(self, role: str) -> str:
        """`role` as an ARN; there is no account to look it up in."""
        return role if "/" in role else f"arn:aws:iam::000000000000:role/{role}"

    def _get_account_id_if_default_bucket(self, bucket: str) -> None:
        """No account owns the local bucket."""

    def wait_for_job(self, job: str, poll: float = _POLL_S) -> dict[str, Any]:
        """Wait until the job has ended.

        Raises:
            UnexpectedStatusException: it failed, or ran for longer than `max_run`.
        """
        return self._wait(job, quiet=True, timeout=None)

    def logs_for_job(
        self,
        job_name: str,
        wait: bool | str = False,
        poll: float = _POLL_S,
        log_type: str = "All",
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Print what the job has printed, and with `wait` what it prints until it has ended.

        Raises:
            UnexpectedStatusException: with `wait`, the job failed, or ran for longer than `max_run`.
        """
        quiet = log_type in ("None", "Rules")
        if wait:
            return self._wait(job_name, quiet=quiet, timeout=timeout)
        if not quiet:
            _Logs(self.sagemaker_client.log_files(job_name)).print_new()
        return self.sagemaker_client.describe_training_job(job_name)

    def _wait(self, name: str, *, quiet: bool, timeout: float | None) -> dict[str, Any]:
        client = self.sagemaker_client
        logs = _Logs([] if quiet else client.log_files(name))
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        try:
            while True:
                description = client.describe_training_job(name)
                logs.print_new()
                if description["TrainingJobStatus"] in ENDED or time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            # In the cloud the job would run on; here it would take the machine from whoever stopped it.
            client.stop_training_job(name)
            raise
        if description["TrainingJobStatus"] not in ENDED:
            print(f"job {name} is still running after {timeout} s", flush=True)
            return description
        if description["SecondaryStatus"] == "MaxRuntimeExceeded":
            raise UnexpectedStatusException(
                message=f"Error for Training job {name}: Stopped. Reason: {description['FailureReason']}",
                allowed_statuses=["Completed"],
                actual_status="Stopped",
            )
        _check_job_status(name, description, "TrainingJobStatus")
        return description


class _Late:
    """What `make` makes, made when it is first used."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name == "_made":
            self._made = self._make()
            return self._made
        return getattr(self._made, name)


def _allow_what_docker_cannot() -> None:
    """Let a LocalMPISession have checkpoints and spot instances: the SDK refuses both to any local session,
    for its own local mode has neither."""
    original = _TrainingJob._add_spot_checkpoint_args

    def add(cls: type, local_mode: bool, estimator: Any, train_args: dict[str, Any]) -> None:
        ours = isinstance(estimator.sagemaker_session, LocalMPISession)
        original(local_mode and not ours, estimator, train_args)

    _TrainingJob._add_spot_checkpoint_args = classmethod(add)


_allow_what_docker_cannot()


class _LocalMPIClient:
    """The calls of the SageMaker client that training jobs need, with its names and errors."""

    def __init__(self, directory: Path, store: Store, region: str) -> None:
        self._directory = directory
        self._store = store
        self._region = region
        self._jobs: dict[str, LocalTrainingJob] = {}
        atexit.register(self._end_all)

    def create_training_job(self, **request: Any) -> dict[str, str]:
        """Start the job; returns at once."""
        name = request["TrainingJobName"]
        if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name):
            raise _error("CreateTrainingJob", "ValidationException", f"job name {name!r} is not valid")
        _refuse_unsupported(request)
        directory = self._directory / name
        try:
            # The SDK has put the source code there already.
            (directory / "hosts").mkdir(parents=True)
        except FileExistsError:
            raise _error(
                "CreateTrainingJob", "ResourceInUse", f"job {name!r} exists already in {self._directory}"
            ) from None
        job = LocalTrainingJob(request, directory, self._store, self._region)
        self._jobs[name] = job
        job.start()
        return {"TrainingJobArn": job.describe()["TrainingJobArn"]}

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        return self._job("DescribeTrainingJob", TrainingJobName).describe()

    def stop_training_job(self, TrainingJobName: str) -> None:
        self._job("StopTrainingJob", TrainingJobName).stop()

    def log_files(self, name: str) -> list[Path]:
        return self._job("DescribeTrainingJob", name).log_files()

    def _job(self, operation: str, name: str) -> LocalTrainingJob:
        if name not in self._jobs:
            raise _error(operation, "ValidationException", f"this session has started no job {name!r}")
        return self._jobs[name]

    def _end_all(self) -> None:
        for job in self._jobs.values():
            if job.describe()["TrainingJobStatus"] not in ENDED:
                print(
                    f"job {job.name} is stopped: a local job ends with the Python that started it; "
                    "to wait for it, call estimator.latest_training_job.wait()",
                    file=sys.stderr,
                )
                job.end_now()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(f"LocalMPISession runs training jobs only: {name} is not available locally")


class _Logs:
    """Prints what is new in files, whole lines at a time."""

    def __init__(self, files: list[Path]) -> None:
        self._positions = dict.fromkeys(files, 0)

    def print_new(self) -> None:
        for path, position in self._positions.items():
            if path.exists():
                with path.open("rb") as file:
                    file.seek(position)
                    data = file.read()
                self._positions[path] += len(data)
                sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()


def _refuse_unsupported(request: Mapping[str, Any]) -> None:
    """What this machine cannot do as the request means it."""
    # An entry point of ours is what runs here anyway; another one would need its image.
    command = request["AlgorithmSpecification"].get("ContainerEntrypoint")
    if command is not None and not any("smp_lite" in word for word in command):
        raise ValueError(
            f"container_entry_point={command!r} needs its image, and LocalMPISession runs none: leave it out "
            "for local runs"
        )
    if "InstanceCount" not in request["ResourceConfig"]:
        raise ValueError(
            "instance_groups are not supported in local mode: use instance_count and instance_type"
        )


def _error(operation: str, code: str, message: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)
