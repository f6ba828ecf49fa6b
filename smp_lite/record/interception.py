"""Where recording listens: module calls, torch functions, autograd functions.

While a recorder is active, ``Module.__call__`` and ``autograd.Function.apply`` are replaced (never
``forward``, so hooks of owned modules fire when the owner runs them and not while recording, as in
torch.fx), and a torch function mode is on. The mode sees calls on ordinary tensors as well: recording
must know when one that a command has captured is changed in place. Placed tensors are recognised by the
mode too, so each call costs one look-up only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from .placed import PlacedTensor
from .source_line import CHECKPOINT_WITHOUT_EFFECT, warn_once_at_user_line

if TYPE_CHECKING:
    from .recorder import Recorder

_active: Recorder | None = None


class ApplyFunction:
    """``SomeFunction.apply`` as a recordable callable; equal for the same class."""

    def __init__(self, cls: type[torch.autograd.Function]) -> None:
        self.cls = cls
        self.__name__ = f"{cls.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApplyFunction) and self.cls is other.cls

    def __hash__(self) -> int:
        return hash(self.cls)


class _Listener(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = self.recorder
        if recorder.suspended or recorder.descriptions.inferring or PlacedTensor in types:
            # Placed tensors bring their own handler, which runs next.
            return func(*args, **(kwargs or {}))
        return recorder.ordinary_function(func, args, kwargs or {})


@contextlib.contextmanager
def listening(recorder: Recorder) -> Iterator[None]:
    """Routes calls to the recorder until left.

    Raises:
        RuntimeError: another recorder is listening in this process.
    """
    global _active
    if _active is not None:
        raise RuntimeError("a step function was called inside another step function: call it outside")
    original_call = nn.Module.__call__
    original_apply = torch.autograd.Function.__dict__["apply"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.descriptions.inferring:
            return module.forward(*args, **kwargs)
        if recorder.suspended:
            return original_call(module, *args, **kwargs)
        return recorder.call_module(module, original_call, args, kwargs)

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        listens = not recorder.suspended and not recorder.descriptions.inferring
        if listens and cls is CheckpointFunction:
            # Reentrant checkpointing hands over a function that may call modules of any stage.
            warn_once_at_user_line(CHECKPOINT_WITHOUT_EFFECT)
            run_function, _, *inputs = args
            return run_function(*inputs)
        if listens and any(type(arg) is PlacedTensor for arg in args):
            return recorder.torch_function(ApplyFunction(cls), args, kwargs)
        return original_apply.__get__(None, cls)(*args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    _active = recorder
    try:
        with _Listener(recorder):
            yield
    finally:
        _active = None
        nn.Module.__call__ = original_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = original_apply  # type: ignore[method-assign]
