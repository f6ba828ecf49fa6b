"""Local jobs on data in S3: a moto server in this process takes its place."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest
from moto.server import ThreadedMotoServer
from sagemaker.exceptions import UnexpectedStatusException
from sagemaker.s3 import S3Downloader, S3Uploader

from smp_lite.estimator.local.session import LocalMPISession
from smp_lite.estimator.local.store import Store
from tests.estimator.jobs import estimator, files_in

pytestmark = pytest.mark.sampled(3)

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_bucket_that_does_not_exist_is_named(s3: Any, tmp_path: Path) -> None:
    job = estimator(tmp_path, "")
    with pytest.raises(
        UnexpectedStatusException, match=r"s3://no-such-bucket/x could not be reached.*NoSuchBucket"
    ):
        job.fit("s3://no-such-bucket/x", logs="None")


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/absolute.txt", None),
        ("../../../../escaped.txt", "escaped.txt' would be written outside its folder"),
    ],
)
def test_no_object_is_written_outside_its_channel(
    s3: Any, tmp_path: Path, name: str, message: str | None
) -> None:
    directory = tmp_path / "a" / "b" / "c" / "d"
    s3.put_object(Bucket=BUCKET, Key=f"data/{name}", Body=b"")
    store = Store(tmp_path, s3)
    keys = store.keys(f"s3://{BUCKET}/data")
    if message is None:
        store.download(f"s3://{BUCKET}/data", keys, directory)
        assert (directory / "absolute.txt").is_file()
    else:
        with pytest.raises(ValueError, match=message):
            store.download(f"s3://{BUCKET}/data", keys, directory)
        assert not list(tmp_path.rglob("escaped.txt"))


def test_no_key_leads_out_of_the_local_bucket(tmp_path: Path) -> None:
    session = LocalMPISession(tmp_path / "jobs")
    session.upload_string_as_file_body("x", "smp-lite-local", "/absolute.txt")
    assert (tmp_path / "jobs" / "absolute.txt").is_file()
    with pytest.raises(ValueError, match=r"'\.\./x' would be written outside its folder"):
        session.upload_string_as_file_body("x", "smp-lite-local", "../x")


def test_names_that_cannot_be_files_side_by_side_are_named(s3: Any, tmp_path: Path) -> None:
    for key in ("data/a", "data/a/b"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"")
    uri = f"s3://{BUCKET}/data"
    store = Store(tmp_path, s3)
    with pytest.raises(ValueError, match="the object 'data/a/b' cannot become the file"):
        store.download(uri, store.keys(uri), tmp_path / "channel")


@pytest.mark.slow
def test_the_credentials_and_the_endpoint_of_the_session_are_those_of_the_job(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = s3.meta.endpoint_url
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    ours = boto3.Session(aws_access_key_id="mine", aws_secret_access_key="secret")
    session = LocalMPISession(tmp_path / "jobs", boto_session=ours, s3_endpoint_url=endpoint)
    assert session.boto_session is ours
    assert session.boto_region_name == "us-west-2"
    job = estimator(tmp_path, "model(f'{rank}', '')", sagemaker_session=session)
    with tarfile.open(tmp_path / "code.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "source" / "train.py", "train.py")
    s3.upload_file(str(tmp_path / "code.tar.gz"), BUCKET, "code.tar.gz")
    job.source_dir = f"s3://{BUCKET}/code.tar.gz"
    job.fit(logs="None")
    assert files_in(job.model_data) == {"0": "", "1": ""}


@pytest.mark.slow
def test_source_code_that_is_not_there_is_named(s3: Any, tmp_path: Path) -> None:
    job = estimator(tmp_path, "", source_dir=f"s3://{BUCKET}/code.tar.gz")
    with pytest.raises(
        UnexpectedStatusException, match=f"source code: s3://{BUCKET}/code.tar.gz could not be reached"
    ):
        job.fit(logs="None")


def test_the_sdk_reads_the_local_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    session = LocalMPISession(tmp_path / "jobs")
    source = tmp_path / "data"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "b.txt").write_text("b")
    uri = S3Uploader.upload(str(source), "s3://smp-lite-local/data", sagemaker_session=session)
    S3Uploader.upload_bytes(b"c", f"{uri}/c.txt", sagemaker_session=session)
    keys = ["data/c.txt", "data/deep/b.txt"]
    assert S3Downloader.list(uri, sagemaker_session=session) == [f"s3://smp-lite-local/{key}" for key in keys]
    assert S3Downloader.read_file(f"{uri}/deep/b.txt", sagemaker_session=session) == "b"
    assert S3Downloader.read_bytes(f"{uri}/c.txt", sagemaker_session=session) == b"c"
    S3Downloader.download(uri, str(tmp_path / "back"), sagemaker_session=session)
    assert (tmp_path / "back" / "deep" / "b.txt").read_text() == "b"
