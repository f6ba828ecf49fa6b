"""Hooks on gradients that are put on inside a step.

``x.register_hook(function)`` on a value sees the whole gradient of the value, as in one process. So it is put
on the tensor itself, where it was made: later segments compute with leaves of their own, whose gradients are
parts of it.

Parameters and modules outlive their microbatch. A hook that one microbatch's code puts on these sees what
comes after it, which here is another order: forwards of later microbatches come before the first backward. So
that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...errors import SMPError
from ..describe.descriptions import Description
from ..values.placed import PlacedTensor

if TYPE_CHECKING:
    from ..commands.recording import Recording
    from .recorder import Recorder

__all__ = [
    "ON_LEAVES",
    "ValueHook",
    "refuse_on_module",
    "refuse_on_parameter",
    "refuse_removed",
    "register_hook",
]

ON_LEAVES = ("register_hook", "register_post_accumulate_grad_hook")
"""Methods of tensors that put a hook on the gradient of a parameter."""

_BETWEEN = (
    "inside an smp.step, whose backwards run later than in one process, when forwards of other microbatches "
    "have run too: put it on between steps, or put one on a value (x.register_hook)"
)


class ValueHook:
    """The handle that ``register_hook`` returns, and the function that does the work.

    Args:
        hook: gets the gradient and returns another one or None.
        recording: of the microbatch; when its backward has been called it is too late to remove the hook.
    """

    def __init__(self, hook: Any, recording: Recording) -> None:
        self.hook = hook
        self.__name__ = "register_hook"
        self._recording = recording
        self._is_removed = False

    def remove(self) -> None:
        """As of ``torch.utils.hooks.RemovableHandle``."""
        if not self._recording.backwards:
            self._is_removed = True

    def __enter__(self) -> ValueHook:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __call__(self, tensor: torch.Tensor) -> None:
        """Puts it on the tensor that was made."""
        if not self._is_removed:
            tensor.register_hook(self.hook)


def register_hook(recorder: Recorder, placed: PlacedTensor, hook: Any) -> ValueHook:
    """Records that the hook is put on; it runs where the value is made.

    Raises:
        RuntimeError: the value has no gradient.
    """
    if not placed.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    assert recorder.recording is not None
    made = ValueHook(hook, recorder.recording)
    arguments = recorder.arguments((placed,), {})
    described = recorder.descriptions.describe("register_hook", _nothing, arguments, recorder.ambient())
    assert isinstance(described, Description)
    recorder.writer.on_made(made, arguments, described)
    return made


def refuse_on_parameter(recorder: Recorder, name: str | None, method: str) -> None:
    """
    Raises:
        SMPError: there are several microbatches; or the hook wants the sum of gradients, so it can only be
            put on the parameter itself, and recorded code has something in its place.
    """
    if recorder.num_microbatches > 1 or method != "register_hook":
        raise SMPError(f"a hook was put on the gradient of the parameter {name!r} {_BETWEEN}")


def refuse_on_module(recorder: Recorder, module: nn.Module) -> None:
    """Calls that are recorded run later, with the hooks that are there then.

    Raises:
        SMPError: it is a module of the model, and there are several microbatches.
    """
    if recorder.num_microbatches > 1 and id(module) in recorder.placement.owners:
        name = recorder.placement.name(module)
        raise SMPError(f"a backward hook was put on the module {name!r} {_BETWEEN}")


def refuse_removed(recorder: Recorder, table: Any) -> None:
    """A backward that is recorded runs later, without the hooks that are gone by then.

    Args:
        table: what a hook is taken out of.

    Raises:
        SMPError: it is of gradients of the model's modules or parameters.
    """
    of_all = (torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks)
    is_of_all = any(table is each for each in of_all)
    name = "all modules" if is_of_all else recorder.placement.of_gradient_hooks(table)
    if name is not None:
        raise SMPError(
            f"a backward hook was taken off {name} inside an smp.step, where a forward or backward that it "
            "is for may not have run yet: call handle.remove() between steps, or in the hook itself"
        )


def _nothing(tensor: torch.Tensor) -> None:
    """What the recording sees of it."""
