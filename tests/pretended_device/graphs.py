"""Graphs of the device: which operations ran, on which memory; a replay runs them again on that memory.

As on a real device nothing has happened when a capture ends: memory that was made in it holds nonsense until
a replay, and memory that was there before is as it was. Reading numbers from the device within is an error.
So is the query of an event, in whatever thread, and it spoils the capture. CUDA allows it to other threads in
the mode that the library asks for, but not in its usual mode.

Matrix products keep memory to work in for each stream, which the first of them makes, in a capture in the
graph's pool. A graph that another one's memory would serve for that cannot be replayed: that memory goes with
its own graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .memory import NAME, is_ours, on_host
from .order import COMPUTING, current, note_only

__all__ = ["Graph", "is_capturing", "note", "refuse_host"]

captures = 0
"""How many there have been."""

_current: Graph | None = None
_workspaces: dict[int, Any] = {}
"""By stream the pool that it lies in, as if there were a matrix product in each capture."""


class Graph:
    """The methods of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory that was changed, and its numbers
        self._made: dict[int, torch.UntypedStorage] = {}
        self._kept: list[torch.UntypedStorage] = []
        self._is_captured = False
        self._is_spoilt = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        global _current, captures
        assert _current is None and not self._calls
        if current(0).number == COMPUTING:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        captures += 1
        _current = self
        self._pool, self._works_in = pool, _workspaces.setdefault(current(0).number, pool)
        note_only(True)

    def capture_end(self) -> None:
        global _current
        assert _current is self
        _current = None
        note_only(False)
        with _below():
            for memory, numbers in reversed(self._before):
                memory.copy_(numbers)
            for storage in self._made.values():
                row = torch.empty(0, dtype=torch.uint8, device=storage.device)
                torch.ops.aten.set_.source_Storage(row, storage)
                on_host(row, {}).fill_(0xA5)
        self._before.clear()
        if self._is_spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._is_captured = True

    def replay(self) -> None:
        assert self._is_captured and _current is None
        assert self._works_in is self._pool, "its matrix products work in the memory of another graph"
        with _below():
            for call in self._calls:
                call()


def clear_workspaces() -> None:
    """Matrix products make others."""
    _workspaces.clear()


def is_capturing() -> bool:
    return _current is not None


def refuse_host(what: str, *, spoils: bool = False) -> None:
    """The host would have to wait for the device."""
    if _current is not None:
        _current._is_spoilt |= spoils
        raise RuntimeError(f"operation not permitted when stream is capturing ({what})")


def before(given: list[torch.Tensor]) -> None:
    """These are going to be changed."""
    assert _current is not None
    for tensor in given:
        if is_ours(tensor) and tensor.untyped_storage()._cdata not in _current._made:
            host = on_host(tensor, {})
            _current._before.append((host, host.clone()))


def note(run: Callable[[Any, Any], Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """An operation has run; ``run`` does it again, on tensors of the host."""
    graph = _current
    assert graph is not None
    known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
    made = []
    for number, tensor in enumerate(_tensors(result)):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            graph._made[storage._cdata] = storage
            made.append((number, on_host(tensor, {})))
    # The memory, whatever the tensors will be by then.
    graph._kept += [tensor.untyped_storage() for tensor in _tensors((args, kwargs)) if is_ours(tensor)]
    args, kwargs = _hosts(args), _hosts(kwargs)
    if not list(_tensors(result)) and result is not None:
        refuse_host("a number is read")

    def again() -> None:
        found = list(_tensors(run(args, kwargs)))
        for number, memory in made:
            memory.copy_(found[number])

    graph._calls.append(again)


@contextlib.contextmanager
def _below() -> Iterator[None]:
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


def _hosts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return on_host(value, {}) if is_ours(value) else value
    if isinstance(value, list | tuple):
        return type(value)([_hosts(each) for each in value])
    if isinstance(value, dict):
        return {key: _hosts(each) for key, each in value.items()}
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
