"""On a terminal rank 0 has a terminal too, and its progress bar moves in place."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.launch.launching import HANG_S, command, write

SCRIPT = """
import time
print('terminal' if sys.stdout.isatty() else 'pipe', end='')
if rank == 0:
    print(os.get_terminal_size())
    for part in range(3):
        print(f'\\rdone {part}', end='')
        time.sleep(0.2)
print(flush=True)
time.sleep(1)  # mpirun, on a machine with too much to do, has lost what came right before the end
"""


@pytest.mark.ci
def test_rank_0_has_a_terminal_that_leaves_room_for_the_prefix(tmp_path: Path) -> None:
    write(tmp_path, "script.py", SCRIPT)
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 90, 0, 0))
    process = subprocess.Popen(
        command("--processes", "2", "script.py"),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    shown = b""
    while True:
        try:
            shown += os.read(reading, 65536)
        except OSError:
            break  # the last writer has closed the terminal
    os.close(reading)
    assert process.wait(HANG_S) == 0
    assert b"[0] terminalos.terminal_size(columns=86, lines=40)\r\n" in shown
    assert b"[1] pipe\r\n" in shown
    for part in range(3):
        assert b"\r\x1b[K[0] done %d" % part in shown or b"\n[0] done %d" % part in shown
    assert shown.endswith(b"[0] done 2\r\n")
