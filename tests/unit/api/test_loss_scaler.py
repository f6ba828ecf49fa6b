"""The scale of an fp16 loss after every update, by the rules that SMP's examples document."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from smp_lite.errors import SMPError
from smp_lite.optim.half.loss_scaler import MOST_AT_SMALLEST, DynamicLossScaler, LossScaler, scaler_of

VECTORS = [
    # init, window, shift, consecutive, updates ("o": overflow), scale after each
    ((16, 4, 1, False), "ooo.....", [8, 4, 2, 2, 2, 2, 4, 4]),
    ((16, 4, 2, False), "ooo....oo", [16, 8, 4, 4, 4, 4, 8, 8, 4]),
    ((16, 4, 2, True), "o.o....", [16, 16, 16, 16, 16, 16, 32]),
    ((16, 4, 2, False), "o.o....", [16, 16, 8, 8, 8, 8, 16]),
    ((16, 4, 1, False), "........", [16, 16, 16, 32, 32, 32, 32, 64]),
]


@pytest.mark.parametrize(("arguments", "updates", "scales"), VECTORS)
def test_scales_are_those_of_the_vectors(arguments: Any, updates: str, scales: list[float]) -> None:
    init, window, shift, consecutive = arguments
    scaler = DynamicLossScaler(init, 2, window, 1, shift, consecutive)
    found = []
    for update in updates:
        scaler.update_scale(update == "o")
        found.append(scaler.loss_scale)
    assert found == scales


def test_a_scale_does_not_fall_below_the_smallest() -> None:
    scaler = DynamicLossScaler(init_scale=8, min_scale=2)
    found = []
    for _ in range(6):
        scaler.update_scale(True)
        found.append(scaler.loss_scale)
    assert found == [4, 2, 2, 2, 2, 2]


def test_the_defaults_over_two_thousand_steps() -> None:
    scaler = DynamicLossScaler()
    scales = []
    for _ in range(2005):
        scaler.update_scale(False)
        scales.append(scaler.loss_scale)
    assert scales[:999] == [2.0**32] * 999
    assert scales[999:1999] == [2.0**33] * 1000
    assert scales[1999:] == [2.0**34] * 6


def test_many_overflows_at_the_smallest_scale_are_an_error() -> None:
    for scaler in (DynamicLossScaler(init_scale=1.0), LossScaler(128.0)):
        for _ in range(MOST_AT_SMALLEST - 1):
            scaler.update_scale(True)
        scaler.update_scale(False)  # one step without makes up for all of them
        for _ in range(MOST_AT_SMALLEST - 1):
            scaler.update_scale(True)
        with pytest.raises(SMPError, match="in 100 steps in a row at the smallest loss scale"):
            scaler.update_scale(True)


def test_overflows_above_the_smallest_scale_do_not_count() -> None:
    scaler = DynamicLossScaler(init_scale=2.0**200)
    for _ in range(200 + MOST_AT_SMALLEST - 1):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
    with pytest.raises(SMPError):
        scaler.update_scale(True)


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(128.0)
    for overflow in (True, False, True):
        scaler.update_scale(overflow)
        assert scaler.loss_scale == 128.0


def test_arguments_ask_for_one_of_both() -> None:
    args = {"scale_window": 5, "min_scale": 2}
    assert scaler_of(None, False, args, {}).loss_scale == 1.0  # scripts give them all the same
    assert scaler_of(64, False, None, {}).loss_scale == 64.0
    dynamic = scaler_of(64, True, args, {"init_scale": 2.0**10})
    assert isinstance(dynamic, DynamicLossScaler)
    assert (dynamic.loss_scale, dynamic.scale_window, dynamic.min_scale) == (1024.0, 5, 2.0)


@pytest.mark.parametrize(
    ("static", "dynamic", "args", "error"),
    [
        (0, False, None, "static_loss_scale must be a finite number above 0, got 0"),
        (float("nan"), False, None, "static_loss_scale must be a finite number"),
        (1, True, {"init_scale": -1.0}, "init_scale must be a finite number above 0"),
        (1, True, {"scale_factor": 1}, "scale_factor must be above 1, got 1"),
        (1, True, {"scale_window": 0}, "scale_window must be a whole number of 1 or more, got 0"),
        (1, True, {"delayed_shift": 1.5}, "delayed_shift must be a whole number"),
        (1, True, {"consecutive_hysteresis": 1}, "consecutive_hysteresis must be True or False"),
        (1, True, {"init_scale": 1.0, "min_scale": 2.0}, "min_scale=2.0 is above init_scale=1.0"),
        (1, True, {"window": 3}, "dynamic_loss_args has no 'window'"),
    ],
)
def test_a_wrong_argument_is_named(static: Any, dynamic: bool, args: Any, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        scaler_of(static, dynamic, args, {})


def test_a_state_goes_on_where_it_was_saved() -> None:
    one, other = (DynamicLossScaler(16, scale_window=4, delayed_shift=2) for _ in range(2))
    for update in "o..":
        one.update_scale(update == "o")
    other.load_state_dict(one.state_dict())
    for update in "o....":
        one.update_scale(update == "o")
        other.update_scale(update == "o")
        assert other.state_dict() == one.state_dict()
    with pytest.raises(ValueError, match="one is static and the other dynamic"):
        LossScaler().load_state_dict(one.state_dict())


def test_it_needs_no_torch() -> None:
    program = "import sys, smp_lite.optim.half.loss_scaler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
