"""How a launch ended: which rank failed first, and what a person should read about it.

mpirun names the rank that ended first. One that a signal killed had no time for a record, and the
records of the others then tell of its loss. In all other cases the earliest record is the cause: a
rank may end quietly because a peer has failed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smp_lite.errors_record import FailureRecord

from ..mpi.mpirun import Death

__all__ = ["Ending", "decide_ending", "shortened"]

_LOST = "An error occurred in Socket closed"
"""What Open MPI says in a rank whose peer has gone, before it aborts: often sooner than the peer's own host
has reported the death, and mpirun reports the first that it hears of."""


@dataclass(frozen=True)
class Ending:
    """exit_code: for the launcher: 0, or that of the rank which failed first (128 + n where signal n
    killed it).
    rank: the one that failed first; None where it is not known, or none failed.
    text: the cause: a traceback, or a sentence.
    cause: that in one line; "": the first line of the text.
    last_lines: what that rank printed last, or mpirun where no rank is known.
    others: the records of the ranks that failed after it.
    """

    exit_code: int
    rank: int | None = None
    text: str = ""
    cause: str = ""
    last_lines: tuple[str, ...] = ()
    others: tuple[FailureRecord, ...] = ()

    @property
    def headline(self) -> str:
        """The cause in one line, and who."""
        cause = self.cause or self.text.strip().partition("\n")[0] or f"exit code {self.exit_code}"
        return cause if self.rank is None else f"rank {self.rank} failed first: {cause}"

    def show(self) -> None:
        """Print the failures on standard error, the first one last; nothing where all went well."""
        for failure in reversed(self.others):
            prefix = f"[{failure.rank}] "
            lines = failure.text.rstrip("\n").split("\n")
            print("\n".join(prefix + line for line in lines), file=sys.stderr)
        if "\n" in self.text and self.rank is not None:
            print(f"rank {self.rank} failed first:\n{self.text}", end="", file=sys.stderr)
        elif self.text:
            print(self.headline if self.rank is not None else self.text.rstrip(), file=sys.stderr)


def decide_ending(
    failures: Sequence[FailureRecord],
    death: Death | None,
    mpirun_code: int,
    last_lines: Mapping[int, Sequence[str]],
    *,
    mpirun_lines: Sequence[str] = (),
    lost_hosts: Sequence[str] = (),
) -> Ending:
    """The ending of a launch that was not stopped from outside.

    Args:
        failures: the ranks' own records, the earliest first.
        death: mpirun's account of the first rank that died.
        mpirun_code: its return code, as subprocess gives it.
        last_lines: by rank, what each printed last.
        mpirun_lines: what mpirun itself has said last.
        lost_hosts: those which did not answer at the end.
    """
    if mpirun_code == 0 and not failures:
        return Ending(0)
    recorded = {failure.rank for failure in failures}
    killed = death is not None and death.signal_number is not None and death.rank not in recorded
    if failures and not killed:
        first, *others = failures
        lines = tuple(last_lines.get(first.rank, ()))
        text = first.text if first.text.endswith("\n") else f"{first.text}\n"
        return Ending(first.exit_code, first.rank, text, first.headline, lines, tuple(others))
    mpirun_code = mpirun_code if mpirun_code >= 0 else 128 - mpirun_code
    if death is None:
        code = mpirun_code
        if lost_hosts:
            return Ending(code, None, f"host(s) {', '.join(lost_hosts)} went away")
        reason = next((line.strip() for line in mpirun_lines if line.strip(" \t-")), "")
        text = f"mpirun ended with exit code {code}" + (f": {reason}" if reason else "")
        return Ending(code, None, text, last_lines=tuple(mpirun_lines))
    number = death.signal_number
    code = 128 + number if number is not None else death.exit_code or mpirun_code
    if number is None and any(_LOST in line for line in mpirun_lines):
        text = (
            f"rank {death.rank} lost its connection to a rank of another host, which has ended before it; "
            "mpirun has not said which"
        )
        return Ending(code, None, text, last_lines=tuple(mpirun_lines), others=tuple(failures))
    lines = tuple(last_lines.get(death.rank, ()))
    return Ending(code, death.rank, death.describe(), last_lines=lines, others=tuple(failures))


def shortened(text: str, longest: int) -> str:
    """`text`, without its middle if it has more than `longest` characters: a traceback says who called at its
    start, and the error at its end."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
