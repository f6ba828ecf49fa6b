"""What a run of a module does beside returning a result: whether it is a closed call at all.

A call is *closed* if its result is all that the lines after it can see of it, but for buffers of its own.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...errors import SMPError
from ..code.watch import CodeWatch, Names
from ..state.python_state import (
    NeedsOpening,
    PythonState,
    cache_among,
    iterator_among,
    iterators_split,
    stuck_among,
)
from ..values.structure import Spec, flatten

__all__ = [
    "Buffers",
    "CannotBeRecorded",
    "Effects",
    "FakeTables",
    "NeedsOpening",
    "function_untouched",
    "untouched",
]


class CannotBeRecorded(SMPError):
    """Neither a closed call nor an opened one would be the same."""


@contextlib.contextmanager
def function_untouched(cls: type) -> Iterator[None]:
    """Around a fake run of an autograd function.

    Raises:
        CannotBeRecorded: its forward changes the function's class, or what its code names.
    """
    state = PythonState()
    state.add(cls, cls.__name__)
    watch = CodeWatch(state)
    try:
        with watch.on():
            yield
        reason = state.changed() or watch.changed()
    except NeedsOpening as found:
        reason = str(found)
    finally:
        state.restore()
        watch.restore()
    if reason is not None:
        raise CannotBeRecorded(
            f"the autograd function {cls.__name__} keeps state of its own: its forward {reason}, which would "
            "happen at another time, and on one rank only. Keep it in a module, or set it in the step "
            "function"
        )


@contextlib.contextmanager
def untouched(module: nn.Module, *given: Any, whatever: bool = False) -> Iterator[None]:
    """Puts back what a run changes on the module, on what it was given and around its code.

    Raises:
        NeedsOpening: something cannot be put back; never if ``whatever``.
    """
    state = PythonState()
    state.add(module, "")
    for value in given:
        state.add(value, "an argument")
    if (stuck := stuck_among(state)) is not None and not whatever:
        raise NeedsOpening(f"may take from {stuck}")
    watch = CodeWatch(state, minds_opaque=not whatever)
    with iterators_split(state):
        try:
            with watch.on():
                yield
        finally:
            state.restore()
            watch.restore()


class FakeTables:
    """The fake parameters and buffers of one fake run.

    Attributes:
        parameters: of the module, by the names that they have in the whole model, once it is cut.
        modules: ids of it and those in it.
        storages: their memory.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.modules: set[int] = set()
        self.storages: set[int] = set()
        self._tables: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = []

    def add(self, prefix: str, table: dict[str, Any], *, is_buffers: bool) -> None:
        self._tables.append((prefix, table, dict(table), is_buffers))
        self.storages |= {t.untyped_storage()._cdata for t in table.values() if t is not None}

    def names_in(self, storages: set[int]) -> tuple[str, ...]:
        """Names of the parameters and buffers whose memory is one of these."""
        return tuple(name for name, tensor in self._state() if tensor.untyped_storage()._cdata in storages)

    def buffers_by_name(self, *, before: bool) -> dict[str, int]:
        """The memory of each buffer, as it was before the run or is now."""
        return {
            f"{prefix}.{name}" if prefix else name: tensor.untyped_storage()._cdata
            for prefix, table, old, is_buffers in self._tables
            for name, tensor in (old if before else table).items()
            if is_buffers and tensor is not None
        }

    def rebound_buffers(self, written: set[int]) -> tuple[str, ...]:
        """Names of those that were bound anew.

        Raises:
            NeedsOpening: one was changed in place besides, so what code may hold of it is neither what it was
                nor what it is.
        """
        found = []
        for prefix, table, before, is_buffers in self._tables:
            for name, old in before.items() if is_buffers else ():
                if table[name] is old or old is None:
                    continue
                if old._version or old.untyped_storage()._cdata in written:
                    raise NeedsOpening(f"changes its buffer {name} in place and binds it anew")
                found.append(f"{prefix}.{name}" if prefix else name)
        return tuple(found)

    def changed_unnoticed(self, written: set[int]) -> tuple[str, ...]:
        """Names of those that were written to without a new version."""
        changed = {tensor.untyped_storage()._cdata for _, tensor in self._state() if tensor._version == 0}
        return self.names_in(changed & written)

    def hooked(self) -> str | None:
        """The name of a parameter on whose gradient a hook was put."""
        for name, tensor in self._state():
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return name
        return None

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, _, before, _ in self._tables:
            for name, tensor in before.items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor

    def changed_buffers(self, written: set[int]) -> tuple[str, ...]:
        """Names of the buffers that were bound anew or changed in place.

        Raises:
            NeedsOpening: parameters were exchanged, or buffers added or removed.
        """
        found = []
        for prefix, table, before, is_buffers in self._tables:
            if table.keys() != before.keys():
                raise NeedsOpening("adds or removes parameters or buffers")
            for name, old in before.items():
                new = table[name]
                if new is not old and not is_buffers:
                    raise NeedsOpening(f"exchanges the parameter {name}")
                if new is old and (
                    old is None or (old._version == 0 and old.untyped_storage()._cdata not in written)
                ):
                    continue
                if is_buffers:
                    _refuse_another_form(name, old, new)
                    found.append(f"{prefix}.{name}" if prefix else name)
        return tuple(found)


class Buffers:
    """The buffers of a module and its parts, to see what a real run changes, and to put it back."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [
            (prefix, part._buffers, dict(part._buffers))
            for prefix, part in module.named_modules()
            if isinstance(part._buffers, dict)  # TorchScript keeps its own, and does not bind them anew
        ]
        self._values = {
            id(buffer): (buffer, buffer._version, buffer.detach().clone())
            for _, _, table in self._tables
            for buffer in table.values()
            if buffer is not None
        }

    def changed(self) -> tuple[str, ...]:
        """Names of those that were bound anew, or that hold other values.

        Raises:
            NeedsOpening: buffers were added, removed, or bound anew in another form.
        """
        for _, table, before in self._tables:
            if table.keys() != before.keys():
                raise NeedsOpening("adds or removes buffers")
            for name, buffer in table.items():
                if buffer is not before[name]:
                    _refuse_another_form(name, before[name], buffer)
        return tuple(
            f"{prefix}.{name}" if prefix else name
            for prefix, table, before in self._tables
            for name, buffer in table.items()
            if buffer is not before.get(name) or (buffer is not None and self._differs(buffer))
        )

    def _differs(self, buffer: torch.Tensor) -> bool:
        if id(buffer) not in self._values:
            return True
        _, version, value = self._values[id(buffer)]
        return buffer._version != version or not torch.equal(buffer, value)

    def restore(self) -> None:
        for _, table, before in self._tables:
            table.clear()
            table.update(before)
        with torch.no_grad():
            for buffer, _, value in self._values.values():
                buffer.copy_(value)


def _refuse_another_form(name: str, old: torch.Tensor | None, new: Any) -> None:
    """Other ranks describe later calls by the buffer that they have, so its form must stay.

    Raises:
        NeedsOpening: it does not.
    """
    if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
        raise NeedsOpening(f"binds the buffer {name} anew in another form")


class Effects:
    """What one run of a module does beside returning a result.

    Args:
        module: the one that runs; it must not have fake tables yet.
        args, kwargs: what it is given.
        passed_over: functions whose own doings do not count.

    Raises:
        NeedsOpening: it holds an iterator, which could not be put back.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        passed_over: Iterable[Any] = (),
    ) -> None:
        self._state = PythonState()
        self._given = (args, kwargs)
        self._leaves: list[Any] = []
        self._spec: Spec = flatten((args, kwargs), self._leaves)
        self._state.add(module, "")
        for leaf in self._leaves:
            if not isinstance(leaf, torch.Tensor):
                self._state.add(leaf, f"an argument of type {type(leaf).__name__}")
        iterator = iterator_among(self._state, *self._leaves)
        if iterator is not None:
            raise NeedsOpening(f"may take from the iterator {iterator}")
        if self._state.opaque:
            raise NeedsOpening(f"may take from {self._state.opaque[0]}")
        cache = cache_among(self._state)
        if cache is not None:
            raise NeedsOpening(f"may fill the cache {cache}")
        self._watch = CodeWatch(self._state, passed_over)
        self.watched = self._watch.on

    @property
    def names(self) -> Names:
        return self._watch.names

    @property
    def entered(self) -> Collection[types.CodeType | None]:
        """All code that has run, torch's too."""
        return self._watch.entered

    def found(self) -> str | None:
        """The first effect, in words; None if there is none."""
        leaves: list[Any] = []
        spec = flatten(self._given, leaves)
        if spec != self._spec or any(a is not b for a, b in zip(leaves, self._leaves, strict=True)):
            return "changes a list or dict that it was given"
        return self._state.changed() or self._watch.changed()

    def undo(self) -> None:
        """Puts everything back but tensors."""
        self._state.restore()
        self._watch.restore()
