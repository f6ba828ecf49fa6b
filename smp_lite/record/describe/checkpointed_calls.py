"""Modules whose calls keep no activations: ``smp.set_activation_checkpointing`` marks them.

A marked module's forward runs under a checkpoint (:mod:`.recomputed`) where its owner runs it, on its own or
inside a larger one. Its hooks run around that, once. The mark is an attribute of the module and its forward
is left alone, so that a copy of the module computes with its own weights. Without gradients a call is a plain
one.

Children of a Sequential that are computed again together are called as one :class:`CheckpointedRun`. It is a
module that holds them and belongs to no other, so that it can be recorded, described and run like any; the
Sequential's own forward calls the runs in place of the children. A child that is called by other code is for
itself. What the children draw is what each would have drawn by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...errors import SMPError
from .recomputed import recomputed

__all__ = [
    "CheckpointedRun",
    "call_in_runs",
    "call_marked",
    "forward_of",
    "has_own_forward",
    "has_runs",
    "is_marked",
    "mark",
    "seeded_by",
    "set_runs",
    "set_strategy",
    "strategy_of",
]

_MARK = "_smp_checkpointed"
_RUNS = "_smp_checkpointed_runs"
_STRATEGY = "_smp_checkpointed_strategy"

_is_used = False
_passing: nn.Module | None = None  # the module whose next call is a plain one
_seed_child: Callable[[int], None] | None = None


def mark(module: nn.Module, *, preserve_rng_state: bool) -> None:
    """Lets calls of a module keep no activations from now on."""
    global _is_used
    _is_used = True
    module.__dict__[_MARK] = preserve_rng_state


def is_marked(module: nn.Module) -> bool:
    """Whether :func:`mark` was called for it, or for what it is a copy of."""
    return _is_used and _MARK in module.__dict__


def set_strategy(sequential: nn.Sequential, strategy: str, *, preserve_rng_state: bool) -> None:
    """Notes how the children of a Sequential are to be taken together, once it is known where they lie."""
    sequential.__dict__[_STRATEGY] = (strategy, preserve_rng_state)


def strategy_of(sequential: nn.Sequential) -> tuple[str, bool] | None:
    """What :func:`set_strategy` has noted."""
    return sequential.__dict__.get(_STRATEGY)


def set_runs(sequential: nn.Sequential, runs: Sequence[nn.Module]) -> None:
    """From now on a Sequential's forward calls these, which hold its children, one after another."""
    if any(type(run) is CheckpointedRun for run in runs):
        sequential.__dict__[_RUNS] = tuple(runs)
    else:
        sequential.__dict__.pop(_RUNS, None)


def has_runs(module: nn.Module) -> bool:
    """Whether the module's forward calls runs of its children."""
    return _is_used and _RUNS in module.__dict__


class CheckpointedRun(nn.Module):
    """Modules that are called one after another, and computed again together.

    Args:
        modules: each takes what the one before returns.
        preserve_rng_state: the second forward draws the numbers of the first.
    """

    def __init__(self, modules: Sequence[nn.Module], preserve_rng_state: bool) -> None:
        super().__init__()
        self._modules.update({str(number): module for number, module in enumerate(modules)})
        mark(self, preserve_rng_state=preserve_rng_state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls them, each with its own mark: what is left of the run where it cannot be one call."""
        return self._call_all(args, kwargs, None, are_plain=False)

    def together(self, seed_child: Callable[[int], None] | None, *args: Any, **kwargs: Any) -> Any:
        """Calls them as parts of one checkpoint."""
        return self._call_all(args, kwargs, seed_child, are_plain=True)

    def _call_all(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seed_child: Callable[[int], None] | None,
        *,
        are_plain: bool,
    ) -> Any:
        global _passing
        result: Any = None
        for number, module in enumerate(self._modules.values()):
            assert module is not None
            if seed_child is not None:
                seed_child(number)
            if are_plain and is_marked(module):
                _passing = module
            with seeded_by(None):
                result = module(*args, **kwargs)
            args, kwargs = (result,), {}
        return result


@contextlib.contextmanager
def seeded_by(seed_child: Callable[[int], None] | None) -> Iterator[None]:
    """Within: a run has the random streams seeded before each of its modules, which it gives by number.

    None: a run draws on, as one does that lies inside a module of another.
    """
    global _seed_child
    before, _seed_child = _seed_child, seed_child
    try:
        yield
    finally:
        _seed_child = before


def forward_of(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The module's forward, without its hooks, as its calls run it."""
    return _forward(module, module.forward, args, kwargs)


def _forward(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    global _passing
    if has_runs(module):
        forward = partial(_call_runs, module)
    if _passing is module:
        _passing = None
        return forward(*args, **kwargs)
    if not is_marked(module):
        return forward(*args, **kwargs)
    if type(module) is CheckpointedRun:
        forward = partial(module.together, _seed_child)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    preserve_rng_state = module.__dict__[_MARK]
    return recomputed(forward, module, args, kwargs, preserve_rng_state=preserve_rng_state)


def call_marked(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The call of a module that is marked or has runs.

    Args:
        original: calls the module that is its first argument; ``nn.Module.__call__``.
    """
    if not _has_hooks(module):
        return forward_of(module, args, kwargs)
    with _other_forward(module, partial(_forward_with, module, module.forward)):
        return original(module, *args, **kwargs)


def call_in_runs(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """``call(module, ...)`` of a module whose own code runs where it is called."""
    if not has_runs(module):
        return call(module, *args, **kwargs)
    with _other_forward(module, partial(_call_runs, module)):
        return call(module, *args, **kwargs)


def _forward_with(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _forward(module, forward, args, kwargs)


def _call_runs(sequential: nn.Module, given: Any) -> Any:
    runs: tuple[nn.Module, ...] = sequential.__dict__[_RUNS]
    held = [part for run in runs for part in (run.children() if type(run) is CheckpointedRun else (run,))]
    if len(held) != len(sequential._modules) or any(
        a is not b for a, b in zip(held, sequential._modules.values(), strict=True)
    ):
        raise SMPError(
            f"the children of a {type(sequential).__name__} have changed since they were grouped: call "
            "smp.set_activation_checkpointing again"
        )
    for run in runs:
        given = run(given)
    return given


@contextlib.contextmanager
def _other_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within: the module runs this forward, between its hooks."""
    namespace = module.__dict__
    is_own, before = "forward" in namespace, namespace.get("forward")
    namespace["forward"] = forward
    try:
        yield
    finally:
        if is_own:
            namespace["forward"] = before
        else:
            namespace.pop("forward", None)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._has_any_global_hook()
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def has_own_forward(module: nn.Sequential) -> bool:
    """Whether a Sequential's code does something else than to call its children."""
    return type(module).forward is not nn.Sequential.forward or "forward" in module.__dict__
