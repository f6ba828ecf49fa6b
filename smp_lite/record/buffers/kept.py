"""What buffers were when a step began, of those that Python code on every rank changes.

The code of modules that are cut over stages runs on every rank while the step is recorded, and with it
``self.steps += 1``. If the step fails, one rank may have come as far as that line and another not: so all go
back to what was there before. (What closed calls change is their owner's, which copies it at the beginning of
each step: :mod:`.module_buffers`.) A buffer is copied when code is about to change it, so a step that changes
none pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..parameters.placement import Placement
from ..parameters.tables import plain_table
from ..values.memory import storage_of

__all__ = ["KeptBuffers"]

_NOTHING = object()


class KeptBuffers:
    """The buffers of one model, in one step."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        # Those of now, with their modules; None: nobody has asked.
        self._by_memory: dict[int, list[tuple[nn.Module, torch.Tensor]]] | None = None
        # By id: a buffer, which memory it had, and a copy.
        self._values: dict[int, tuple[torch.Tensor, int | None, torch.Tensor]] = {}
        self._bound: dict[tuple[int, str], tuple[nn.Module, Any]] = {}  # what a name stood for

    def begin_step(self) -> None:
        """From here on everything is kept."""
        self._by_memory = None
        self._values.clear()
        self._bound.clear()

    def before_change(self, target: torch.Tensor) -> None:
        """An ordinary tensor, which may be a buffer or a view of one, is about to change in place."""
        for _, buffer in self._in_memory_of(target):
            self.keep(buffer)

    def modules_of(self, target: torch.Tensor) -> list[nn.Module]:
        """Those of which an ordinary tensor is a buffer, or lies in the memory of one."""
        return [module for module, _ in self._in_memory_of(target)]

    def keep(self, buffer: torch.Tensor, value: torch.Tensor | None = None) -> None:
        """Copies a buffer, if that has not been done in this step; or takes ``value`` for what it was."""
        if id(buffer) not in self._values:
            if value is None:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    value = buffer.clone()
            self._values[id(buffer)] = (buffer, storage_of(buffer), value)

    def value_of(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """What a buffer was before the step, if it has been copied."""
        found = self._values.get(id(buffer))
        return found[2] if found is not None else None

    def before_binding(self, module: nn.Module, name: str) -> None:
        """Another tensor, or nothing, is about to be bound as the module's buffer of that name."""
        table = plain_table(module._buffers)
        self._bound.setdefault((id(module), name), (module, table.get(name, _NOTHING)))

    def restore(self) -> None:
        """The step has failed."""
        for (_, name), (module, buffer) in self._bound.items():
            table = plain_table(module._buffers)
            if buffer is _NOTHING:
                table.pop(name, None)
            else:
                table[name] = buffer
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for buffer, memory, value in self._values.values():
                if storage_of(buffer) == memory and buffer.shape == value.shape:
                    buffer.copy_(value)
                else:  # by buffer.data = ..., or resized
                    buffer.data = value.clone()

    def _in_memory_of(self, target: torch.Tensor) -> Sequence[tuple[nn.Module, torch.Tensor]]:
        if self._by_memory is None:
            self._by_memory = {}
            for module, _, buffer in self._placement.buffers():
                memory = storage_of(buffer)
                if memory is not None:
                    self._by_memory.setdefault(memory, []).append((module, buffer))
        return self._by_memory.get(storage_of(target), ())  # type: ignore[arg-type]
