"""Merging lines, as a table of what is fed in and what the screen gets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_lite.entrypoints.this_machine.output import LineMerger

OUT_0 = ("0", "stdout")
OUT_1 = ("1", "stdout")
WIPE = b"\r\x1b[K"


def merged(feeds: list[tuple[tuple[str, str], bytes]], live: list[tuple[str, str]]) -> bytes:
    written: list[bytes] = []
    merger = LineMerger(written.append, live)
    for source, data in feeds:
        merger.feed(source, data)
    merger.close()
    return b"".join(written)


@pytest.mark.parametrize(
    ("feeds", "expected"),
    [
        ([(OUT_0, b"a\n")], b"[0] a\n"),
        ([(OUT_0, b"a\n\nb\n")], b"[0] a\n[0] \n[0] b\n"),
        ([(OUT_0, b"a"), (OUT_1, b"b\n"), (OUT_0, b"c\n")], b"[1] b\n[0] ac\n"),
        ([(OUT_0, b"no end")], b"[0] no end\n"),
        ([(OUT_0, b"a\r\nb\r\n")], b"[0] a\n[0] b\n"),
        ([(OUT_0, b"a\r"), (OUT_0, b"\nb\n")], b"[0] a\n[0] b\n"),
        ([(OUT_0, b"\r10%\r20%\n")], b"[0] 10%\n[0] 20%\n"),
        ([(OUT_0, b"10%\r")], b"[0] 10%\n"),
    ],
)
def test_lines_are_passed_on_whole(feeds: list[tuple[tuple[str, str], bytes]], expected: bytes) -> None:
    assert merged(feeds, live=[]) == expected


def test_a_line_without_end_is_broken() -> None:
    feeds = [(OUT_0, b"x" * 60_000)] * 3
    lines = merged(feeds, live=[]).splitlines()
    assert [len(line) for line in lines] == [4 + 65_536, 4 + 65_536, 4 + 180_000 - 2 * 65_536]


def test_a_line_is_not_broken_in_a_character() -> None:
    lines = merged([(OUT_0, b"x" + "\u00fc".encode() * 40_000)], live=[]).decode().splitlines()
    assert [len(line) for line in lines] == [4 + 32_768, 4 + 40_001 - 32_768]


@pytest.mark.parametrize(
    ("feeds", "expected"),
    [
        # A prompt shows at once and is continued, not drawn again.
        ([(OUT_0, b"name"), (OUT_0, b"? ")], b"[0] name? " + WIPE + b"[0] name? \n"),
        # A bar is drawn over itself.
        (
            [(OUT_0, b"\r10%"), (OUT_0, b"\r20%"), (OUT_0, b"\n")],
            b"[0] 10%" + WIPE + b"[0] 20%" + WIPE + b"[0] 20%\n",
        ),
        # Another rank's line goes above the bar.
        (
            [(OUT_0, b"10%"), (OUT_1, b"hi\n"), (OUT_0, b"\n")],
            b"[0] 10%" + WIPE + b"[1] hi\n[0] 10%" + WIPE + b"[0] 10%\n",
        ),
        # A bar that wipes its line first does not wipe its prefix.
        ([(OUT_0, b"\x1b[2K50%")], b"\x1b[2K[0] 50%" + WIPE + b"\x1b[2K[0] 50%\n"),
        # Another rank's unfinished line is held back also here.
        ([(OUT_1, b"a"), (OUT_0, b"b\n"), (OUT_1, b"c\n")], b"[0] b\n[1] ac\n"),
    ],
)
def test_a_live_source_shows_its_unfinished_line(
    feeds: list[tuple[tuple[str, str], bytes]], expected: bytes
) -> None:
    assert merged(feeds, live=[OUT_0]) == expected


@given(
    data=st.text(alphabet="ab\r\n", max_size=30).map(str.encode),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_where_the_bytes_are_cut_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(data)]
    pieces = [(OUT_0, data[start:end]) for start, end in pairwise(bounds)]
    assert merged(pieces, live=[]) == merged([(OUT_0, data)], live=[])
