"""``x.register_hook(function)`` on a value of a step.

The hook sees the whole gradient of the value, as in one process. So it is put on the tensor itself, where it
was made: later segments compute with leaves of their own, whose gradients are parts of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .describe.descriptions import Description
from .values.placed import PlacedTensor

if TYPE_CHECKING:
    from .recorder import Recorder
    from .recording import Recording

__all__ = ["ValueHook", "register_hook"]


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


def _nothing(tensor: torch.Tensor) -> None:
    """What the recording sees of it."""
