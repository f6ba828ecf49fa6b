"""The first step in a container of a foreign image can be stopped."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from smp_lite.entrypoints import start
from tests.launch.launching import HANG_S, left_behind


def test_sigterm_ends_it_while_pip_builds(tmp_path: Path) -> None:
    slow, sign = tmp_path / "slow", tmp_path / "pip-builds"
    slow.mkdir()
    (slow / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (slow / "backend.py").write_text(f"import time\nopen({str(sign)!r}, 'w').close()\ntime.sleep(600)\n")
    archive = tmp_path / "input" / "data" / "code" / "sourcedir.tar.gz"
    archive.parent.mkdir(parents=True)
    content = f"slow @ {slow.as_uri()}\n".encode()
    with tarfile.open(archive, "w:gz") as target:
        entry = tarfile.TarInfo("smp_lite/requirements.txt")
        entry.size = len(content)
        target.addfile(entry, io.BytesIO(content))
    with subprocess.Popen([sys.executable, str(start.__file__), "--root", str(tmp_path)]) as process:
        deadline = time.monotonic() + HANG_S
        while not sign.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(HANG_S) == 128 + signal.SIGTERM
    assert left_behind(slow) == []
