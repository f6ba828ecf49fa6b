"""Buffers and changed parameters of modules, between the calls that use them and their runs.

The owner of a module keeps its buffers up to date as the calls run, later than the user's code is recorded
around them. So when Python code looks at a buffer, binds it anew or changes its memory, what has been
recorded runs first; a placed value that is bound as a buffer is written into it before the next closed call;
and calls that change buffers, or use parameters that are changed in place, keep their order. If a step fails,
buffers are as they were before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import SMPError
from ..backward.checkpoints import refuse_effect
from ..commands.binding import sharing_memory
from ..commands.replay import refuse
from ..parameters.tables import owner_of, plain_table
from ..values.calls import Arguments, ResultMeta
from ..values.memory import storage_of
from ..values.placed import PlacedTensor
from .held import HeldBuffers
from .kept import KeptBuffers
from .seen import SeenBuffers

if TYPE_CHECKING:
    from ..step.recorder import Recorder

__all__ = ["ModuleBuffers"]

_Key = tuple[int, str]
"""Of a module, by id, and the name of a buffer of its own."""


class ModuleBuffers:
    """The buffers of one recorder's modules.

    Attributes:
        rebound: buffers that placed values stand for.
        kept: what Python code changes on every rank, as it was before the step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.placement = recorder.placement
        self.rebound: dict[_Key, nn.Module] = {}
        self.kept = KeptBuffers(recorder.placement)
        self._changing: dict[_Key, nn.Module] = {}  # those that closed calls change
        self._changing_now: dict[_Key, nn.Module] = {}  # those of this step
        self._returned: dict[int | None, str] = {}  # names of those that closed calls return, by memory
        self.seen = SeenBuffers(recorder)
        self.held = HeldBuffers(recorder.placement, self._changing)
        self._saved: dict[_Key, tuple[nn.Module, torch.Tensor, torch.Tensor]] = {}
        self._changed_before: frozenset[_Key] = frozenset()  # this step: of those that closed calls change
        self._numbers: dict[int, int] = {}
        self._stateful: dict[int, nn.Module] = {}  # modules with parameters that are changed between calls

    @property
    def num_stateful(self) -> int:
        """How many modules have parameters that are changed in place between calls."""
        return len(self._stateful)

    def changing(self) -> dict[int, str]:
        """Names, by their memory, of the buffers that closed calls of this step change."""
        found = {}
        for (_, name), module in self._changing_now.items():
            buffer = plain_table(module._buffers).get(name)
            memory = None if buffer is None else storage_of(buffer)
            if memory is not None:
                found[memory] = f"{self.placement.name(module)}.{name}"
        return found

    def begin_step(self) -> None:
        """Copies what closed calls of earlier steps have changed."""
        self._changing_now.clear()
        self._returned.clear()
        self.seen.forget()
        self._saved.clear()
        self.kept.begin_step()
        self.held.look()
        self.seen.hold(self.held)
        self._changed_before = frozenset(self._changing)
        for (_, name), module in self._changing.items():
            self._save(module, name)

    def end_step(self) -> None:
        """Buffers that closed calls change are their owners' again."""
        for name, module, given in self.seen.noted():
            self.held.note(module, name, given)
        behind = self._changing.keys() - self.seen.brought_up_to_date()
        self.seen.forget()
        self.rebound.clear()
        for (_, name), module in self._changing.items():
            self.placement.send_buffer_away(module, name)
            if (id(module), name) in behind:
                self.held.set_behind(module, name)

    def before_first_change(self, module: nn.Module, meta: ResultMeta) -> None:
        """A closed call is about to be recorded: if it is the first that changes a buffer which others have
        taken for a constant, these run, and are described anew."""
        is_read = False
        for name in meta.buffers if self.held.read else ():
            part, own = owner_of(module, name)
            if (id(part), own) not in self._changing:
                is_read |= self.held.take_readers(part, own)
        if is_read:
            self.recorder.run_all_recorded()
            self.recorder.descriptions.forget()
            self.recorder.repeated.forget()

    def touched(self, module: nn.Module, meta: ResultMeta) -> tuple[int, ...]:
        """A closed call is recorded, which may change buffers.

        Returns:
            Numbers for modules whose state it changes or depends on.

        Raises:
            SMPError: code of the root's has read one, in a way that its backward cannot be equal.
        """
        if not meta.buffers and not self._stateful:
            return ()
        touched: dict[int, None] = {}
        for name in meta.buffers:
            part, own = owner_of(module, name)
            self._changing_now[id(part), own] = part
            if (id(part), own) not in self._changing:
                self._changing[id(part), own] = part
                self._save(part, own)
                self._note_held(part, own)
            touched[self._number(part)] = None
            if name in meta.rebound:
                self.seen.left(part, own)
                self.held.leave(part, own)
                continue
            buffer = plain_table(part._buffers).get(own)
            if buffer is not None:
                self._refuse_change(storage_of(buffer))
            held = self.seen.held(part, own)
            if held is not None:  # commands that have read it read what it was
                self.recorder.ordinary.refuse_viewed([held])
                if name in meta.unguarded:
                    self.recorder.ordinary.refuse_saved(held)
                self.recorder.ordinary.keep_captured(held, is_heard=name not in meta.unguarded)
                self.seen.changed(part, own)
        if self._stateful:
            inside = set(map(id, module.modules()))
            for part in self._stateful.values():
                if id(part) in inside:
                    touched[self._number(part)] = None
        return tuple(touched)

    def is_changing(self, memory: int) -> bool:
        """Whether closed calls change a buffer in it that code holds, in this step or in others."""
        return any(key in self._changing for key in self.seen.keys_in(memory))

    def _note_held(self, module: nn.Module, name: str) -> None:
        buffer = plain_table(module._buffers).get(name)
        if type(buffer) is torch.Tensor and storage_of(buffer) is not None:
            self.held.note(module, name, buffer)
            self.seen.may_be_held(module, name, buffer)

    def note_returned(self, module: nn.Module, buffers: tuple[str, ...]) -> None:
        """A closed call returns these buffers, or views of them.

        Raises:
            SMPError: another call of this step changes one.
        """
        changing = self.changing()
        for name in buffers:
            part, own = owner_of(module, name)
            buffer = plain_table(part._buffers)[own]
            memory = None if buffer is None else storage_of(buffer)
            self._returned[memory] = f"{self.placement.name(module)}.{name}"
            if memory in changing:
                self._refuse_change(memory)

    def _refuse_change(self, memory: int | None) -> None:
        name = self._returned.get(memory) if self._returned else None
        if name is not None:
            raise SMPError(
                f"the buffer {name} is returned by a call of its module and changed by another, or between "
                "them, in one step: microbatches run beside each other, so who holds it would see what "
                "others make of it. Return a clone() of it"
            )

    def note_parameter(self, full: str) -> None:
        """A parameter is changed in place between calls: from now on its modules' calls keep their order."""
        for part in self.placement.holders(full):
            if id(part) not in self._stateful:
                self._stateful[id(part)] = part
                self.placement.changes_parameters = True
                self.recorder.writer.touch_earlier(part, self._number(part))

    def touched_by(self, arguments: Arguments) -> tuple[int, ...]:
        """A torch function reads or changes these: numbers for modules whose parameters, as they are or by a
        view, are among them and are changed in place between calls."""
        touched: dict[int, None] = {}
        for tensor in arguments.tensors if self._stateful else ():
            for member in sharing_memory(tensor) if type(tensor) is PlacedTensor else ():
                if member.smp_parameter is not None:
                    touched.update(dict.fromkeys(self.touched_parameter(member.smp_parameter)))
        return tuple(touched)

    def touched_parameter(self, full: str) -> tuple[int, ...]:
        """The same for a parameter by its name."""
        holders = self.placement.holders(full) if self._stateful else ()
        return tuple([self._number(part) for part in holders if id(part) in self._stateful])

    def _number(self, part: nn.Module) -> int:
        return self._numbers.setdefault(id(part), len(self._numbers))

    def _save(self, module: nn.Module, name: str) -> None:
        """Copies a buffer that closed calls change here, in case the step fails."""
        buffer = plain_table(module._buffers).get(name)
        if type(buffer) is torch.Tensor and self.placement.is_here(module):
            value = self.kept.value_of(buffer)  # code has changed it already
            if value is None:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    value = buffer.clone()
            self._saved[id(module), name] = (module, buffer, value)

    def restore(self) -> None:
        """The step has failed: buffers are as they were before it."""
        self.kept.restore()  # first: what closed calls change may have changed before code came to it
        for (_, name), (module, buffer, value) in self._saved.items():
            with torch.no_grad():
                plain_table(module._buffers)[name] = buffer.copy_(value)
        for key in self._changing.keys() - self._changed_before:  # another rank may not have met those calls
            del self._changing[key]

    def read(self, module: nn.Module, name: str, value: Any) -> Any:
        """Python code is about to see a buffer: it must be what it is after all calls before this line."""
        if not isinstance(value, torch.Tensor) or type(value) is PlacedTensor:
            return value
        if self.recorder.descriptions.inferring:
            # The modules whose code runs on fakes have other tables: this is a neighbour's.
            self.recorder.descriptions.inference.touched_placed |= self.placement.home(module) >= 0
            return value
        if self.placement.home(module) < 0 or self.recorder.not_listening:
            return value
        if (id(module), name) in self._changing:
            if self.recorder.tape is not None:
                raise refuse(f"reads the buffer {name} of {self.placement.name(module)}")
            value = self.seen.present(module, name)
        self.seen.note(module, name, value)
        return value

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Python code is about to bind a buffer anew, or to delete it."""
        if self.recorder.not_listening:
            return
        refuse_effect(type(module).__name__, f"sets the buffer {name}")
        self.recorder.modules.run_pending(module)
        is_bound = value is plain_table(module._buffers).get(name)  # by an operator that works in place
        if self.recorder.tape is not None and not is_bound:
            raise refuse(f"binds the buffer {name} of {self.placement.name(module)} anew")
        if not is_bound:
            self.kept.before_binding(module, name)
        if type(value) is PlacedTensor:
            self.rebound[id(module), name] = module

    def before_change(self, target: Any) -> None:
        """An ordinary tensor is about to change in place, which closed calls may still have to read."""
        if not isinstance(target, torch.Tensor):
            return
        self.kept.before_change(target)
        self._refuse_change(storage_of(target))
        modules = self.recorder.modules
        if not modules.are_pending:
            return
        memory = storage_of(target)
        seen = self.seen.module_of(memory)
        for module in self.kept.modules_of(target) if seen is None else [seen]:
            modules.run_pending(module)
        modules.run_those_with(memory)

    def take_over(self, module: nn.Module) -> None:
        """From now on the module's own code runs on every rank, so every rank needs its buffers' values."""
        table = plain_table(module._buffers)
        for name, value in list(table.items()):
            table[name] = value = self.read(module, name, value)
            if self._changing.pop((id(module), name), None) is not None:
                self._share_saved(module, name, value)

    def _share_saved(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """What a buffer was before the step was known to its owner alone; ``value`` is what it is now."""
        saved = self._saved.get((id(module), name))
        stage = self.placement.stage_of[self.placement.names[id(module)]]
        before = self.recorder.host.share(value if saved is None else saved[2], stage)
        if saved is None and not self.placement.is_here(module):
            self.kept.keep(value, before)

    def write(self, module: nn.Module, ids: frozenset[int]) -> None:
        """Before a closed call of it: placed values that stand for its buffers are written into them.

        Args:
            ids: of it and the modules in it.
        """
        rebound = any(part in ids for part, _ in self.rebound)
        twins = self.recorder.ordinary.twins
        if rebound or (twins and (twins.of_any(_buffers_of(module)) or twins.of_any(self.seen.of(ids)))):
            self.recorder.ordinary.write_back()


def _buffers_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """All of them, as they lie there: to ask for them would be to read them."""
    for part in module.modules():
        for buffer in plain_table(part._buffers).values():
            if type(buffer) is torch.Tensor:
                yield buffer
