"""Parameters and buffers that backwards read, and that calls of other microbatches change unnoticed.

Batch norm in eval mode reads its running statistics again in its backward; what is changed by way of
``.data`` (a codebook, a weight that is clipped) may be kept for one. Autograd does not notice. In one process
a backward comes before the forwards of later microbatches, here it may come after them. So a call that could
change such a thing runs under watch: what it really changes is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...errors import SMPError
from ..parameters.tables import owner_of
from ..values.calls import ResultMeta

if TYPE_CHECKING:
    from ..commands.recording import Recording

__all__ = ["SavedState", "unchanged", "unchanged_parameter"]


_Key = tuple[int, str]  # of a module and a parameter or buffer of its own
_Moment = tuple[int, int]  # microbatch, and how many backwards it has called


class SavedState:
    """Which parameters and buffers the backwards of a step will read."""

    def __init__(self) -> None:
        self._calls: list[tuple[nn.Module, ResultMeta, _Moment]] = []  # not looked through yet
        self._saved: dict[_Key, _Moment] = {}  # the first call that saves it
        self._given: set[str] = set()  # parameters, by name
        self._keys: dict[tuple[int, int], tuple[nn.Module, ResultMeta, list[_Key]]] = {}

    def begin_step(self) -> None:
        self._calls.clear()
        self._saved.clear()
        self._given.clear()

    def note_given(self, names: Iterable[str]) -> None:
        """A call keeps parameters for its backward that container code has given to it."""
        self._given.update(names)

    def is_read_later(self, module: nn.Module, name: str) -> bool:
        """Whether a backward will read this parameter of the whole model, and that of an earlier call."""
        self._look_through()
        return name in self._given or _key(module, name) in self._saved

    def note(self, module: nn.Module, meta: ResultMeta, recording: Recording) -> tuple[str, ...]:
        """A closed call is recorded.

        Returns:
            Names of what it must leave as it is: a backward reads it that in one process has run before.
        """
        moment = (recording.microbatch_index, len(recording.backwards))
        found = []
        if meta.unguarded:
            self._look_through()
            for own in meta.unguarded:
                saved = self._saved.get(_key(module, own))
                if saved is not None and saved != moment:
                    found.append(own)
        if meta.saved_state and torch.is_grad_enabled():
            self._calls.append((module, meta, moment))
        return tuple(found)

    def _look_through(self) -> None:
        """Only where something is changed unnoticed does anybody need to know what is saved."""
        for module, meta, moment in self._calls:
            known = self._keys.get((id(module), id(meta)))
            if known is None:
                known = (module, meta, [_key(module, own) for own in meta.saved_state])
                self._keys[id(module), id(meta)] = known
            for key in known[2]:
                self._saved.setdefault(key, moment)
        self._calls.clear()


@contextlib.contextmanager
def unchanged(label: str, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within: a call runs that must leave these parameters and buffers of its module as they are.

    Raises:
        SMPError: it has not.
    """
    before = [_tensor(module, name).detach().clone() for name in names]
    yield
    for name, old in zip(names, before, strict=True):
        if not torch.equal(_tensor(module, name), old):
            raise SMPError(
                f"{label} changes its {name}, which the backward of an earlier call reads, without autograd "
                "noticing (.data, or batch norm that is called in eval mode too): in one process that "
                "backward comes first, here it may come later. Call the module in one mode within a step, "
                "clone() what backward needs, change it between steps, or train with microbatches=1 and one "
                "model.backward()"
            )


@contextlib.contextmanager
def unchanged_parameter(label: str, name: str, tensor: torch.Tensor) -> Iterator[None]:
    """The same for a torch function of container code or the step function, and what it writes to."""
    before = tensor.detach().clone()
    yield
    if not torch.equal(tensor, before):
        raise SMPError(
            f"{label} changes the parameter {name!r} in place inside an smp.step, while other microbatches "
            "use it, or backwards of earlier calls: change it between steps, or a clone() of it"
        )


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    found = getattr(*owner_of(module, name))
    assert isinstance(found, torch.Tensor)
    return found


def _key(module: nn.Module, name: str) -> _Key:
    part, own = owner_of(module, name)
    return id(part), own
