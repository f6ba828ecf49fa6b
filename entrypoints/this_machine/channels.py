"""The pipes between the ranks and the launcher: two per rank, in the launch's own folder.

Ranks write into named pipes instead of through mpirun, which would mix its own messages with
theirs, hold back unfinished lines, and give every rank's output the look of a terminal. Named
pipes suffice because all ranks are on this machine. Rank 0 gets a pseudo-terminal in place of a
pipe for each stream that the launcher itself writes to a terminal.

The launcher keeps both ends of each channel open. So a rank never waits for a reader, and nothing
ends early while a process that a rank has started still holds the writing end.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import termios
import tty
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from .leftovers import belongs_to
from .output import Source

__all__ = ["Channels"]

_READ_BYTES = 65536
_PREFIX_COLUMNS = len("[0] ")


class Channels:
    """The channels of `ranks`; `terminals` names rank 0's streams that need a terminal.

    A context manager: leaving it closes all that it opened.
    """

    def __init__(self, directory: Path, ranks: Iterable[int], terminals: Collection[str]) -> None:
        self._directory = directory
        self._open = ExitStack()
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        for rank in ranks:
            for stream in ("stdout", "stderr"):
                path = directory / f"rank{rank}.{stream}"
                if rank == 0 and stream in terminals:
                    reading = self._make_terminal(path, like=1 if stream == "stdout" else 2)
                else:
                    os.mkfifo(path)
                    reading = self._keep(os.open(path, os.O_RDWR))
                self.add(reading, (str(rank), stream))

    def __enter__(self) -> Channels:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def add(self, descriptor: int, source: Source) -> None:
        """Also read `descriptor`, which stays the caller's to close."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, source)

    def read(self, timeout_s: float) -> Iterator[tuple[Source, bytes]]:
        """What has come, waiting up to `timeout_s` seconds for something to come."""
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, _READ_BYTES)
            if data:
                yield key.data, data
            else:
                self._selector.unregister(key.fd)

    def told_pids(self) -> list[int]:
        """Process ids of the ranks that have come as far as to tell theirs; they may have ended."""
        texts = (path.read_text() for path in self._directory.glob("rank*.pid"))
        return [int(text) for text in texts if text]

    def rank_pids(self) -> list[int]:
        """Those of them that run."""
        return [pid for pid in self.told_pids() if belongs_to(pid, self._directory)]

    def _make_terminal(self, path: Path, like: int) -> int:
        """A terminal of the size of the one at descriptor `like`, less room for the prefix."""
        reading, writing = (self._keep(descriptor) for descriptor in os.openpty())
        tty.setraw(writing)
        try:
            columns, rows = os.get_terminal_size(like)
        except OSError:
            columns, rows = 80, 24
        size = struct.pack("HHHH", rows, max(columns - _PREFIX_COLUMNS, 1), 0, 0)
        fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
        path.symlink_to(os.ttyname(writing))
        return reading

    def _keep(self, descriptor: int) -> int:
        self._open.callback(os.close, descriptor)
        return descriptor
