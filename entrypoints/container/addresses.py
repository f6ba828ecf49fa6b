"""Addresses as jobs give them: `s3://bucket/key` and `file://path`.

They are no URLs. A key of S3 and the name of a file are text as they stand, and may have "#", "?" and "%20"
in them: what reads them as a URL gets the data of another job, without a word.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

__all__ = ["bucket_and_key", "file_path", "split_address"]


def split_address(address: str) -> tuple[str, str]:
    """The scheme in small letters and what follows it; "" and the whole text where there is none."""
    scheme, found, rest = address.partition("://")
    return (scheme.lower(), rest) if found and scheme.isalnum() else ("", address)


def bucket_and_key(rest: str) -> tuple[str, str]:
    """The parts of what follows `s3://`."""
    bucket, _, key = rest.partition("/")
    return bucket, key.lstrip("/")


def file_path(rest: str) -> Path:
    """The path that what follows `file://` means.

    It is taken as it stands. `Path.as_uri` writes "%20" for a space, so a path whose part with such a sign
    does not exist is the one that this is the code of. The SDK writes file://src for a relative folder.
    """
    decoded = unquote(rest)
    if decoded == rest:
        return Path(rest)
    end = rest.find("/", rest.rindex("%"))
    return Path(rest if os.path.lexists(rest if end < 0 else rest[:end]) else decoded)
