"""A value or a parameter with uses on several stages gets the bits that its gradient has in one process."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.values.many_uses import MODELS


@pytest.mark.slow(keep=25)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("homes", ["0122", "0121", "1020", "0110", "2011"])
@pytest.mark.parametrize("further", [{}, {"pipeline": "zero_bubble"}, {"offload_activations": True}])
def test_gradients_are_those_of_one_process(name: str, homes: str, further: dict[str, object]) -> None:
    run_distributed(
        "tests.transparency.values.many_uses:train",
        3,
        kwargs={"name": name, "homes": homes},
        parameters={
            "partitions": 3,
            "microbatches": NUM_MICROBATCHES,
            "auto_partition": False,
            "default_partition": 0,
            **further,
        },
    )
