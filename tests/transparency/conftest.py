"""Sessions of these tests: one process plays all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import smp_lite as smp
from tests.transparency.comparison import NUM_MICROBATCHES

OpenSession = Callable[..., None]


@pytest.fixture
def open_session() -> OpenSession:
    """``open_session(num_stages, placement, **parameters)`` opens one; again, anew."""

    def start(num_stages: int, placement: str = "auto", **parameters: Any) -> None:
        smp.reset()
        config = {"partitions": num_stages, "microbatches": NUM_MICROBATCHES, **parameters}
        if placement == "zigzag":
            config |= {"auto_partition": False, "default_partition": 0}
        smp.init_in_memory(config)

    return start
