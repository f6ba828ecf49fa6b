"""A model whose state was loaded, and comes into place with the first step.

A rank's own part can be put in place only once the model is cut. Until then parameters and buffers hold what
the script has built, and what it made of them (an average that begins with them, a new head, statistics that
are reset) would be made of other numbers, or be overwritten. So meanwhile they are of types of their own,
which refuse that by name and let pass what says nothing of numbers: optimizers are built in between. Extra
state of modules is no tensor, and set at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...errors import SMPError
from ...nn.guarding import words
from ...record.values.torch_functions import METADATA_FUNCTIONS, function_name
from .state_versions import with_versions_of

__all__ = ["EXTRA_STATE", "Waiting", "set_extra_state", "with_present_extra_state"]

EXTRA_STATE = "_extra_state"
_HARMLESS = METADATA_FUNCTIONS | words(
    """
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad data_ptr untyped_storage
    storage zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_empty new_ones
    new_full is_shared share_memory_
    """
)
_NUMBERS = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])


def _guard(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    name = getattr(func, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if name in ("__repr__", "__format__"):
            return f"a tensor of shape {tuple(args[0].shape)} that was loaded and waits for the first step"
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(func.__self__, "__name__", "")
            if name == "__get__" and attribute == "data":
                return _that_waits(func(*args))
            if attribute not in _NUMBERS or _in_conversion():
                return func(*args, **(kwargs or {}))
        elif name == "detach" or _in_conversion():
            return _that_waits(func(*args, **(kwargs or {})))
        elif name in _HARMLESS:
            return func(*args, **(kwargs or {}))
    raise _refused(function_name(func))


def _that_waits(found: Any) -> Any:
    """The same numbers, or a conversion of them, wait as well."""
    if type(found) is torch.Tensor:
        found.__class__ = _WaitingTensor
    return found


def _refused(what: str) -> SMPError:
    return SMPError(
        f"{what} of a parameter or buffer that was loaded and waits: a rank's part of a checkpoint is put in "
        "place by the first step, so this would see, or change, what the script has built and not what was "
        "saved. Run a step before (one without backward, under torch.no_grad(), will do), or resume from a "
        "full checkpoint: resume_from_checkpoint(..., partial=False)"
    )


def _in_conversion() -> bool:
    """Whether ``module.to(...)`` converts all of the module, before it is loaded."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame.f_code.co_name == "_apply" and frame.f_globals.get("__name__") == nn.Module.__module__:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _refuse_copy(tensor: torch.Tensor, memo: Any) -> Any:
    raise _refused("a copy")


def _refuse_pickle(tensor: torch.Tensor, protocol: Any) -> Any:
    raise _refused("a pickle")


class _WaitingTensor(torch.Tensor):
    __torch_function__ = classmethod(_guard)
    __deepcopy__, __reduce_ex__ = _refuse_copy, _refuse_pickle


class _WaitingParameter(nn.Parameter):
    __torch_function__ = classmethod(_guard)
    __deepcopy__, __reduce_ex__ = _refuse_copy, _refuse_pickle


_TYPES: dict[type, type] = {torch.Tensor: _WaitingTensor, nn.Parameter: _WaitingParameter}
_ORDINARY = {waiting: ordinary for ordinary, waiting in _TYPES.items()}


class Waiting:
    """The parameters and buffers of a module, of the types that wait."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def begin(self) -> None:
        """From now on they wait; what has no memory yet, or is of a type of its own, is left alone."""
        for tensor in self._tensors():
            if type(tensor) in _TYPES:
                tensor.__class__ = _TYPES[type(tensor)]

    def end(self) -> None:
        """They are ordinary ones again."""
        for tensor in self._tensors():
            if type(tensor) in _ORDINARY:
                tensor.__class__ = _ORDINARY[type(tensor)]

    def _tensors(self) -> Iterable[torch.Tensor]:
        return (*self._module.parameters(), *self._module.buffers())


def set_extra_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Extra state counts from when it was loaded."""
    parts = dict(module.named_modules(remove_duplicate=False))
    for key, value in state.items():
        holder, _, own = key.rpartition(".")
        if own == EXTRA_STATE and holder in parts:
            parts[holder].set_extra_state(value)


def with_present_extra_state(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The state, with extra state as the script has it by now."""
    parts = dict(module.named_modules(remove_duplicate=False))
    found = with_versions_of(state, state)
    for key in state:
        holder, _, own = key.rpartition(".")
        if own == EXTRA_STATE and holder in parts:
            found[key] = parts[holder].get_extra_state()
    return found
