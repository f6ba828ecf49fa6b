"""What every test starts from: the same random numbers, one torch thread.

Tests of the pure parts never import torch, so nothing here imports it for them.
"""

from __future__ import annotations

import os
import random
import sys

import pytest

# Before any test module imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
