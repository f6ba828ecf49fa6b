"""Runs a piece of a script in an interpreter of its own, as a launcher readies one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_READY = "import os; from smp_lite.smp_v1.before_script import prepare; prepare(os.environ)\n"


def output_of(text: str, *, ready: bool = True, **variables: str) -> str:
    """What it prints; a failure is an AssertionError with its error."""
    script = (_READY if ready else "") + textwrap.dedent(text)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=_ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
