"""``smp.state`` and the star import work before ``smp.init()``; reading the session then says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import smp_lite as smp


def test_state_is_there_before_init() -> None:
    assert hasattr(smp, "state")
    assert repr(smp.state) == "<smp.state before smp.init()>"
    with pytest.raises(smp.SMPError, match=r"call smp.init\(\) first"):
        _ = smp.state.cfg


def test_state_is_the_session_after_it() -> None:
    smp.init_in_memory({"partitions": 2})
    try:
        assert smp.state.num_stages == 2
        smp.state.is_stopping = True
        assert smp.state.is_stopping
    finally:
        smp.reset()
    assert "before smp.init()" in repr(smp.state)


@pytest.mark.slow
def test_star_import_before_init() -> None:
    code = "from smp_lite import *; print(DistributedModel.__name__, state, clip_grad_norm_.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "DistributedModel <smp.state before smp.init()> clip_grad_norm_\n"
