"""A state dict put into a module of which this rank holds a part.

Modules may have code of their own for this: hooks and a ``_load_from_state_dict`` that rename entries of old
files, turn them into a new form, or keep some in attributes. It runs as in one process, on what was saved;
only what comes after it, the copying into parameters, is this rank's part alone.
"""

from __future__ import annotations

import contextlib
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
    elsewhere: set[str] = set()

    def leave_own_part(part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            key = f"{prefix}{name}"
            if tensor is None:
                continue
            if is_away(tensor):
                state.pop(key, None)
                elsewhere.add(key)
            elif is_whole and isinstance(state.get(key), torch.Tensor):
                layout = layout_of(tensor)
                if layout is not None:
                    state[key] = part_of(state[key], layout)

    with contextlib.ExitStack() as until_loaded:
        for part in module.modules():
            # The last hook: what torch copies comes right after it.
            until_loaded.callback(part.register_load_state_dict_pre_hook(leave_own_part).remove)
            if not is_loaded(part):
                until_loaded.enter_context(_without_loading(part))
        result = module.load_state_dict(state, strict=False)
    missing = [key for key in result.missing_keys if key not in elsewhere]
    return missing, list(result.unexpected_keys)


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
