"""What a job's container runs: `/opt/ml` in, an MPI launch over all hosts, and a clear ending.

The contract is that of AWS's images, by which `SM_*`, the folders and the two files in
`/opt/ml/output` are as scripts and the service expect them: `success`, or `failure` with the text
of which the service shows the first 1,024 characters, so the cause comes first. The exit code is
that of the rank which failed first. What happens in between is `hosts.run_job`.

The service stops a job with SIGTERM and 120 seconds later with SIGKILL. SIGTERM becomes a notice to
all ranks (see `this_machine.launcher`), which have `SMP_LITE_GRACE_S` seconds (100) to save and end; a
script asks for it with `smp.should_stop()`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .container.job import DEFAULT_ROOT
from .hosts.run_job import run_job
from .this_machine.ending import Ending, shortened

__all__ = ["main"]

_STOPPED = 128 + signal.SIGTERM
_LONGEST_TEXT = 20_000
"""Characters of a cause that are kept in `failure`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job under the folder named on the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m smp_lite.entrypoints.train", description="Run a SageMaker training job."
    )
    parser.add_argument(
        "command", nargs="?", choices=["train"], help="what the service passes; means no more"
    )
    parser.add_argument("--root", default=DEFAULT_ROOT, help=f"the job's folder (default: {DEFAULT_ROOT})")
    parser.add_argument(
        "--one-machine",
        metavar="DIR",
        help="all hosts of the job are on this machine and meet in DIR; the job ends with standard input",
    )
    arguments = parser.parse_args(argv)
    root = Path(arguments.root).absolute()
    meeting_place = Path(arguments.one_machine) if arguments.one_machine else None
    if meeting_place is not None:
        _end_with_standard_input()
    for outcome in ("success", "failure"):
        (root / "output" / outcome).unlink(missing_ok=True)  # of an earlier job in this folder
    try:
        with _sigterm_raises():
            ending = run_job(root, meeting_place)
    except _Stopped:
        ending = Ending(_STOPPED, None, "stopped by SIGTERM")
    except (ValueError, TimeoutError) as error:
        ending = Ending(1, None, f"{error}")
    except Exception:
        ending = Ending(1, None, traceback.format_exc())
    ending.show()
    _leave_outcome(root / "output", ending)
    return ending.exit_code


class _Stopped(BaseException):
    """SIGTERM came while there was nothing to give notice to."""


def _leave_outcome(output: Path, ending: Ending) -> None:
    """The file by which the service learns how the job ended."""
    if not output.parent.is_dir():
        return  # there is no job
    output.mkdir(exist_ok=True)
    if ending.exit_code == 0:
        (output / "success").touch()
        return
    lines = [ending.headline]
    if "\n" in ending.text.strip():
        lines += ["", shortened(ending.text.rstrip(), _LONGEST_TEXT)]
    if ending.last_lines:
        who = "mpirun" if ending.rank is None else f"rank {ending.rank}"
        lines += ["", f"{who} printed last:", *ending.last_lines]
    text = "\n".join(lines).rstrip("\n")
    (output / "failure").write_text(text, "utf-8", errors="backslashreplace")


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end what runs meanwhile, where nobody else listens to it: for process 1 of a container
    it would have no effect."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_with_standard_input() -> None:
    """Stop the job when whoever started it has gone, however that happened."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while os.read(lifeline, 1):
            pass
        for _ in range(2):  # a notice, and no time of grace
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
