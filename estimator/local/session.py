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

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
from sagemaker.estimator import _TrainingJob
from sagemaker.exceptions import UnexpectedStatusException
from sagemaker.local import LocalSession
from sagemaker.session import _check_job_status

from ..quiet import TELEMETRY_OPT_OUT, quieten_telemetry
from .bucket import LOCAL_BUCKET, LocalS3Client, LocalS3Resource
from .client import LocalMPIClient
from .packing import leave_jobs_out
from .record import ENDED
from .request import wrong_checkpoint_path
from .store import Store

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
        super().__init__(
            boto_session=boto_session or boto3.Session(),
            s3_endpoint_url=s3_endpoint_url,
            disable_local_code=True,  # code goes the way it goes to the cloud: packed, with dependencies
            sagemaker_config=TELEMETRY_OPT_OUT,
        )

    def _initialize(self, boto_session: boto3.Session, **_: Any) -> None:
        # Not the parent's: it makes S3 clients, for which boto3 looks for credentials on the network.
        self.boto_session = boto_session
        self._region_name = boto_session.region_name or _DEFAULT_REGION
        self.local_mode = True
        self.sagemaker_config = TELEMETRY_OPT_OUT
        self.config = None
        where = {"region_name": self._region_name, "endpoint_url": self.s3_endpoint_url}
        client = _Late(lambda: boto_session.client("s3", **where))
        self.s3_client = LocalS3Client(self.directory, client)
        self.s3_resource = LocalS3Resource(
            self.directory, _Late(lambda: boto_session.resource("s3", **where))
        )
        store = Store(self.directory, client)
        self.sagemaker_client = LocalMPIClient(self.directory, store, self._region_name)

    @LocalSession.config.setter
    def config(self, value: dict[str, Any] | None) -> None:
        """The SDK's configuration of its local mode. `local_code` has no effect: code goes the way that it
        goes to the cloud."""
        local = {**(value or {}).get("local", {}), "local_code": False}
        LocalSession.config.fset(self, {**(value or {}), "local": local})

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
            UnexpectedStatusException: it failed, ran for longer than `max_run`, or the wait was interrupted,
                which stops it.
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
            UnexpectedStatusException: with `wait`, as of `wait_for_job`.
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
            # No KeyboardInterrupt, for the SDK's `fit` would return as if nothing had happened: its telemetry
            # has a `return` in a `finally`, which loses whatever is no Exception.
            raise UnexpectedStatusException(
                message=f"Training job {name} was interrupted (KeyboardInterrupt), and is being stopped",
                allowed_statuses=["Completed"],
                actual_status=client.describe_training_job(name)["TrainingJobStatus"],
            ) from None
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
        paths = estimator.checkpoint_s3_uri, estimator.checkpoint_local_path
        if ours and (wrong := wrong_checkpoint_path(*paths)) is not None:
            raise ValueError(wrong)
        original(local_mode and not ours, estimator, train_args)

    _TrainingJob._add_spot_checkpoint_args = classmethod(add)


_allow_what_docker_cannot()
leave_jobs_out(lambda session: session.directory if isinstance(session, LocalMPISession) else None)


class _Logs:
    """Prints what is new in files, into which whole lines are written."""

    def __init__(self, files: list[Path]) -> None:
        self._positions = dict.fromkeys(files, 0)

    def print_new(self) -> None:
        for path, position in self._positions.items():
            if path.exists():
                with path.open("rb") as file:
                    file.seek(position)
                    data = file.read()
                self._positions[path] += len(data)
                sys.stdout.write(_writable(data))
        sys.stdout.flush()


def _writable(data: bytes) -> str:
    """A script's output as text, with `?` for what the encoding of standard output has no letter for."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return data.decode(errors="replace").encode(encoding, errors="replace").decode(encoding)
