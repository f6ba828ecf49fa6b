"""The torch state around a command: grad mode, inference mode, autocast, and torch's own global modes.

A command is recorded now and runs later, so it carries the state that it was recorded under. Entering a
state costs nothing where it is the one in force already, which is nearly always; and reading it is one tuple
of calls into torch, compared with the last.

Modes that see every function (``TorchFunctionMode``, ``TorchDispatchMode``) cannot be carried: their handlers
are the user's, and may keep what they see. They count, so that a change can be noticed. A mode of functions
that is on around the whole step (``torch.set_default_device`` puts one there) sees a torch function when it
is recorded, and must not see it again when it runs (:func:`without_users_modes`); the code of modules runs
later, and is seen then. Backwards are not: in one process ``loss.backward()`` is a function that the mode
sees, and it is off while that runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ...devices import autocast_types
from ...errors import SMPError

__all__ = [
    "FUNCTORCH",
    "Ambient",
    "refuse_transformations",
    "users_modes",
    "with_users_modes",
    "without_users_modes",
]

_OURS = f"{__name__.partition('.')[0]}."

# (getter, setter) of each global switch of torch that changes what kernels compute or which one is taken.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_deterministic_algorithms, torch.use_deterministic_algorithms),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
)
_GETTERS = tuple(getter for getter, _ in _SWITCHES)
_default_dtype, _flash, _mem_efficient, _math, _deterministic, _mkldnn = _GETTERS
_num_function_modes = torch._C._len_torch_function_stack
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

FUNCTORCH = 1_000_000
"""A level of ``torch.func`` counts as so many modes."""


def refuse_transformations() -> None:
    """Nothing of a step can be recorded inside a transformation of torch.func.

    Raises:
        SMPError: one is on.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        raise SMPError(
            "torch.func transformations (vmap, grad, jvp...) of what an smp.step computes are not supported: "
            "use them inside a module that is placed on one stage"
        )


def users_modes() -> list[TorchFunctionMode]:
    """The modes of torch functions that are on and not ours, the outermost first."""
    return [mode for mode in _modes() if not _is_ours(mode)]


@contextlib.contextmanager
def without_users_modes(around: list[TorchFunctionMode]) -> Iterator[None]:
    """Within: of the modes of torch functions, ours alone are on, since it is the library that computes.

    Args:
        around: the user's that were on when the step began, for :func:`with_users_modes`.
    """
    global _around
    if not around and not _num_function_modes():
        yield
        return
    before, _around = _around, around
    try:
        with _exchanged([mode for mode in _modes() if _is_ours(mode)]):
            yield
    finally:
        _around = before


def with_users_modes() -> contextlib.AbstractContextManager[None]:
    """Within :func:`without_users_modes`: with those around the step all the same, for code of the user's."""
    return _exchanged([*_around, *_modes()]) if _around else _AS_THEY_ARE


def _modes() -> list[TorchFunctionMode]:
    return [torch._C._get_function_stack_at(i) for i in range(_num_function_modes())]


def _is_ours(mode: TorchFunctionMode) -> bool:
    return type(mode).__module__.startswith(_OURS)


@contextlib.contextmanager
def _exchanged(others: list[TorchFunctionMode]) -> Iterator[None]:
    """Within: these are on."""
    before = _modes()
    _set_modes(others)
    try:
        yield
    finally:
        _set_modes(before)


def _set_modes(modes: list[TorchFunctionMode]) -> None:
    for _ in range(_num_function_modes()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


_around: list[TorchFunctionMode] = []
_AS_THEY_ARE = contextlib.nullcontext()


class Ambient(NamedTuple):
    """Hashable, so that it can be part of a cache key."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    autocast_cache: bool
    switches: tuple[Any, ...]
    num_modes: int

    @classmethod
    def current(cls) -> Ambient:
        global _last
        # Every recorded command asks: names of this module, and no loop over the switches.
        read = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _is_any_autocast_enabled(),
            # How many modes of torch functions, of dispatch and of torch.func are on, as one number.
            _num_function_modes() + 1000 * _num_dispatch_modes() + FUNCTORCH * (_functorch_level() or 0),
            torch.is_autocast_cache_enabled(),
            _default_dtype(),
            _flash(),
            _mem_efficient(),
            _math(),
            _deterministic(),
            _mkldnn(),
        )
        if not read[2] and read == _last[0]:
            return _last[1]
        autocast = tuple(
            [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in autocast_types()]
        )
        new = cls(read[0], read[1], autocast, read[4], read[5:], read[3])
        found = _made.setdefault(new, new)
        _last = (read, found)
        return found

    def same_state(self, other: Ambient) -> bool:
        """Whether nothing differs that :meth:`entered` would set."""
        return self[:-1] == other[:-1]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets this state, and puts the former one back."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, (enabled, dtype) in zip(autocast_types(), self.autocast, strict=True):
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                    )
            for (getter, setter), value in zip(_SWITCHES, self.switches, strict=True):
                present = getter()
                if present != value:
                    stack.callback(setter, present)
                    setter(value)
            yield


_made: dict[Ambient, Ambient] = {}  # equal ones are one object
_last: tuple[tuple[Any, ...], Any] = ((), None)  # what was read, and the state that it is
