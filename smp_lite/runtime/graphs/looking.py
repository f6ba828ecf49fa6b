"""One more run of a segment, whose result is thrown away: what it does beside computing on the device.

A graph repeats kernels on fixed memory. What would not be among them is looked for here, operation by
operation, before a graph is made: work of the host on tensors of its own, numbers read from the device,
random numbers, writing to memory that others see; and in Python, whatever changes objects or variables, by
the same watch that looks at modules when they are recorded. An operation that is found is not run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices import home, module
from ...record.code.random_operators import draws_numbers, is_attention_without_dropout
from ...record.code.watch import Names
from ...record.describe.effects import Effects, NeedsOpening
from ...record.state.random_state import all_states

__all__ = ["look"]

_STREAMS = frozenset(
    ["Stream", "ExternalStream", "stream", "current_stream", "synchronize", "data_ptr", "from_dlpack"]
)
_PLACES = frozenset(
    ["grad", "_grad", "_is_view", "_base", "storage_offset", "untyped_storage", "storage", "_typed_storage"]
)
"""What tells of a tensor beside its numbers and layout, which may be another one's at each run."""
_NAMESPACES = frozenset(["aten", "prim", "prims"])  # not c10d, which talks to other processes
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Found(Exception):
    """The operation that a graph could not repeat."""


def look(modules: Sequence[nn.Module], run: Callable[[], None]) -> tuple[Names | None, str]:
    """What the Python of the run mentions, or None and what stands against a graph.

    Args:
        modules: that are called; beside tensors they are given plain values.
        run: the run.
    """
    try:
        effects = Effects(nn.ModuleList(modules), (), {})
    except NeedsOpening as reason:
        return None, str(reason)
    before = all_states()
    found = None
    try:
        with effects.watched(), _no_waiting(), _Operations():
            run()
    except (_Found, NeedsOpening) as reason:
        found = str(reason)
    except Exception as error:
        found = f"cannot be looked at ({type(error).__name__}: {error})"
    found = found or effects.found()
    if found is not None:
        effects.undo()
    if found is None and all_states() != before:
        found = "draws random numbers"
    if found is None and (own := sorted(effects.names.attributes & _STREAMS)):
        found = f"works with streams or addresses itself ({own[0]})"
    if found is None and (own := sorted(effects.names.attributes & _PLACES)):
        found = f"looks at more of a tensor than its numbers ({own[0]})"
    return (None, found) if found is not None else (effects.names, "")


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Within: where a kernel makes the host wait for the device, as no capture allows, is an error."""
    found = module(home())
    if not hasattr(found, "set_sync_debug_mode"):
        yield
        return
    before = found.get_sync_debug_mode()
    found.set_sync_debug_mode("error")
    try:
        yield
    finally:
        found.set_sync_debug_mode(before)


class _Operations(TorchDispatchMode):
    """Raises before an operation runs that a graph could not repeat."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.UntypedStorage] = {}  # kept, or addresses would be used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name)
        if func.namespace not in _NAMESPACES:
            raise _Found(f"calls an operation that is not torch's own ({name})")
        if any(tag in func.tags for tag in _TAGS) or draws_numbers(func, args, kwargs):
            raise _Found(f"depends on data, or draws random numbers ({name})")
        given = list(_tensors((args, kwargs)))
        if any(tensor.device != home() for tensor in given):
            raise _Found(f"computes on another device ({name})")
        if func._schema.is_mutable:
            for argument, value in _arguments(func, args, kwargs):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                for tensor in _tensors(value):
                    if tensor.untyped_storage()._cdata not in self._made:
                        raise _Found(f"writes to memory that is not its own ({name})")
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        has_seed = is_attention_without_dropout(
            func, args, kwargs
        )  # nobody reads it, and it may be the host's
        for tensor in _tensors(result):
            if has_seed and not tensor.dim() and not tensor.is_floating_point():
                continue
            if tensor.device != home():
                raise _Found(f"computes on another device ({name})")
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._made[storage._cdata] = storage
        return result


def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
