"""What a launcher shows: the lines of its ranks, tagged, and of mpirun's own words those that say more."""

from __future__ import annotations

import codecs
import os
import select
import sys
from collections import defaultdict, deque
from collections.abc import Callable

from ..mpi.mpirun import MpirunMessages
from .channels import Channels
from .output import LineMerger, Source

__all__ = ["MPIRUN", "CannotShow", "Screen"]

MPIRUN = "mpirun"
"""The source of mpirun's own output, beside the ranks' numbers."""

_LAST_LINES = 10
_LONGEST_LAST_LINE = 500
"""Characters."""


class CannotShow(Exception):
    """The launcher's own output takes nothing any more; the text says why."""


class Screen:
    """The launcher's two output streams, each a `LineMerger`; one where both are one terminal."""

    def __init__(self, terminals: set[str]) -> None:
        self.messages = MpirunMessages()
        live = [("0", name) for name in terminals]
        err = LineMerger(_writer(sys.stderr.fileno()), live)
        out = err if len(terminals) == 2 else LineMerger(_writer(sys.stdout.fileno()), live)
        self._mergers = {"stdout": out, "stderr": err}
        self._mpirun_text = ""
        self._ended_lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_LAST_LINES))
        self._open_lines: dict[Source, str] = defaultdict(str)
        self._decoders: dict[Source, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
        )

    @property
    def last_lines(self) -> dict[int, list[str]]:
        """By rank, what each has printed last."""
        lines = {rank: list(kept) for rank, kept in self._ended_lines.items()}
        for (name, _), text in self._open_lines.items():
            if text:
                lines.setdefault(int(name), []).append(text)
        return {rank: kept[-_LAST_LINES:] for rank, kept in lines.items()}

    def take(self, channels: Channels, timeout_s: float) -> None:
        """Show what has come, waiting up to `timeout_s` seconds for it; then all that is there."""
        while batch := list(channels.read(timeout_s)):
            for source, data in batch:
                if source[0] == MPIRUN:
                    self._take_mpirun(data)
                else:
                    self._mergers[source[1]].feed(source, data)
                    self._remember(source, data)
            timeout_s = 0

    def close(self) -> None:
        """Nothing more comes: show what is still held back."""
        self._take_mpirun(b"\n")
        self._show_mpirun(self.messages.close())
        for merger in self._mergers.values():
            merger.close()

    def _remember(self, source: Source, data: bytes) -> None:
        *lines, rest = (self._open_lines[source] + self._decoders[source].decode(data)).split("\n")
        self._ended_lines[int(source[0])].extend(
            _last_drawn(line).removesuffix("\r") for line in lines[-_LAST_LINES:]
        )
        self._open_lines[source] = _last_drawn(rest)

    def _take_mpirun(self, data: bytes) -> None:
        *lines, self._mpirun_text = (self._mpirun_text + data.decode(errors="replace")).split("\n")
        for line in lines:
            self._show_mpirun(self.messages.feed(line.rstrip("\r")))

    def _show_mpirun(self, lines: list[str]) -> None:
        for line in lines:
            self._mergers["stderr"].feed((MPIRUN, "stdout"), f"{line}\n".encode())


def _last_drawn(line: str) -> str:
    """What a person sees last of a line that is drawn over itself, and of a long one its end."""
    end = "\r" if line.endswith("\r") else ""  # may yet turn out to be \r\n
    return line.rstrip("\r").rpartition("\r")[2][-_LONGEST_LAST_LINE:] + end


def _writer(descriptor: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # who shares it has set it so
                select.select([], [descriptor], [])
            except BrokenPipeError:
                raise
            except OSError as error:
                name = "output" if descriptor == 1 else "error"
                raise CannotShow(f"standard {name} cannot be written to: {error.strerror}") from error

    return write
