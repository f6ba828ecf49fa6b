"""Modules whose calls keep no activations: ``smp.set_activation_checkpointing`` marks them.

A marked module's call runs under ``torch.utils.checkpoint`` where its owner runs it, on its own or inside a
larger one. The mark is an attribute of the module and its forward is left alone, so that a copy of the module
computes with its own weights. Without gradients a call is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["call_marked", "forward_of", "is_marked", "mark"]

_MARK = "_smp_checkpointed"

_is_used = False


def mark(module: nn.Module, *, preserve_rng_state: bool, pack_args_as_tuple: bool) -> None:
    """Lets calls of a module keep no activations from now on."""
    global _is_used
    _is_used = True
    module.__dict__[_MARK] = (preserve_rng_state, pack_args_as_tuple)


def is_marked(module: nn.Module) -> bool:
    """Whether :func:`mark` was called for it, or for what it is a copy of."""
    return _is_used and _MARK in module.__dict__


def forward_of(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The module's forward, without its hooks, as its calls run it."""
    if not is_marked(module):
        return module.forward(*args, **kwargs)
    return call_marked(lambda found, *a, **k: found.forward(*a, **k), module, args, kwargs)


def call_marked(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The call of a marked module.

    Args:
        original: calls the module that is its first argument; ``nn.Module.__call__``.
    """
    if not torch.is_grad_enabled():
        return original(module, *args, **kwargs)
    preserve_rng_state, is_packed = module.__dict__[_MARK]
    is_packed = is_packed and len(args) == 1 and isinstance(args[0], tuple)

    def function(*given: Any, **options: Any) -> Any:
        return original(module, *([given] if is_packed else given), **options)

    # Packed tensors go one by one, where checkpoint() looks for them; the module gets a tuple again.
    args = args[0] if is_packed else args
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
