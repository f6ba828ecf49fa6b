"""Buffers of which code holds the tensor itself, beside the module: in a list, a closure, a state dict.

In one process ``self.mean = [norm.running_mean]`` follows the training, since it is the buffer's own memory.
Here a buffer that closed calls change is kept up to date on its own stage alone. What other ranks hold of it
is *behind* from the first such call on: within a step it is brought up to date where it is used
(:mod:`.seen`), and between steps, where ranks do not wait for each other, it refuses by name to be used.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import SMPError
from ..parameters.away import a_try_uses_others
from ..parameters.placement import Placement
from ..parameters.sharing_memory import asks_for_form, left_name
from ..parameters.tables import plain_table
from ..values.memory import num_users, storage_of
from ..values.torch_functions import function_name

__all__ = ["BehindBuffer", "Held", "HeldBuffers"]

_Key = tuple[int, str]  # of a module and a buffer of its own


@dataclass
class Held:
    """What code may hold of one buffer.

    Attributes:
        buffer: the tensor that the module had at the time, or that code was given for it.
        others: tensors in the same memory.
    """

    module: nn.Module
    name: str
    buffer: torch.Tensor
    others: list[torch.Tensor]

    def is_held(self) -> bool:
        """Whether anybody but its module has it, to be asked when none of our own code does."""
        own = plain_table(self.module._buffers).get(self.name) is self.buffer
        self.others = [other for other, count in zip(self.others, _counts(self.others)) if count > _LEAST]
        return bool(self.others) or _counts([self.buffer])[0] > _LEAST + 1 + own

    def set_behind(self, full: str | None) -> None:
        """Another rank has changed the buffer of that name; None: it is up to date again."""
        before, after = (torch.Tensor, BehindBuffer) if full is not None else (BehindBuffer, torch.Tensor)
        for tensor in (self.buffer, *self.others):
            if type(tensor) is before:
                tensor.__class__ = after
                if full is not None:
                    tensor.smp_left = full  # type: ignore[attr-defined]
                else:
                    del tensor.__dict__["smp_left"]


class HeldBuffers:
    """Those of one model.

    Args:
        placement: of it.
        changing: the buffers that closed calls have been seen to change.

    Attributes:
        read: those that calls of other modules have used, which have them beside these, for constants.
    """

    def __init__(self, placement: Placement, changing: Mapping[_Key, nn.Module]) -> None:
        self._placement = placement
        self._changing = changing
        self._held: dict[_Key, Held] = {}
        self.read: set[_Key] = set()

    def of_changing(self) -> Iterator[tuple[_Key, Held]]:
        """Those whose buffers closed calls change."""
        return ((key, held) for key, held in self._held.items() if key in self._changing)

    def note(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        """A closed call is about to change the buffer, or code has been given it: somebody may hold it."""
        known = self._held.get((id(module), name))
        if (known is None or known.buffer is not buffer) and type(buffer) is torch.Tensor:
            memory = storage_of(buffer)
            if memory is not None:
                others = _others(buffer, memory) if num_users(buffer) > 1 else []
                self._held[id(module), name] = Held(module, name, buffer, others)

    def leave(self, module: nn.Module, name: str) -> None:
        """The module has bound another tensor: whoever holds the one before has what that was."""
        self._held.pop((id(module), name), None)

    def look(self) -> None:
        """Between steps: lets go of those that nobody but their modules holds."""
        for key in [key for key, held in self._held.items() if not held.is_held()]:
            del self._held[key]

    def set_behind(self, module: nn.Module, name: str) -> None:
        """A call changes the buffer, on another rank perhaps."""
        held = self._held.get((id(module), name))
        if held is None or self._placement.is_here(module):
            return
        if plain_table(module._buffers).get(name) is not held.buffer:  # in the first step it still is
            held.set_behind(f"{self._placement.name(module)}.{name}")

    def set_present(self, module: nn.Module, name: str) -> None:
        """What is held of the buffer is about to be given what it is by now."""
        held = self._held.get((id(module), name))
        if held is not None:
            held.set_behind(None)

    def is_read(self, tensor: torch.Tensor, but_for: Collection[int]) -> bool:
        """A call that is tried out uses the tensor, which is not among its arguments.

        Args:
            but_for: ids of the call's own modules, in whose tables fake tensors are.

        Returns:
            Whether closed calls of other modules change it, as far as is known.
        """
        memory = storage_of(tensor)
        if memory is None:
            return False
        had = [(held.module, name, held.buffer) for (_, name), held in self._held.items()]
        keys = {
            (id(module), name)
            for module, name, buffer in (*had, *self._placement.buffers())
            if id(module) not in but_for and storage_of(buffer) == memory
        }
        self.read |= keys
        return not keys.isdisjoint(self._changing)

    def take_readers(self, module: nn.Module, name: str) -> bool:
        """Whether calls have read the buffer for one that nobody changes; forgets them."""
        was_read = (id(module), name) in self.read
        self.read.discard((id(module), name))
        return was_read


def _others(buffer: torch.Tensor, memory: int) -> list[torch.Tensor]:
    """Tensors in the same memory."""
    found = (each for each in gc.get_objects() if type(each) is torch.Tensor and each is not buffer)
    return [each for each in found if storage_of(each) == memory]


def _counts(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


_LEAST = _counts([torch.empty(0)])[0]
"""The count of a tensor that only the list is referring to that is counted."""


class BehindBuffer(torch.Tensor):
    """What this rank holds of a buffer that another has changed."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if asks_for_form(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = left_name(args, kwargs)
        a_try_uses_others()
        if getattr(func, "__name__", "") in ("__repr__", "__format__"):
            return f"<the buffer {name!r} as it was before a step changed it, in another process>"
        raise SMPError(
            f"{function_name(func)} of a tensor that is the buffer {name!r}, or in its memory: in one "
            "process it would follow the steps, and here they change it on its own stage, in another "
            "process. Within a step it can be used; between steps model.state_dict() has it; or take a copy "
            "if the numbers of then are meant (clone())"
        )
