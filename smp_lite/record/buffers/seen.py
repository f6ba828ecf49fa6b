"""Buffers that Python code has looked at in a step, and may still hold.

``mean = self.norm.running_mean`` is the buffer itself: what later calls of the norm make of it, whoever holds
it sees. Those calls are recorded and run later, and on one rank only. So what is held of a buffer that a call
changes is *stale* from then on, and brought up to date where it is used again, in place: views of it are
too. So it is with what is held from before the step (:mod:`.held`). That runs everything that has been
recorded so far, as looking at the buffer anew would. Nobody hears of the use of an array that shares its
memory (``mean.numpy()``): then each call runs at once that changes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..parameters.sharing_memory import asks_for_form
from ..parameters.split_reads import members_of
from ..parameters.tables import plain_table
from ..values.memory import storage_of
from ..values.placed import PlacedTensor
from .held import HeldBuffers

if TYPE_CHECKING:
    from ..step.recorder import Recorder

__all__ = ["SeenBuffers"]

_Key = tuple[int, str]  # of a module and a buffer of its own


class SeenBuffers:
    """Those of a recorder's step.

    Attributes:
        stale: those that closed calls have changed since, or steps before.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.stale: dict[_Key, None] = {}
        self._held: dict[_Key, tuple[nn.Module, torch.Tensor]] = {}  # as code has got them
        self._noted: set[_Key] = set()  # those of them that it has got in this step, on all ranks
        self._left: list[tuple[nn.Module, torch.Tensor]] = []  # of which calls have bound others since
        self._unheard: set[_Key] = set()  # of which it has got arrays

    def forget(self) -> None:
        """The step is over, or begins."""
        self.stale.clear()
        self._held.clear()
        self._noted.clear()
        self._left.clear()
        self._unheard.clear()

    def hold(self, held: HeldBuffers) -> None:
        """A step begins: what code holds by now, which is not the same on all ranks."""
        for key, each in held.of_changing():
            self._held[key] = (each.module, each.buffer)
            self.changed(each.module, key[1])

    def noted(self) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
        """What code has got in this step."""
        return ((key[1], *self._held[key]) for key in self._noted if key in self._held)

    def brought_up_to_date(self) -> set[_Key]:
        """The step is over, and has not failed: what code has got in it, or has used."""
        return self._held.keys() - self.stale.keys()

    def note(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Code gets to see it."""
        if storage_of(tensor) is not None:
            self._held[id(module), name] = (module, tensor)
            self._noted.add((id(module), name))

    def may_be_held(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        """A closed call is about to be recorded that changes it, for the first time."""
        self._held.setdefault((id(module), name), (module, tensor))

    def note_arrays(self, tensors: Iterable[Any]) -> None:
        """Code gets arrays that share the memory of tensors."""
        memory = {storage_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
        self._unheard.update(key for key, (_, held) in self._held.items() if storage_of(held) in memory)

    def module_of(self, memory: int | None) -> nn.Module | None:
        """Whose buffer lies there, or did before a call of this step bound another, if code has seen it."""
        all_held = (*self._held.values(), *self._left)
        return next((module for module, held in all_held if storage_of(held) == memory), None)

    def keys_in(self, memory: int) -> list[_Key]:
        """What code may hold in that memory."""
        return [key for key, (_, held) in self._held.items() if storage_of(held) == memory]

    def held(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """What code may hold of a buffer."""
        found = self._held.get((id(module), name))
        return None if found is None else found[1]

    def of(self, ids: frozenset[int]) -> list[torch.Tensor]:
        """What code may hold of the buffers of these modules; on other ranks than their own it is a copy."""
        return [held for module, held in self._held.values() if id(module) in ids]

    def changed(self, module: nn.Module, name: str) -> None:
        """A closed call is about to be recorded that changes a buffer in place."""
        if (id(module), name) in self._held:
            self.stale[id(module), name] = None
            self.recorder.buffers.held.set_behind(module, name)

    def left(self, module: nn.Module, name: str) -> None:
        """The module binds another tensor: what code holds of the buffer is no longer that."""
        if (id(module), name) in self.stale and (id(module), name) in self._noted:
            self._refresh(())
        found = self._held.pop((id(module), name), None)
        if found is not None:
            self._left.append(found)  # the call that binds the other has yet to read this one

    def recorded(self) -> None:
        """That call is recorded."""
        if not self._unheard.isdisjoint(self.stale):
            self._refresh(self._unheard)

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch function is about to be called."""
        if not asks_for_form(func):
            self.refresh(members_of(args, kwargs))

    def refresh(self, tensors: Iterable[Any]) -> None:
        """These are about to be used: if one is stale, so are all brought up to date that code has got."""
        used = {
            storage_of(tensor)
            for tensor in tensors
            if isinstance(tensor, torch.Tensor) and type(tensor) is not PlacedTensor
        }
        keys = {key for key in self.stale if storage_of(self._held[key][1]) in used} if used else ()
        if keys:
            self._refresh(keys)

    def _refresh(self, keys: Collection[_Key]) -> None:
        for key in self._in_order(keys):
            self.present(self._held[key][0], key[1])

    def end_recording(self) -> None:
        """All has run: what the script has kept is as it is in one process."""
        for key in self._in_order(()):
            self._shared(self._held[key][0], key[1])

    def _in_order(self, used: Collection[_Key]) -> list[_Key]:
        """The stale ones among them and those that code has got, as all ranks have them, in one order."""
        name = self.recorder.placement.name
        found = [key for key in self.stale if key in used or key in self._noted]
        return sorted(found, key=lambda key: (name(self._held[key][0]), key[1]))

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
        held = self.held(module, name)
        if held is None or held is value or placement.is_here(module):
            return value
        self.recorder.buffers.held.set_present(module, name)
        self.recorder.buffers.kept.keep(held)  # it may be what this rank's table has, and the step may fail
        with torch.no_grad(), torch._C.DisableTorchFunction():
            held.copy_(value)
        return held
