"""What every test starts from: the same random numbers, one torch thread.

Tests of the pure parts never import torch, so nothing here imports it for them.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile

import pytest

from smp_lite.entrypoints.mpi.mpirun import own_session_folder

# Before any test module imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# For tests that start mpirun without the launcher, beside another process of pytest that does so too.
_mpirun_folder = tempfile.TemporaryDirectory(prefix="smp-lite-tests-")
os.environ.update(own_session_folder(_mpirun_folder.name, (), {}))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked ``thorough``, unless all is asked for (``make test-all``)."""
    if os.environ.get("SMP_LITE_ALL_TESTS") == "1":
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
