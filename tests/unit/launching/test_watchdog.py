"""The limit of all waits is a number that passes."""

from __future__ import annotations

import pytest

from smp_lite.comm.waiting import WATCHDOG_VARIABLE, set_watchdog, watchdog_s


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "0", "-1", "", "soon"])
def test_a_limit_that_never_passes_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WATCHDOG_VARIABLE, text)
    with pytest.raises(ValueError, match=f"SMP_LITE_WATCHDOG_S='{text}': give a positive number of seconds"):
        watchdog_s()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0, -1])
def test_so_is_one_that_a_script_sets(seconds: float) -> None:
    with pytest.raises(ValueError, match="give a positive number of seconds"):
        set_watchdog(seconds)
