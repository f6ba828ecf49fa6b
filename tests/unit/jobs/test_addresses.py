"""Addresses of jobs are literal text: "#", "?" and "%" belong to the names of keys and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_lite.entrypoints.container.source_code import fetch_source
from smp_lite.estimator.local.store import Store

ODD = ("set#1", "set?1", "p%20q", "a b", "a;b", "ü x:y")


class Bucket:
    """The part of boto3's client that lists and brings objects, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def list_objects_v2(self, Bucket: str, Prefix: str) -> dict[str, Any]:
        self.asked.append(f"{Bucket} {Prefix}")
        return {}

    def download_file(self, bucket: str, key: str, target: str) -> None:
        self.asked.append(f"{bucket} {key}")

    def upload_file(self, file: str, bucket: str, key: str) -> None:
        self.asked.append(f"{bucket} {key}")


@pytest.mark.parametrize("name", ODD)
def test_a_key_of_s3_is_asked_for_as_it_stands(name: str, tmp_path: Path) -> None:
    bucket = Bucket()
    store = Store(tmp_path, bucket)
    (tmp_path / "file").touch()
    store.keys(f"s3://mine/{name}/")
    store.download_file(f"s3://mine/{name}/a", tmp_path / "a")
    store.upload(tmp_path / "file", f"s3://mine/{name}")
    assert bucket.asked == [f"mine {name}/", f"mine {name}/a", f"mine {name}"]


@pytest.mark.parametrize("name", ODD)
def test_a_file_and_an_object_of_the_local_bucket_are_where_they_are_named(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs", None)
    (tmp_path / name).mkdir()
    assert store.local_path(f"file://{tmp_path}/{name}") == tmp_path / name
    assert store.local_path(f"s3://smp-lite-local/{name}/x") == tmp_path / "jobs" / name / "x"
    assert store.local_path((tmp_path / name).as_uri()) == tmp_path / name


def test_a_code_is_read_where_no_file_has_its_name(tmp_path: Path) -> None:
    store = Store(tmp_path, None)
    (tmp_path / "p q").mkdir()
    assert store.local_path(f"file://{tmp_path}/p%20q/new") == tmp_path / "p q" / "new"
    (tmp_path / "p%20q").mkdir()
    assert store.local_path(f"file://{tmp_path}/p%20q/new") == tmp_path / "p%20q" / "new"


@pytest.mark.parametrize("name", ODD)
def test_code_comes_from_the_folder_that_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.py").write_text("the right one")
    for part in ("set", "p q", "a"):  # what a URL would make of it
        (tmp_path / part).mkdir()
    fetch_source(f"file://{tmp_path}/{name}", tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_text() == "the right one"


@pytest.mark.parametrize("address", ["mine/x", "s3://", "s3:///x", "https://mine/x"])
def test_another_address_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must start with s3://bucket or file://"):
        Store(tmp_path, None).local_path(address)
