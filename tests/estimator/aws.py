"""Sessions and jobs for tests: the example of the SMP documentation, without AWS."""

from __future__ import annotations

import copy
import functools
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
import sagemaker
from moto.server import ThreadedMotoServer

from tests.example import MPI_OPTIONS, SMP_OPTIONS

ACCOUNT = "123456789012"
REGION = "us-west-2"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/R"
BUCKET = f"sagemaker-{REGION}-{ACCOUNT}"

EXAMPLE_INPUTS = "s3://my_bucket/my_training_data/"
EXAMPLE_REQUEST: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "create_training_job.seed.json").read_text()
)
"""What the SDK's own class sends for the example, recorded from version 2.257.7."""

_EXAMPLE_DISTRIBUTION = {"smdistributed": {"modelparallel": SMP_OPTIONS}, "mpi": MPI_OPTIONS}


@functools.cache
def boto_session() -> boto3.Session:
    """One for all, because it takes long to read what it knows of AWS."""
    return boto3.Session("testing", "testing", region_name=REGION)


def session() -> sagemaker.Session:
    """A session of the SDK with AWS, or with whatever AWS_ENDPOINT_URL names."""
    return sagemaker.Session(boto_session())


def example_distribution() -> dict[str, Any]:
    """The distribution of the example, to change at will."""
    return copy.deepcopy(_EXAMPLE_DISTRIBUTION)


def example(source_dir: Path, **changes: Any) -> dict[str, Any]:
    """The arguments of the example's estimator, with its script in `source_dir`."""
    source_dir.mkdir(exist_ok=True)
    (source_dir / "training-script.py").write_text("print('trained')\n")
    arguments = {
        "entry_point": "training-script.py",
        "source_dir": str(source_dir),
        "role": ROLE,
        "instance_type": "ml.p3.16xlarge",
        "instance_count": 1,
        "framework_version": "1.6.0",
        "py_version": "py3",
        "distribution": example_distribution(),
        "base_job_name": "SMD-MP-demo",
        **changes,
    }
    return {"sagemaker_session": session(), **arguments}


def without_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the SDK from reporting each `fit` to AWS.

    Its own switch is an entry of a configuration that it then validates at every step, for seconds.
    """
    monkeypatch.setattr("sagemaker.telemetry.telemetry_logging._send_telemetry_request", lambda *_: None)


@contextmanager
def moto_server() -> Iterator[str]:
    """AWS as an HTTP server in this process, with the bucket of the example; its address."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # What such a server holds belongs to the process, and outlives the server.
        urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()
        s3 = boto_session().client("s3", endpoint_url=url)
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        yield url
    finally:
        server.stop()
