"""Files of ``torch.save``: read without running code unless asked, and with a note inside.

A note is one more record of the zip archive that ``torch.save`` writes, in the folder ``extra`` that torch
itself uses for such. So it goes wherever the file goes, whatever object the file holds, and ``torch.load``
does not see it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import SMPError

__all__ = ["damage", "read_note", "read_torch", "write_torch"]

_NOTE = "extra/smp_lite.json"
_BLOCK_BYTES = 1 << 20

_NOT_READ = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError)
"""What ``zipfile`` raises where an archive is damaged, and it cannot tell."""

# Plain data that torch's reader does not know.
_PLAIN = [frozenset, range]


def write_torch(
    path: Path,
    obj: Any,
    note: str | None = None,
    *,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
) -> None:
    """``torch.save`` into a new file, on the disk when this returns.

    Raises:
        OSError: the disk is full, or the like.
    """
    with open(path, "x+b") as file:
        try:
            torch.save(obj, file, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
        except RuntimeError as error:
            raise _cause_on_disk(error) or error from None
        if note is not None:
            with zipfile.ZipFile(file, "a") as archive:
                top = archive.namelist()[0].partition("/")[0]
                archive.writestr(f"{top}/{_NOTE}", note)
        file.flush()
        os.fsync(file.fileno())


def read_note(path: Path) -> str | None:
    """The note of a file; None: it has none, or was not written by ``torch.save``."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.partition("/")[2] == _NOTE), None)
            return None if name is None else archive.read(name).decode()
    except _NOT_READ:
        return None
    except OSError as error:
        if error.filename is None:  # it says that something lies where the file is not
            return None
        raise


def damage(file: Path | IO[bytes]) -> str | None:
    """What in a file of ``torch.save`` is not as it was written, by its check sums; None: nothing is known.

    ``torch.load`` does not look at them, and takes zeros that a disk has left for numbers.
    """
    if not zipfile.is_zipfile(file):
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.CRC != 0:  # else it was saved without (torch.serialization.set_crc32_options)
                    with archive.open(record) as content:
                        while content.read(_BLOCK_BYTES):
                            pass
    except _NOT_READ as error:
        return str(error)
    return None


def read_torch(
    path: Path,
    *,
    caller: str,
    weights_only: bool | None = None,
    map_location: Any = "cpu",
    pickle_module: Any = pickle,
    **arguments: Any,
) -> Any:
    """``torch.load``, whose errors name the file and the way out.

    Args:
        path: the file.
        caller: the public function, for errors.
        weights_only: None: True, unless ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` is set, which is torch's own
            variable for scripts that cannot say so. What ``torch.serialization.add_safe_globals`` has allowed
            is read as well.
        map_location, pickle_module, arguments: as in ``torch.load``.

    Raises:
        SMPError: the file holds what is not read without asking, is no whole file of ``torch.save``, or, if
            it is not mapped, has other numbers than were written.
        OSError: it cannot be opened.
    """
    safely = not _reads_all_by_default() if weights_only is None else weights_only
    if not safely:
        arguments["pickle_module"] = pickle_module
    elif pickle_module is not pickle:
        raise SMPError(
            f"{caller}: pickle_module={getattr(pickle_module, '__name__', pickle_module)} reads with code of "
            f"its own: if you trust the file, ask for it with {caller}(..., weights_only=False)"
        )
    if not arguments.get("mmap") and (found := damage(path)) is not None:
        raise SMPError(
            f"{caller}: {os.fspath(path)!r} is damaged: it does not hold what was written ({found}). Take "
            "another one, or a copy"
        )
    with torch.serialization.safe_globals(_PLAIN) if safely else contextlib.nullcontext():
        try:
            return torch.load(path, map_location=map_location, weights_only=safely, **arguments)
        except MemoryError:
            raise
        except Exception as error:
            is_cut = isinstance(error, OSError) and error.filename is None  # torch seeks its directory
            if isinstance(error, OSError) and not is_cut:
                raise
            refused = _refused(path, error) if safely and not is_cut else ""
            if refused:
                raise SMPError(
                    f"{caller}: {os.fspath(path)!r} holds more than tensors and plain Python data: "
                    f"{refused}. That can run code, so it is read only on request. If you trust the file: "
                    f"{caller}(..., weights_only=False), or allow its classes alone with "
                    "torch.serialization.add_safe_globals([...])"
                ) from error
            if safely or is_cut or isinstance(error, pickle.UnpicklingError | EOFError | RuntimeError):
                first_line = str(error).partition("\n")[0]
                raise SMPError(
                    f"{caller}: {os.fspath(path)!r} cannot be read: it is no file of torch.save, or not a "
                    f"whole one ({type(error).__name__}: {first_line})"
                ) from error
            raise  # of a class in the file


def _reads_all_by_default() -> bool:
    return os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true")


def _refused(path: Path, error: Exception) -> str:
    """What in a file of ``torch.save`` the safe reader does not read; empty: that is not what is wrong."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no file of torch.save
        return ""
    reason = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    return ", ".join(sorted(set(names))) or (reason[1] if reason else "")


def _cause_on_disk(error: BaseException) -> OSError | None:
    """The first error of the disk; torch's own comes later and speaks of positions in the archive."""
    cause = error.__context__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause
