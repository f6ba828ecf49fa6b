"""What a request names, as files: `file://`, the local bucket, or the real S3."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smp_lite.entrypoints.container.addresses import bucket_and_key, file_path, split_address

from .bucket import LOCAL_BUCKET, path_within

__all__ = ["DownloadStopped", "Store"]


class DownloadStopped(Exception):
    """Nobody needs the data any more."""


class Store:
    """Reads and writes what a request names: `file://`, the local bucket, or S3.

    Args:
        directory: what the local bucket is.
        client: boto3's S3 client.
    """

    def __init__(self, directory: Path, client: Any) -> None:
        self._directory = directory
        self._client = client
        self._stopped: Callable[[], bool] = lambda: False

    def local_path(self, uri: str) -> Path | None:
        """Where `uri` is on this machine; None where it is in the real S3.

        Raises:
            ValueError: it is neither a file:// nor an s3:// address, or leads out of the local bucket.
        """
        scheme, rest = split_address(uri)
        if scheme == "file":
            return file_path(rest).absolute()
        bucket, key = bucket_and_key(rest)
        if scheme != "s3" or not bucket:
            raise ValueError(f"{uri!r} must start with s3://bucket or file://")
        if bucket == LOCAL_BUCKET:
            key = key.strip("/")
            return path_within(self._directory, key) if key else self._directory
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

        Raises:
            ValueError: S3 refuses, or an object's name cannot be that of a file in `directory`.
        """
        bucket, prefix = _bucket_and_key(uri)
        head, slash, _ = prefix.rpartition("/")
        base = f"{prefix}/" if all(key.startswith(f"{prefix}/") for key in keys) else head + slash
        for key in keys:
            self._fetch(uri, bucket, key, path_within(directory, key.removeprefix(base), key))

    def download_file(self, uri: str, target: Path) -> None:
        """Bring the object `uri` to the file `target`.

        Raises:
            ValueError: S3 refuses.
        """
        self._fetch(uri, *_bucket_and_key(uri), target)

    def until(self, stopped: Callable[[], bool]) -> Store:
        """The same store, whose downloads end with DownloadStopped once `stopped` says so."""
        store = Store(self._directory, self._client)
        store._stopped = stopped
        return store

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

    def _fetch(self, uri: str, bucket: str, key: str, target: Path) -> None:
        if self._stopped():
            raise DownloadStopped
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._call(uri, self._client.download_file, bucket, key, str(target))
        except OSError as error:  # such as for a and a/b, which S3 can have side by side
            raise ValueError(f"{uri}: the object {key!r} cannot become the file {target}: {error}") from error

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
    return bucket_and_key(split_address(uri)[1])
