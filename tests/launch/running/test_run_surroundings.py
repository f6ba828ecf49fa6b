"""`smp-lite run` where something around it is missing: its output, its folder, a port; and ranks by hand."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launching import HANG_S, command, launch

pytestmark = pytest.mark.timeout(300)


def shell(line: str, script: Path) -> subprocess.CompletedProcess[str]:
    """`line` of a shell, in which RUN is `smp-lite run --processes 2 script`."""
    words = " ".join(f"'{word}'" for word in command("--processes", "2", str(script)))
    text = line.replace("RUN", words)
    return subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=HANG_S)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    marks = f"{tmp_path}/ran"
    path.write_text(f"import os\nopen({marks!r} + os.environ['OMPI_COMM_WORLD_RANK'], 'w')\nprint('said')\n")
    return path


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lose_what_is_printed_and_no_more(closed: str, script: Path) -> None:
    result = shell(f"RUN {closed}", script)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert all((script.parent / f"ran{rank}").exists() for rank in (0, 1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_that_is_full_is_named(script: Path) -> None:
    result = shell("RUN > /dev/full", script)
    assert result.returncode == 1
    assert result.stderr == "standard output cannot be written to: No space left on device\n"


def test_a_folder_that_is_gone_is_named(script: Path) -> None:
    gone = script.parent / "gone"
    gone.mkdir()
    result = shell(f"cd '{gone}' && rmdir '{gone}' && PYTHONPATH='{os.getcwd()}' RUN", script)
    assert result.returncode == 2
    assert result.stderr.endswith(
        "smp-lite run: the working directory has been removed: change to one that is there\n"
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.ci
def test_a_port_from_the_environment_is_named(tmp_path: Path, taken_port: int) -> None:
    (tmp_path / "script.py").write_text("import smp_lite as smp\nsmp.init({'partitions': 2, 'ddp': True})\n")
    result = launch(tmp_path, "--processes", "2", "script.py", env={"MASTER_PORT": str(taken_port)})
    assert result.returncode == 1
    assert f"cannot listen on port {taken_port}" in result.stderr
    assert "unset the environment variable MASTER_PORT" in result.stderr


@pytest.mark.ci
def test_ranks_by_hand_that_disagree_about_their_number_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = "import smp_lite as smp; smp.init({'partitions': 1, 'ddp': True})"
    where = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SMP_LITE_WATCHDOG_S": "60"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**where, "RANK": str(rank), "WORLD_SIZE": str(size)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, size in enumerate((2, 3))
    ]
    try:
        texts = [process.communicate(timeout=HANG_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert "WORLD_SIZE is 2 on rank 0, and 3 on rank 1: give all the same" in texts[0]
    assert "WORLD_SIZE is 3 on rank 1, and 2 on rank 0: give all the same" in texts[1]
