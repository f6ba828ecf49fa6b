"""Messages that lie in torch's TCPStore until their receiver takes them.

For each sender, receiver and tag there is one key. The sender sets it when it is free, and the receiver
deletes it when it has read it; so messages keep their order and nothing piles up. Whether one has come is a
short question to the store, about 40 microseconds on one host, and never blocks: that is what a wait with a
limit needs, and what gloo does not offer. A long message goes in parts, because the store ends the
connection of a client that gives it more than 8 MiB at once.

It is made for control and checkpoints among some dozens of ranks. What is large and frequent travels over
process groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ...errors import SMPError

__all__ = ["Mailbox"]

PART_BYTES = 4 << 20
_LAST, _MORE = b"\0", b"\1"

T = TypeVar("T")


class Mailbox:
    """The messages of one rank.

    Args:
        store: shared by all ranks.
        rank: this one.
        where: names the store in errors.
    """

    def __init__(self, store: dist.Store, rank: int, where: str) -> None:
        self._store, self._rank, self._where = store, rank, where
        self._unfinished: dict[str, list[bytes]] = {}
        self._have_read: dict[str, int] = {}
        self._last: dict[str, Posted] = {}

    def post(self, data: bytes, dest: int, tag: int, *, until_taken: bool) -> Posted:
        """Starts sending; done when the last part lies in the store, or is taken from it."""
        key = f"{self._rank}>{dest}/{tag}"
        posted = self._last[key] = Posted(self, key, data, until_taken, self._last.get(key))
        return posted

    def take(self, source: int, tag: int) -> bytes | None:
        """The next message of that rank, if it is there."""
        key = f"{source}>{self._rank}/{tag}"
        parts = self._unfinished.setdefault(key, [])
        while self.holds(key):
            part = self._ask(lambda: self._store.get(key))
            self._ask(lambda: self._store.delete_key(key))
            parts.append(part[1:])
            if part[:1] == _LAST:
                del self._unfinished[key]
                return b"".join(parts)
        return None

    # Notices: keys that stay --------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def holds(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def read(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._ask(lambda: self._store.get(key))

    # Logs: notices in a row ---------------------------------------------------------------------------------

    def append(self, log: str, value: bytes) -> None:
        """Puts it at the end of a log that all can write to."""
        number = self._ask(lambda: self._store.add(f"{log}/length", 1))
        self.put(f"{log}/{number}", value)

    def read_on(self, log: str, *, delete: bool = False) -> list[bytes]:
        """What has been added since this rank read it last; with ``delete`` nobody else reads it."""
        found = []
        while self.holds(key := f"{log}/{self._have_read.get(log, 0) + 1}"):
            found.append(self.read(key))
            self._have_read[log] = self._have_read.get(log, 0) + 1
            if delete:
                self._ask(lambda key=key: self._store.delete_key(key))
        return found

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except dist.DistError as error:
            raise SMPError(
                f"rank {self._rank}: the store at {self._where} does not answer any more, so rank 0 or its "
                f"launcher has ended ({str(error).splitlines()[0]})"
            ) from error


class Posted:
    """A message that is being sent."""

    def __init__(
        self, mailbox: Mailbox, key: str, data: bytes, until_taken: bool, before: Posted | None
    ) -> None:
        self._mailbox, self._key, self._until_taken = mailbox, key, until_taken
        self._before = before  # the message to the same rank that must lie there first
        starts = range(0, max(len(data), 1), PART_BYTES)
        self._parts = deque(_MORE + data[start : start + PART_BYTES] for start in starts)
        self._parts[-1] = _LAST + self._parts[-1][1:]
        self.done()

    def done(self) -> bool:
        """Polls, and puts the next part into the store if the one before is taken."""
        if self._before is not None:
            self._before.done()
            if self._before._parts:
                return False
            self._before = None
        while self._parts:
            if self._mailbox.holds(self._key):
                return False
            self._mailbox.put(self._key, self._parts.popleft())
        return not (self._until_taken and self._mailbox.holds(self._key))
