"""Modules whose calls keep no activations: ``smp.set_activation_checkpointing`` marks them.

A marked module's call runs under ``torch.utils.checkpoint`` where its owner runs it, on its own or inside a
larger one. The mark is an attribute of the module and its forward is left alone, so that a copy of the module
computes with its own weights. Without gradients a call is a plain one.

torch runs forward again for the backward and does not look whether it runs on the same numbers. Here it does:
arguments, parameters and buffers must be as they were, as autograd itself asks of what it keeps. What forward
itself changes would be changed twice. The running statistics of a norm, on which its own result does not
depend while it trains, are changed the first time alone; anything else is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ...errors import SMPError
from ..parameters.tables import plain_table
from ..values.structure import flatten

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

    Raises:
        SMPError: the call changes what it is given, or a buffer; in backward: something has changed since.
    """
    if not torch.is_grad_enabled():
        return original(module, *args, **kwargs)
    preserve_rng_state, is_packed = module.__dict__[_MARK]
    is_packed = is_packed and len(args) == 1 and isinstance(args[0], tuple)
    reads = _Reads(module, (args, kwargs))

    def function(*given: Any, **options: Any) -> Any:
        given = (given,) if is_packed else given
        if reads.is_first:
            with reads.first():
                return original(module, *given, **options)
        with reads.again():
            return original(module, *given, **options)

    # Packed tensors go one by one, where checkpoint() looks for them; the module gets a tuple again.
    args = args[0] if is_packed else args
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


class _Reads:
    """What a call reads, and whether it is the same when it runs again."""

    def __init__(self, module: nn.Module, given: Any) -> None:
        self.is_first = True
        self._module = module
        leaves: list[Any] = []
        flatten(given, leaves)
        self._tensors = {f"its argument {i}": leaf for i, leaf in enumerate(leaves) if _has_version(leaf)}
        self._norms: list[tuple[dict[str, Any], str]] = []  # tables of buffers, and names in them
        for path, part in module.named_modules():
            counts = isinstance(part, _NormBase) and part.training
            for table, is_norms in ((part._parameters, False), (plain_table(part._buffers), counts)):
                for name, tensor in table.items():
                    if is_norms and tensor is not None:
                        self._norms.append((table, name))
                    elif _has_version(tensor):
                        self._tensors[f"{path}.{name}".lstrip(".")] = tensor
        self._versions = self._look()

    def _look(self) -> dict[str, int]:
        return {name: tensor._version for name, tensor in self._tensors.items()}

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        self.is_first = False
        yield
        if (name := self._changed()) is not None:
            raise SMPError(
                f"smp.set_activation_checkpointing: a call of {type(self._module).__name__} changes {name}, "
                "and would do so again when backward computes it once more: leave it out"
            )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if (name := self._changed()) is not None:
            raise SMPError(
                f"smp.set_activation_checkpointing: {name} of {type(self._module).__name__} has changed "
                "between the call and its backward, which computes it once more: change it after the step"
            )
        kept = [(table, name, table[name]) for table, name in self._norms]
        for table, name, buffer in kept:
            dict.__setitem__(table, name, buffer.clone())
        try:
            yield
        finally:
            for table, name, buffer in kept:
                dict.__setitem__(table, name, buffer)

    def _changed(self) -> str | None:
        now = self._look()
        return next((name for name, version in self._versions.items() if now[name] != version), None)


def _has_version(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()
