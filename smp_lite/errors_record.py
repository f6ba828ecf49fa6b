"""The failure record: how the launcher learns which rank failed first, and why.

When one rank fails, its peers fail a moment later for a duller reason (a connection that closed, a
signal from mpirun), and their messages come last. So a failing rank leaves a small file in the
folder named by `SMP_LITE_ERROR_DIR`, with the time at which it failed; the launcher reads all of
them when everything has ended and shows the earliest one last. All ranks of a local launch share
one clock, so the times compare.

This file sits at the bottom of the package, needs only the standard library and imports nothing of
ours: the runtime's exception hook writes records and may not import the launcher.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["ERROR_DIR_VARIABLE", "FailureRecord", "headline_of", "read_failures", "record_failure"]

ERROR_DIR_VARIABLE = "SMP_LITE_ERROR_DIR"
_LONGEST_HEADLINE = 500
"""Characters."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


@dataclass(frozen=True)
class FailureRecord:
    """One rank's failure: `time_ns` since the epoch, what a person should read, and that in one line."""

    rank: int
    time_ns: int
    exit_code: int
    text: str
    headline: str = ""


def record_failure(
    failure: ExcInfo | BaseException | str, rank: int, exit_code: int = 1, headline: str | None = None
) -> bool:
    """Leave the record of this rank's failure for the launcher; the first one of a rank stays.

    The headline is the exception's own, or the first line of a text, unless one is given.

    Returns True if a record of this rank is in place, whoever wrote it: the launcher will show it,
    so the caller need not print the traceback. Returns False where no launcher asked for records,
    or none could be written. Never raises: it runs while another error is on its way out.
    """
    directory = os.environ.get(ERROR_DIR_VARIABLE)
    if not directory:
        return False
    try:
        if headline is None:
            headline = failure if isinstance(failure, str) else headline_of(failure)
        headline = headline.strip().partition("\n")[0][:_LONGEST_HEADLINE]
        record = FailureRecord(rank, time.time_ns(), exit_code, _text_of(failure), headline)
        _write_once(Path(directory) / f"rank{rank}.failure.json", json.dumps(asdict(record)))
    except Exception:
        return False
    return True


def read_failures(directory: str | os.PathLike[str]) -> list[FailureRecord]:
    """All records in `directory`, the earliest first."""
    paths = Path(directory).glob("rank*.failure.json")
    records = [FailureRecord(**json.loads(path.read_text("utf-8"))) for path in paths]
    return sorted(records, key=lambda record: record.time_ns)


def headline_of(failure: ExcInfo | BaseException) -> str:
    """The exception's type and the first line of its message."""
    error = failure if isinstance(failure, BaseException) else failure[1]
    if isinstance(error, SyntaxError):  # Python would begin with the place
        return f"{type(error).__name__}: {error}"
    return traceback.format_exception_only(error)[0].strip().partition("\n")[0]


def _text_of(failure: ExcInfo | BaseException | str) -> str:
    if isinstance(failure, str):
        return failure
    if isinstance(failure, BaseException):
        failure = (type(failure), failure, failure.__traceback__)
    return "".join(traceback.format_exception(*failure))


def _write_once(path: Path, text: str) -> None:
    """Create `path` with all of `text` or leave it as it is: readers never see half a record."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)
