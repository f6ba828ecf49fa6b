"""Writing, moving and removing so that after a crash each name holds something whole, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["remove", "replace_file", "sync_folder", "write_text"]

_FOLDERS_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems answer that do not sync folders, such as mounted object stores."""


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk; contents are synced by their writers."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FOLDERS_NOT_SYNCED:
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """A new file, on the disk when this returns."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, temporary: Path, write: Callable[[Path], None]) -> None:
    """Writes ``temporary``, then gives it the name ``path``: a reader never sees half a file.

    Args:
        path: may exist; it is as it was where writing fails.
        temporary: in the same folder.
        write: makes the file and syncs it.
    """
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Removes a file, link or folder as far as it goes.

    What is left, because another host still reads it, is found again by its name at the next save.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
