"""Between resuming and the first step, which puts a rank's part in place, nobody looks at other numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_distributed
from tests.transparency.failing.waiting_cases import LOOKS

CASES = "tests.transparency.failing.waiting_cases"


@pytest.mark.parametrize("kind", ["partial", "portable"])
def test_what_waits_is_not_looked_at(kind: str, tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path), "kind": kind}
    for found in run_distributed(f"{CASES}:resumed", 2, kwargs=kwargs):
        for name in LOOKS:
            assert "that was loaded and waits" in found["told"][name], name
        assert "that was loaded and waits" in found["converted"]
        assert found["count"] == 80 and "waits for the first step" in found["shown"]
        assert found["heat"] == 1.5**2
        assert found["losses"][0] == found["losses"][1]
        assert found["kinds"] <= {"Parameter", "AwayParameter"}
        assert found["rate"] == 0.0 and found["halved"]


def test_each_of_several_optimizers_has_its_own_state(tmp_path: Path) -> None:
    for found in run_distributed(f"{CASES}:several", 2, kwargs={"folder": str(tmp_path)}):
        assert found["losses"][0] == found["losses"][1]
        assert "from an optimizer of another kind: it has the settings ['amsgrad', 'betas'" in found["kind"]
        assert "the checkpoint has the state of one optimizer, and 2 are wrapped" in found["told"]
