"""Operators in which nobody's Python code runs but torch's: a watch of the user's code is off meanwhile.

On fake tensors an operator is hundreds of calls of torch's own Python functions, and Python asks the watch
(:mod:`.watch`) about each of them. Within an operator of torch's there can be code of the user's only where
somebody has given it a kernel in Python, where an argument is of a class of the user's, or where a mode of
the user's is on; then, as for all operators of other libraries, the watch stays on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...source_files import folders_of

__all__ = ["PAUSES", "run_operator"]

_TORCH = folders_of(torch.__file__)
_OURS = __name__.partition(".")[0]
_NAMESPACES = frozenset(("aten", "prims"))
_PLAIN = frozenset((FakeTensor, torch.Tensor, nn.Parameter, nn.Buffer))
_CHEAP_TO_SWITCH = sys.version_info < (3, 12)
"""From then on Python instruments all code anew each time, which costs more than is saved."""
_OF_TORCH_IN_PYTHON = torch._C._dispatch_dump("aten::angle")
_FILES_ARE_TOLD = any(f"registered at {folder}" in _OF_TORCH_IN_PYTHON for folder in _TORCH)
"""Whether torch says in which file a kernel in Python was registered: torch 2.8 says ``/dev/null`` of all of
them, so there the watch stays on."""
PAUSES = _CHEAP_TO_SWITCH and _FILES_ARE_TOLD


def run_operator(func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator, as a dispatch mode does for which nothing is left but a ``FakeTensorMode`` below.

    Args:
        func, types, args, kwargs: what the mode was given.
    """
    watch = sys.getprofile() if PAUSES else None
    known = getattr(watch, "torchs_operators", None)
    if known is None or not _is_torchs_alone(func, types, args, kwargs, known):
        return func(*args, **kwargs)
    sys.setprofile(None)
    try:
        return func(*args, **kwargs)
    finally:
        sys.setprofile(watch)


def _is_torchs_alone(
    func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any], known: dict[Any, bool]
) -> bool:
    is_torchs = known.get(func)
    if is_torchs is None:  # once in a run that is watched
        is_torchs = known[func] = func.namespace in _NAMESPACES and not _has_kernels_of_others(func)
    return (
        is_torchs
        and all(kind in _PLAIN for kind in types)
        and _are_plain(args)
        and (not kwargs or _are_plain(kwargs.values()))
        and _modes_are_known()
    )


def _are_plain(values: Iterable[Any]) -> bool:
    """Torch asks a tensor of another class by that class's own methods."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN:
                return False
        elif isinstance(value, tuple | list) and not _are_plain(value):
            return False
    return True


def _modes_are_known() -> bool:
    """A dispatch mode below sees operators on meta tensors, a function mode what decompositions call."""
    num_below = torch._C._len_torch_dispatch_stack()
    if num_below > 1:
        return False
    if num_below == 1:
        below = torch._C._get_dispatch_stack_at(0)
        if not (isinstance(below, FakeTensorMode) and _is_known(below)):
            return False
    return all(
        _is_known(torch._C._get_function_stack_at(place))
        for place in range(torch._C._len_torch_function_stack())
    )


def _is_known(mode: Any) -> bool:
    return type(mode).__module__.partition(".")[0] in ("torch", _OURS)


_looked_at: set[str] = set()
_of_others: list[str] = []


def _has_kernels_of_others(func: Any) -> bool:
    """Whether anyone but torch has given Python code to the operator, or to one that it may be made of."""
    registered: set[str] = torch.library._impls  # type: ignore[attr-defined]
    if len(registered) != len(_looked_at):
        for key in registered - _looked_at:
            namespace, _, rest = key.partition("/")
            if namespace in _NAMESPACES and _is_registered_outside(f"{namespace}::{rest.rpartition('/')[0]}"):
                _of_others.append(key)
        _looked_at.clear()
        _looked_at.update(registered)
    if _of_others or _is_registered_outside(func.name()):  # instead of one of torch's, too
        return True
    fake = torch._library.simple_registry.singleton.find(func.name()).fake_impl
    return fake.kernel is not None


def _is_registered_outside(name: str) -> bool:
    """Whether a kernel of the operator was registered by a Python file outside of torch."""
    for line in torch._C._dispatch_dump(name).splitlines():
        _, found, place = line.partition("registered at ")
        file = place.partition(" ::")[0].rpartition(":")[0]
        if found and file.endswith(".py") and not file.startswith(_TORCH):
            return True
    return False
