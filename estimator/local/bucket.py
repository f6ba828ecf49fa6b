"""The bucket of a local session, `smp-lite-local`: a folder of this machine, where AWS is not needed.

The SDK uploads the source code, and users their data, before a job starts. By default that goes to this
bucket. Whoever names a bucket of their own means that one, and gets it, through boto3. So what the
session has for boto3's S3 resource and client looks at the name of the bucket first.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

__all__ = ["LOCAL_BUCKET", "LocalS3Client", "LocalS3Resource", "path_within"]

LOCAL_BUCKET = "smp-lite-local"


class LocalS3Resource:
    """boto3's S3 resource, but for the local bucket.

    Args:
        directory: what the bucket is; a key is a path in it.
        resource: boto3's own.
    """

    def __init__(self, directory: Path, resource: Any) -> None:
        self._directory = directory
        self._resource = resource

    def Object(self, bucket_name: str, key: str) -> Any:  # boto3's spelling, as below
        """boto3's object, or one of the local bucket."""
        if bucket_name == LOCAL_BUCKET:
            return _LocalObject(path_within(self._directory, key))
        return self._resource.Object(bucket_name, key)

    def Bucket(self, name: str) -> Any:
        """boto3's bucket, or the local one."""
        return _LocalBucket(self._directory) if name == LOCAL_BUCKET else self._resource.Bucket(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resource, name)


class LocalS3Client:
    """boto3's S3 client, but for reading the local bucket.

    Args:
        directory: what the bucket is.
        client: boto3's own.
    """

    def __init__(self, directory: Path, client: Any) -> None:
        self._directory = directory
        self._client = client

    def list_objects_v2(self, Bucket: str, Prefix: str = "", **others: Any) -> Any:
        """As boto3's; the local bucket's in one page."""
        if Bucket != LOCAL_BUCKET:
            return self._client.list_objects_v2(Bucket=Bucket, Prefix=Prefix, **others)
        return {"Contents": [{"Key": key, "Size": size} for key, size in _objects(self._directory, Prefix)]}

    def download_file(self, Bucket: str, Key: str, Filename: str, **others: Any) -> None:
        """As boto3's."""
        if Bucket != LOCAL_BUCKET:
            self._client.download_file(Bucket, Key, Filename, **others)
        else:
            _LocalObject(path_within(self._directory, Key)).download_file(Filename)

    def get_object(self, Bucket: str, Key: str, **others: Any) -> Any:
        """As boto3's."""
        if Bucket != LOCAL_BUCKET:
            return self._client.get_object(Bucket=Bucket, Key=Key, **others)
        return {"Body": io.BytesIO(path_within(self._directory, Key).read_bytes())}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _LocalObject:
    """The part of boto3's S3 Object that the SDK uses; ExtraArgs speak of encryption and ownership."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def upload_file(self, Filename: str, ExtraArgs: object = None, **_: object) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Filename, self._path)

    def download_file(self, Filename: str, **_: object) -> None:
        shutil.copyfile(self._path, Filename)

    def put(self, Body: bytes | str | BinaryIO, **_: object) -> None:
        data = Body.encode() if isinstance(Body, str) else Body if isinstance(Body, bytes) else Body.read()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(data)


class _LocalBucket:
    """The part of boto3's S3 Bucket that the SDK uses, which is also its collection of objects."""

    def __init__(self, directory: Path, prefix: str = "") -> None:
        self._directory = directory
        self._prefix = prefix

    @property
    def objects(self) -> _LocalBucket:
        return self

    def filter(self, Prefix: str) -> _LocalBucket:
        return _LocalBucket(self._directory, Prefix)

    def all(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(key=key, size=size) for key, size in _objects(self._directory, self._prefix)]

    def upload_fileobj(self, Fileobj: BinaryIO, Key: str, **_: object) -> None:
        _LocalObject(path_within(self._directory, Key)).put(Fileobj)

    def download_file(self, Key: str, Filename: str, **_: object) -> None:
        _LocalObject(path_within(self._directory, Key)).download_file(Filename)

    def download_fileobj(self, Key: str, Fileobj: BinaryIO, **_: object) -> None:
        Fileobj.write(path_within(self._directory, Key).read_bytes())


def _objects(directory: Path, prefix: str) -> list[tuple[str, int]]:
    """Keys that start with `prefix` and their sizes in bytes, sorted."""
    return sorted((key, size) for key, size in _walk(directory, prefix) if key.startswith(prefix))


def _walk(directory: Path, prefix: str) -> Iterator[tuple[str, int]]:
    folder, _, _ = prefix.rpartition("/")
    start = path_within(directory, folder) if folder.strip("/") else directory
    for parent, _, names in os.walk(start):
        for name in names:
            path = Path(parent, name)
            if path.is_file():
                yield path.relative_to(directory).as_posix(), path.stat().st_size


def path_within(directory: Path, name: str, key: str | None = None) -> Path:
    """The path of `name` in `directory`, wherever an object's key (default: `name`) would lead.

    S3 takes any text as a key: it may start with a slash and may have `..` in it.

    Raises:
        ValueError: it is no path below `directory`.
    """
    folder = Path(os.path.abspath(directory))
    path = Path(os.path.normpath(folder / name.lstrip("/")))
    if path != folder and path.is_relative_to(folder):
        return path
    raise ValueError(
        f"the object {key or name!r} would be written outside its folder {directory}: rename it, or give a "
        "prefix without it"
    )
