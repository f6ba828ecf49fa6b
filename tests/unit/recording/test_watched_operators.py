"""The watch pauses in torch's own operators, and nowhere where code of the user's may run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from smp_lite.record.code import operators
from smp_lite.record.describe.metadata import MetadataInference
from smp_lite.record.values.calls import Arguments

FACTOR = 3


@torch.library.custom_op("smp_lite_tests::longer", mutates_args=())
def longer(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(FACTOR)


@longer.register_fake
def _longer_without_data(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(FACTOR * len(x))


class _Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _entered(function: Any) -> set[str]:
    """Names of the functions of this file that are seen to run."""
    _, names, _ = MetadataInference().module(_Calls(function), Arguments.of((torch.ones(4),), {}))
    return {code.co_name for code in names.functions if code.co_filename == __file__} - {"forward"}


_DISPATCH = """
def dispatch(mode, func, *args, **kwargs):
    seen[str(func)] = sys.getprofile() is not None
    return original(mode, func, *args, **kwargs)
"""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """By operator, whether the watch was on while fake tensors ran it last."""
    seen: dict[str, bool] = {}
    scope: dict[str, Any] = {"sys": sys, "seen": seen, "original": FakeTensorMode.dispatch}
    exec(compile(_DISPATCH, torch.__file__, "exec"), scope)  # as torch's, whose own lists do not count
    monkeypatch.setattr(FakeTensorMode, "dispatch", scope["dispatch"])
    return seen


@pytest.mark.skipif(not operators.PAUSES, reason="the watch does not pause")
def test_torchs_own_operators_are_not_watched(watched: dict[str, bool]) -> None:
    _entered(lambda x: longer(torch.tanh(x)))
    assert not watched["aten.tanh.default"]
    assert watched["smp_lite_tests.longer.default"]


def test_what_runs_after_an_operator_is_watched() -> None:
    def after(x: torch.Tensor) -> torch.Tensor:
        return x

    assert "after" in _entered(lambda x: after(torch.tanh(x)))


def test_a_watch_is_on_again_after_an_error() -> None:
    def after(x: torch.Tensor) -> torch.Tensor:
        return x

    def tries(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            torch.mm(x, x)
        return after(x)

    assert "after" in _entered(tries)


def test_the_fake_kernel_of_a_custom_operator_is_watched() -> None:
    assert "_longer_without_data" in _entered(longer)


@contextlib.contextmanager
def _own_kernel(key: str) -> Iterator[None]:
    def angle_of_ours(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    library = torch.library.Library("aten", "IMPL")
    library.impl("angle", angle_of_ours, key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()
        operators._of_others.clear()
        operators._looked_at.clear()


def test_a_kernel_of_the_users_for_torchs_operator_is_watched() -> None:
    with _own_kernel("Meta"):
        assert "angle_of_ours" in _entered(torch.angle)


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_below_a_dispatch_mode_of_the_users_the_watch_stays_on(watched: dict[str, bool]) -> None:
    with _DispatchMode():
        assert "__torch_dispatch__" in _entered(torch.tanh)
    assert watched["aten.tanh.default"]


def test_a_function_mode_of_the_users_is_not_passed_over() -> None:
    with _FunctionMode():
        assert not operators._modes_are_known()
        assert "__torch_function__" in _entered(torch.tanh)
    assert operators._modes_are_known()


class _Tensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("given", [(_Tensor(),), ([torch.ones(1), _Tensor()],)])
def test_tensors_of_the_users_classes_are_watched(given: tuple[Any, ...]) -> None:
    assert not operators._are_plain(given)
    assert operators._are_plain((torch.ones(1), [torch.ones(1)], 2, "a"))
