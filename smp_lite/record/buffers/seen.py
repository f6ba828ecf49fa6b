"""Buffers that Python code has looked at in a step, and may still hold.

``mean = self.norm.running_mean`` is the buffer itself: what later calls of the norm make of it, whoever holds
it sees. Those calls are recorded and run later, and on one rank only. So what is held of a buffer that a call
changes is *stale* from then on, and brought up to date where it is used again, in place: views of it are
too. That runs everything that has been recorded so far, as looking at the buffer anew would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..parameters.tables import plain_table
from ..values.memory import storage_of
from ..values.placed import PlacedTensor

if TYPE_CHECKING:
    from ..step.recorder import Recorder

__all__ = ["SeenBuffers"]

_Key = tuple[int, str]  # of a module and a buffer of its own


class SeenBuffers:
    """Those of a recorder's step.

    Attributes:
        stale: those that closed calls have changed since.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.stale: dict[_Key, nn.Module] = {}
        self._tensors: dict[_Key, torch.Tensor] = {}  # as code holds them
        self._modules: dict[int | None, nn.Module] = {}  # whose they are, by memory
        self._stale_memory: set[int | None] = set()

    def forget(self) -> None:
        """The step is over, or begins."""
        self.stale.clear()
        self._tensors.clear()
        self._modules.clear()
        self._stale_memory.clear()

    def note(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Code gets to see it."""
        memory = storage_of(tensor)
        if memory is not None:
            self._modules[memory] = module
            self._tensors[id(module), name] = tensor

    def module_of(self, memory: int | None) -> nn.Module | None:
        """Whose buffer lies there, if code has seen it."""
        return self._modules.get(memory)

    def held(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """What code may hold of a buffer."""
        return self._tensors.get((id(module), name))

    def of(self, ids: frozenset[int]) -> list[torch.Tensor]:
        """What code may hold of the buffers of these modules; on other ranks than their own it is a copy."""
        return [tensor for (module, _), tensor in self._tensors.items() if module in ids]

    def changed(self, module: nn.Module, name: str) -> None:
        """A closed call changes a buffer in place."""
        tensor = self._tensors.get((id(module), name))
        if tensor is not None:
            self.stale[id(module), name] = module
            self._stale_memory.add(storage_of(tensor))

    def left(self, module: nn.Module, name: str) -> None:
        """The module has bound another tensor: what code holds of the buffer is no longer that."""
        if (id(module), name) in self._tensors:
            self.refresh([self._tensors[id(module), name]])
            del self._tensors[id(module), name]

    def refresh(self, tensors: Iterable[Any]) -> None:
        """These are about to be used: if one is stale, all are brought up to date."""
        if self.stale and any(
            isinstance(tensor, torch.Tensor)
            and type(tensor) is not PlacedTensor
            and storage_of(tensor) in self._stale_memory
            for tensor in tensors
        ):
            for (_, name), module in list(self.stale.items()):
                self.present(module, name)

    def end_recording(self) -> None:
        """All has run: what the script has kept is as it is in one process."""
        for (_, name), module in list(self.stale.items()):
            self._shared(module, name)

    def present(self, module: nn.Module, name: str) -> torch.Tensor:
        """A buffer that closed calls change, as it is by now, on every rank."""
        self.recorder.forced.warn(f"the buffer {self.recorder.placement.name(module)}.{name}")
        self.recorder.run_all_recorded()
        return self._shared(module, name)

    def _shared(self, module: nn.Module, name: str) -> torch.Tensor:
        placement = self.recorder.placement
        stage = placement.stage_of[placement.names[id(module)]]
        value = self.recorder.host.share(plain_table(module._buffers)[name], stage)
        self.stale.pop((id(module), name), None)
        held = self._tensors.get((id(module), name))
        if held is None:
            return value
        self._stale_memory.discard(storage_of(held))
        if held is not value and not placement.is_here(module):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                held.copy_(value)
            return held
        return value
