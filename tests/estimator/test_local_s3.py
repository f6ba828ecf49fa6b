"""Local jobs on data in S3: a moto server in this process takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest
from moto.server import ThreadedMotoServer
from sagemaker.exceptions import UnexpectedStatusException

from smp_lite.estimator.local_session import LocalMPISession
from tests.estimator.jobs import estimator, files_in

BUCKET = "my-bucket"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client; sessions and jobs started meanwhile talk to the same server."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    client = boto3.client("s3")
    client.create_bucket(
        Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": client.meta.region_name}
    )
    yield client
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    server.stop()


def test_data_code_checkpoints_and_outputs_can_all_be_in_s3(s3: Any, tmp_path: Path) -> None:
    for key in ("a.txt", "deep/b.txt"):
        s3.put_object(Bucket=BUCKET, Key=f"my_training_data/{key}", Body=key.encode())
    s3.put_object(Bucket=BUCKET, Key="my_training_data_of_others", Body=b"")
    s3.put_object(Bucket=BUCKET, Key="checkpoints/step-1", Body=b"one")
    checkpoints = tmp_path / "checkpoints"
    job = estimator(
        tmp_path,
        """
if rank == 0:
    directory = os.environ["SM_CHANNEL_TRAINING"]
    texts = [open(os.path.join(directory, name)).read() for name in ("a.txt", "deep/b.txt")]
    model("texts", " ".join(texts))
    directory = sys.argv[sys.argv.index("--checkpoints") + 1]
    model("checkpoint", open(os.path.join(directory, "step-1")).read())
    open(os.path.join(directory, "step-2"), "w").write("two")
""",
        output_path=f"s3://{BUCKET}/out",
        checkpoint_s3_uri=f"s3://{BUCKET}/checkpoints",
        checkpoint_local_path=str(checkpoints),
        hyperparameters={"checkpoints": str(checkpoints)},
    )
    job.fit(f"s3://{BUCKET}/my_training_data/", job_name="in-s3", logs="None")
    keys = {item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET)["Contents"]}
    assert {"in-s3/source/sourcedir.tar.gz", "out/in-s3/output/model.tar.gz", "checkpoints/step-2"} <= keys
    assert job.model_data == f"s3://{BUCKET}/out/in-s3/output/model.tar.gz"
    s3.download_file(BUCKET, "out/in-s3/output/model.tar.gz", str(tmp_path / "model.tar.gz"))
    files = files_in((tmp_path / "model.tar.gz").as_uri())
    assert files == {"texts": "a.txt deep/b.txt", "checkpoint": "one"}


def test_a_channel_without_objects_is_named(s3: Any, tmp_path: Path) -> None:
    job = estimator(tmp_path, "")
    with pytest.raises(
        UnexpectedStatusException, match=f"channel 'training': no object of S3 starts with s3://{BUCKET}/x"
    ):
        job.fit(f"s3://{BUCKET}/x", logs="None")


def test_a_bucket_that_does_not_exist_is_named(s3: Any, tmp_path: Path) -> None:
    job = estimator(tmp_path, "")
    with pytest.raises(
        UnexpectedStatusException, match=r"s3://no-such-bucket/x could not be reached.*NoSuchBucket"
    ):
        job.fit("s3://no-such-bucket/x", logs="None")


def test_output_that_cannot_be_uploaded_is_kept_and_said(s3: Any, tmp_path: Path) -> None:
    session = LocalMPISession(tmp_path / "jobs")
    job = estimator(
        tmp_path,
        "model(f'{rank}', '')",
        sagemaker_session=session,
        code_location=f"s3://{BUCKET}/code",
        output_path="s3://no-such-bucket/out",
    )
    with pytest.raises(UnexpectedStatusException, match="the outputs stay in"):
        job.fit(job_name="kept", logs="None")
    assert (tmp_path / "jobs" / "kept" / "output" / "model.tar.gz").is_file()
