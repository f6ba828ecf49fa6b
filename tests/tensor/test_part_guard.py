"""Between steps a part of a split parameter does not pass for the whole."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.tensor import part_guard_cases as cases

CASES = "tests.tensor.part_guard_cases"


def test_what_is_of_one_part_is_refused() -> None:
    for told in run_distributed(f"{CASES}:refused", 2):
        for name, texts in told.items():
            assert len(texts) == 3, name
            assert all("has a part of it" in text for text in texts), (name, texts)


def test_so_it_is_in_hooks_and_closures() -> None:
    for told in run_distributed(f"{CASES}:in_hooks_and_closures", 2):
        assert told.keys() == {"before", "closure", "after", "then"}
        assert all("has a part of it" in text for text in told.values()), told


def test_what_is_right_on_parts_runs() -> None:
    for found in run_distributed(f"{CASES}:allowed", 2):
        assert found == dict.fromkeys(cases.ALLOWED, True)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_plain_loops_with_optimizers_that_nobody_wrapped(name: str) -> None:
    for ours, theirs, norm, whole in run_distributed(f"{CASES}:trained_plainly", 2, kwargs={"name": name}):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert norm == pytest.approx(whole, rel=1e-5)


def test_after_the_session_they_are_ordinary() -> None:
    assert run_distributed(f"{CASES}:ended", 2) == ["Parameter", "Parameter"]
