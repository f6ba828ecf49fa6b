"""S3 for jobs that run here: one bucket is a folder of this machine, all others are the real S3.

The SDK uploads the source code, and users their data, before a job starts. For a job on this
machine that needs no AWS: the session's default bucket, `smp-lite-local`, is a folder. Whoever
names a bucket of their own means that one, and gets it, through boto3.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

__all__ = ["LOCAL_BUCKET", "LocalS3Resource", "Store"]

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

    def Object(self, bucket_name: str, key: str) -> Any:  # boto3's spelling
        """boto3's object, or one of the local bucket."""
        if bucket_name == LOCAL_BUCKET:
            return _LocalObject(self._directory / key)
        return self._resource.Object(bucket_name, key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resource, name)


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


class Store:
    """Reads and writes what a request names: `file://`, the local bucket, or S3.

    Args:
        directory: what the local bucket is.
        client: boto3's S3 client.
    """

    def __init__(self, directory: Path, client: Any) -> None:
        self._directory = directory
        self._client = client

    def local_path(self, uri: str) -> Path | None:
        """Where `uri` is on this machine; None where it is in the real S3.

        Raises:
            ValueError: it is neither a file:// nor an s3:// address.
        """
        parts = urlsplit(uri)
        if parts.scheme == "file":
            return Path(unquote(parts.netloc + parts.path)).absolute()
        if parts.scheme != "s3" or not parts.netloc:
            raise ValueError(f"{uri!r} must start with s3://bucket or file://")
        if parts.netloc == LOCAL_BUCKET:
            return self._directory / unquote(parts.path).lstrip("/")
        return None

    def keys(self, uri: str) -> list[str]:
        """The objects of the real S3 under the prefix `uri`, sorted, without folder markers.

        Raises:
            ValueError: S3 refuses.
        """
        bucket, prefix = _bucket_and_key(uri)
        return sorted(key for key in self._list(bucket, prefix, uri) if not key.endswith("/"))

    def download(self, uri: str, keys: list[str], directory: Path) -> None:
        """Bring objects under the prefix `uri` into `directory`, named by what follows the prefix.

        A prefix may end inside a name, or be one object: the names then start with its last part.
        """
        bucket, prefix = _bucket_and_key(uri)
        head, slash, _ = prefix.rpartition("/")
        base = f"{prefix}/" if all(key.startswith(f"{prefix}/") for key in keys) else head + slash
        for key in keys:
            target = directory / key.removeprefix(base)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._call(uri, self._client.download_file, bucket, key, str(target))

    def upload(self, source: Path, uri: str) -> None:
        """Bring the file `source`, or all files of that folder, to `uri`."""
        local = self.local_path(uri)
        files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
        for file in files:
            suffix = "" if file == source else f"/{file.relative_to(source).as_posix()}"
            if local is not None:
                target = Path(f"{local}{suffix}")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            else:
                bucket, key = _bucket_and_key(uri)
                self._call(uri, self._client.upload_file, str(file), bucket, f"{key}{suffix}")

    def _list(self, bucket: str, prefix: str, uri: str) -> Iterator[str]:
        token: dict[str, str] = {}
        while True:
            page = self._call(uri, self._client.list_objects_v2, Bucket=bucket, Prefix=prefix, **token)
            yield from (item["Key"] for item in page.get("Contents", ()))
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _call(self, uri: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return function(*args, **kwargs)
        except (Boto3Error, BotoCoreError, ClientError) as error:
            raise ValueError(f"{uri} could not be reached: {error}") from error


def _bucket_and_key(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    return parts.netloc, unquote(parts.path).lstrip("/")
