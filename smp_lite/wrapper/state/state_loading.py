"""A state dict put into a module of which this rank holds a part.

Modules may have code of their own for this: hooks and a ``_load_from_state_dict`` that rename entries of old
files, turn them into a new form, or keep some in attributes. It runs as in one process, on what was saved;
only torch's copying into parameters, between the last of their hooks before it and the first thing after it,
finds this rank's part alone.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...nn.layout import layout_of, part_of
from ...record.parameters.away import is_away

__all__ = ["put_into"]

_LOAD = "_load_from_state_dict"


def put_into(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    is_whole: bool,
    is_loaded: Callable[[nn.Module], bool],
) -> tuple[list[str], list[str]]:
    """``module.load_state_dict(state)``; missing and unknown keys.

    Args:
        module: the root.
        state: torch's, or one of this rank's own parts.
        is_whole: tensors are whole where this rank has parts of them.
        is_loaded: whether there are entries of a module; code of others does not run.

    Raises:
        RuntimeError: torch's, where an entry has another shape.
    """
    set_aside: dict[int, dict[str, Any]] = defaultdict(dict)  # by module, while torch copies
    elsewhere: set[str] = set()

    def leave_own_part(
        part: nn.Module, state: dict[str, Any], prefix: str, meta: Any, strict: bool, *lists: list[str]
    ) -> None:
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            key = f"{prefix}{name}"
            if tensor is None:
                continue
            if is_away(tensor):
                if key in state or not is_whole:
                    elsewhere.add(key)  # else it is missing, as its own stage says
                if key in state:
                    value = set_aside[id(part)][key] = state.pop(key)
                    if is_whole and (problem := _other_shape(key, tensor, value)) is not None:
                        lists[-1].append(problem)
            elif is_whole and isinstance(state.get(key), torch.Tensor):
                layout = layout_of(tensor)
                if layout is not None:
                    set_aside[id(part)][key] = state[key]
                    state[key] = part_of(state[key], layout)

    def bring_back(part: nn.Module, state: dict[str, Any], missing: list[str]) -> None:
        state.update(set_aside.pop(id(part), {}))
        missing[:] = [key for key in missing if key not in elsewhere]

    with contextlib.ExitStack() as until_loaded:
        until_loaded.enter_context(_after_copying(bring_back))
        for part in module.modules():
            # The last hook: what torch copies comes right after it.
            until_loaded.callback(part.register_load_state_dict_pre_hook(leave_own_part).remove)
            if not is_loaded(part):
                until_loaded.enter_context(_without_loading(part))
        result = module.load_state_dict(state, strict=False)
    return list(result.missing_keys), list(result.unexpected_keys)


def _other_shape(key: str, tensor: torch.Tensor, value: Any) -> str | None:
    """What torch says of an entry that does not fit, on the ranks that do not copy it."""
    if layout_of(tensor) is not None or not tensor.dim() or not isinstance(value, torch.Tensor):
        return None
    if value.shape == tensor.shape:
        return None
    return (
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {tensor.shape}."
    )


@contextlib.contextmanager
def _after_copying(then: Callable[[nn.Module, dict[str, Any], list[str]], None]) -> Iterator[None]:
    """Within: called with a module, its state dict and the missing keys where torch's own part of loading it
    has ended, and code of the module's goes on."""
    original = nn.Module._load_from_state_dict

    def load(
        part: nn.Module, state: dict[str, Any], prefix: str, meta: Any, strict: bool, *lists: Any
    ) -> None:
        try:
            original(part, state, prefix, meta, strict, *lists)
        finally:
            then(part, state, lists[0])

    nn.Module._load_from_state_dict = load  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._load_from_state_dict = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _without_loading(module: nn.Module) -> Iterator[None]:
    """Within: loading leaves a module as it is."""
    own = module.__dict__.get(_LOAD)
    module.__dict__[_LOAD] = lambda *_: None
    try:
        yield
    finally:
        if own is None:
            del module.__dict__[_LOAD]
        else:
            module.__dict__[_LOAD] = own
