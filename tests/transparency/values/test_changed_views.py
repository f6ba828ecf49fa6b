"""Changes in place and views of one tensor, on several stages: equal to one process, or refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from tests.models import Batch
from tests.transparency.conftest import OpenSession
from tests.transparency.rounds import Round, assert_rounds_equal
from tests.transparency.values.changed_views import HARD, KEPT, WIDTH, Root, random_lines


def batch() -> Batch:
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))}


def train(model: Any, batch: Batch, backward: Callable[..., None]) -> Tensor:
    loss = model(batch["x"])
    backward(loss)
    return loss


def compare(open_session: OpenSession, lines: list[str], kinds: list[int], stages: list[int]) -> None:
    """Raises SMPError or AssertionError."""
    open_session(max(stages) + 1, auto_partition=False, default_partition=0)

    def build() -> nn.Module:
        return Root(lines, kinds)

    places = {f"blocks.{i}": stage for i, stage in enumerate(stages)}
    assert_rounds_equal(build, [Round(train, batch())] * 2, places)


@pytest.mark.parametrize("name", HARD)
def test_an_order_of_sums_that_is_not_kept_is_refused(name: str, open_session: OpenSession) -> None:
    stages, code = HARD[name]
    lines = [line.strip() for line in code.splitlines()]
    with pytest.raises(smp.SMPError, match=r"clone\(\)"):
        compare(open_session, lines, [0] * len(stages), [int(stage) for stage in stages])


@pytest.mark.parametrize("name", KEPT)
def test_an_order_of_sums_that_is_kept(name: str, open_session: OpenSession) -> None:
    stages, code = KEPT[name]
    lines = [line.strip() for line in code.splitlines()]
    compare(open_session, lines, [0] * len(stages), [int(stage) for stage in stages])


@pytest.mark.parametrize("part", [0, *[pytest.param(i, marks=pytest.mark.slow) for i in range(1, 8)]])
def test_random_roots(part: int, open_session: OpenSession) -> None:
    found: Counter[str] = Counter()
    for seed in range(60 * part, 60 * part + 60):
        chance = random.Random(seed)
        num_blocks, num_stages = chance.randint(3, 4), chance.randint(2, 3)
        kinds = [chance.randrange(3) for _ in range(num_blocks)]
        stages = [chance.randrange(num_stages) for _ in range(num_blocks)]
        stages[:num_stages] = chance.sample(range(num_stages), num_stages)
        lines = random_lines(chance, num_blocks)
        try:
            Root(lines, kinds)(batch()["x"]).backward()
        except RuntimeError:
            found["not in one process either"] += 1
            continue
        try:
            compare(open_session, lines, kinds, stages)
            found["equal"] += 1
        except smp.SMPError:
            found["refused"] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: " + "\n".join(lines)) from error
    assert found["equal"] >= 30, found
