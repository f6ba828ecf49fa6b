"""Sessions of these tests: one process plays all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

import smp_lite as smp

if TYPE_CHECKING:  # pytest reads this file before it knows where tensors belong (--device)
    from tests.models import Batch
    from tests.transparency.rounds import Round
    from tests.transparency.schedules.weight_gradients import Check

OpenSession = Callable[..., None]


@pytest.fixture
def open_session() -> OpenSession:
    """``open_session(num_stages, placement, **parameters)`` opens one; again, anew."""

    from tests.transparency.comparison import NUM_MICROBATCHES

    def start(num_stages: int, placement: str = "auto", **parameters: Any) -> None:
        smp.reset()
        config = {"partitions": num_stages, "microbatches": NUM_MICROBATCHES, **parameters}
        if placement == "zigzag":
            config |= {"auto_partition": False, "default_partition": 0}
        smp.init_in_memory(config)

    return start


@pytest.fixture
def check(open_session: OpenSession) -> Check:
    """Opens a session that gives gradients of parameters in actions of their own."""

    from tests.transparency.rounds import Round, assert_rounds_equal
    from tests.transparency.schedules.weight_gradients import BATCH, split_names, train

    def run(
        build: Callable[[], nn.Module],
        *rounds: Round,
        batch: Batch = BATCH,
        function: Callable[..., Any] = train,
        **parameters: Any,
    ) -> set[str]:
        open_session(2, "zigzag", pipeline="zero_bubble", **parameters)
        assert_rounds_equal(build, rounds or [Round(function, batch)] * 3)
        return split_names(smp.state.model)

    return run
