"""What a rank is said to have printed last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from smp_lite.entrypoints.this_machine.channels import Channels
from smp_lite.entrypoints.this_machine.screen import Screen


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[Channels]:
    with Channels(tmp_path, range(2), ()) as channels:
        yield channels


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([("stdout", b"a\nb\n")], ["a", "b"]),
        ([("stdout", b"no end")], ["no end"]),
        ([("stdout", b"Z\xc3"), ("stdout", b"\xbcrich\n")], ["Z\u00fcrich"]),
        ([("stdout", b"\r10%\r20%"), ("stderr", b"error\n")], ["error", "20%"]),
        ([("stdout", b"a\r"), ("stdout", b"\nb\r\n")], ["a", "b"]),
        ([("stdout", b"".join(b"%d\n" % n for n in range(100)))], [str(n) for n in range(90, 100)]),
        ([("stdout", b"x" * 2000 + b"end\n")], ["x" * 497 + "end"]),
    ],
)
def test_last_lines(
    written: list[tuple[str, bytes]],
    expected: list[str],
    channels: Channels,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    screen = Screen(set())
    for stream, data in written:
        descriptor = os.open(tmp_path / f"rank1.{stream}", os.O_WRONLY)
        os.write(descriptor, data)
        os.close(descriptor)
        screen.take(channels, 0)
    assert screen.last_lines == {1: expected}
