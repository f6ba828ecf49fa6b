"""The context in which a model is built without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import SMPError
from .dispatch import contexts, is_deferred, run
from .replay import forget_known

__all__ = ["deferring", "is_deferring"]


def is_deferring() -> bool:
    """Whether what is made now waits."""
    return bool(contexts) and contexts[-1]


@contextlib.contextmanager
def deferring(enabled: bool = True) -> Iterator[None]:
    """Within: tensors that are made have no memory. The innermost context counts; False: as without it."""
    contexts.append(enabled)
    original = nn.Parameter.__new__
    try:
        if len(contexts) > 1:
            yield
            return
        nn.Parameter.__new__ = _parameter(original)  # type: ignore[method-assign, assignment]
        try:
            with _Deferring():
                yield
        finally:
            forget_known()
            nn.Parameter.__new__ = original  # type: ignore[method-assign]
    finally:
        contexts.pop()


class _Deferring(TorchDispatchMode):
    """Hears of every operation, those without tensors included."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(_has_deferred(value) for value in (*args, *kwargs.values())):
            return run(func, args, kwargs)
        if is_deferring() and _makes(func, args, kwargs):
            return run(func, args, kwargs)
        return func(*args, **kwargs)


def _has_deferred(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(is_deferred, value))
    return is_deferred(value)


def _makes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it makes ordinary tensors of none, on the CPU."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    if kwargs.get("layout") not in (None, torch.strided):
        return False
    if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
        # An empty one in the form of one without data: of a meta model that is made real.
        return func._schema.name == "aten::empty_like" and args[0].is_meta and device is not None
    returns = func._schema.returns
    return bool(returns) and all(str(each.type) == "Tensor" for each in returns)


def _parameter(original: Any) -> Any:
    def new(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_deferred(data) and cls is not nn.Parameter:
            raise SMPError(
                f"a {cls.__name__} cannot be made under delayed initialization, only torch.nn.Parameter: "
                "build that module within smp.delay_param_initialization(enabled=False)"
            )
        return original(cls, data, *args, **kwargs)

    return new
