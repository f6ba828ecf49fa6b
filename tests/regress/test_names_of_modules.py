"""``smp.progress`` was the function the first time, and from then on the module of the same name."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.ci
def test_a_public_name_stays_what_it_is() -> None:
    program = "import smp_lite as smp; smp.progress(1); smp.progress(1); assert callable(smp.progress)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
