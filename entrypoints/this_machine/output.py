"""Many processes, one screen: every line gets its rank, and no two lines run into each other.

Lines are passed on when they are whole. A carriage return ends a line as well, so that a progress
bar written into a file becomes lines that can be read. The exception is a *live* source, which rank
0 is when the launcher writes to a terminal: its text is passed on as it comes and its carriage
returns stay what they are, so a progress bar moves and a prompt shows. When another rank has a line
to say meanwhile, the live line is wiped, the other line printed, and the live line drawn again
below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

__all__ = ["LineMerger", "Source"]

Source = tuple[str, str]
"""Who wrote (`"0"`, `"mpirun"`), and on which stream (`"stdout"`, `"stderr"`)."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
# Wiping a line and moving the cursor must come before the prefix, or they would wipe that too.
_CURSOR_MOVES = re.compile(rb"(?:\x1b\[[0-9;?]*[A-HJKhl])*")
_WIPE_LINE = b"\r\x1b[K"
_LONGEST_LINE = 65536
"""Bytes; a longer line is broken, so that one without an end is neither kept whole nor searched again."""


class LineMerger:
    """Merges what several sources write into lines of the form `[rank] text`.

    write: takes bytes for the screen.
    live: the sources whose unfinished lines are shown at once (see the module's docstring).
    """

    def __init__(self, write: Callable[[bytes], None], live: Collection[Source] = ()) -> None:
        self._write = write
        self._live = frozenset(live)
        self._pending: dict[Source, bytes] = {}
        self._shown: Source | None = None
        """The live source whose unfinished line stands on the screen; `_drawn` is that line."""
        self._drawn = b""

    def feed(self, source: Source, data: bytes) -> None:
        """Take more bytes of one source; a cut in the middle of a line or character is fine."""
        text = self._pending.pop(source, b"") + data
        begin = 0
        for match in _LINE_END.finditer(text):
            if match[0] == b"\r" and match.end() == len(text):
                break  # may yet turn out to be \r\n
            self._end_line(source, text[begin : match.start()], match[0])
            begin = match.end()
        text = text[begin:]
        while len(text) > _LONGEST_LINE:
            end = _character_start(text, _LONGEST_LINE)
            self._end_line(source, text[:end], b"\n")
            text = text[end:]
        if text:
            self._pending[source] = text
            if source in self._live:
                self._draw(source)

    def close(self) -> None:
        """Nothing more comes: end the lines that are still open."""
        for source in list(self._pending):
            text = self._pending.pop(source)
            self._end_line(source, text.removesuffix(b"\r"), b"\n")

    def _end_line(self, source: Source, text: bytes, end: bytes) -> None:
        if end == b"\r" and (source in self._live or not text):
            return  # drawn over by what comes next, or nothing to say
        self._write(self._wipe() + _prefixed(source, text) + b"\n")
        covered, self._shown = self._shown, None
        if covered in self._pending:
            self._draw(covered)

    def _draw(self, source: Source) -> None:
        """Bring the unfinished line of a live source onto the screen."""
        text = self._pending[source].removesuffix(b"\r")
        if self._shown == source and text.startswith(self._drawn):
            self._write(text[len(self._drawn) :])
        else:
            self._write(self._wipe() + _prefixed(source, text))
        self._shown, self._drawn = source, text

    def _wipe(self) -> bytes:
        return b"" if self._shown is None else _WIPE_LINE


def _character_start(text: bytes, at: int) -> int:
    """The last place up to `at` where a character of UTF-8 begins; `at` where it is something else."""
    for place in range(at, at - 4, -1):
        if text[place] & 0xC0 != 0x80:
            return place
    return at


def _prefixed(source: Source, text: bytes) -> bytes:
    moves = _CURSOR_MOVES.match(text)
    at = moves.end() if moves is not None else 0
    return text[:at] + b"[" + source[0].encode() + b"] " + text[at:]
