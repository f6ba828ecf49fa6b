"""Keys under which the metadata of calls is cached, and tokens by which ranks compare them.

Two modules that are built alike share one cache entry: the *signature* of a module is its class, its plain
attributes, the metadata of its parameters and buffers, and the signatures of its children. Attributes that
are neither plain nor containers of plain values count by identity. A module's signature is computed again
when its *fingerprint* (all plain attributes, the training flags among them) has changed since the last step.

A *token* is a 64-bit number made of text that is the same in every process: names, metadata and plain
values, but no addresses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from .calls import ResultMeta
from .placed import PlacedTensor, TensorMeta

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_PLAIN_SET = frozenset(_PLAIN)
_MODULE_TABLES = frozenset(nn.Module().__dict__) - {"training"}


def plain_key(value: Any) -> Hashable:
    """A hashable stand-in for any attribute or argument that is no tensor."""
    kind = type(value)
    if kind in _PLAIN_SET:
        return (kind, value)
    if isinstance(value, tuple | list) and len(value) < 64:
        return (kind, *[plain_key(item) for item in value])
    if isinstance(value, torch.Tensor):
        return ("tensor", tensor_meta(value))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    # Hashable objects (functions, types, enums, configs) compare as they themselves define.
    return (kind, value)


def tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    return tensor.smp_meta if type(tensor) is PlacedTensor else TensorMeta.of(tensor)


class ModuleSignatures:
    """Signatures of modules, valid until :meth:`new_step` finds a changed fingerprint."""

    def __init__(self) -> None:
        self._parts: dict[int, list[nn.Module]] = {}
        self._fingerprints: dict[int, tuple[Any, ...]] = {}
        self._signatures: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._checked: set[int] = set()

    def new_step(self) -> None:
        self._checked.clear()

    def forget(self) -> None:
        """Parameters have changed their metadata (``requires_grad``): compute all anew."""
        self._signatures.clear()
        self._checked.clear()

    def of(self, module: nn.Module) -> int:
        """A number that equal modules share."""
        key = id(module)
        if key not in self._checked:
            self._checked.add(key)
            fingerprint = self._fingerprint(module)
            if self._fingerprints.get(key) != fingerprint or key not in self._signatures:
                self._fingerprints[key] = fingerprint
                signature = self._signature(module)
                self._signatures[key] = self._numbers.setdefault(signature, len(self._numbers))
        return self._signatures[key]

    def _fingerprint(self, module: nn.Module) -> tuple[Any, ...]:
        parts = self._parts.get(id(module))
        if parts is None:
            parts = self._parts[id(module)] = list(module.modules())
        plain = _PLAIN_SET
        return tuple([v for part in parts for v in part.__dict__.values() if type(v) in plain])

    def _signature(self, module: nn.Module) -> Hashable:
        attributes = [
            (name, plain_key(value))
            for name, value in sorted(module.__dict__.items())
            if name not in _MODULE_TABLES
        ]
        state = [
            (name, None if tensor is None else tensor_meta(tensor))
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
        ]
        children = [
            (name, None if child is None else self._signature(child))
            for name, child in module._modules.items()
        ]
        return (type(module), tuple(attributes), tuple(state), tuple(children))


def function_name(function: Callable[..., Any]) -> str:
    """A readable name that is the same in every process: ``add``, ``T``, ``MyFunction.apply``."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", name))  # type: ignore[attr-defined]
    return str(name)


def token(*parts: object) -> int:
    """64 bits of the parts' text."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 3


def stable_text(value: object) -> str:
    """Text of an argument without addresses."""
    if type(value) in _PLAIN_SET:
        return repr(value)
    if isinstance(value, torch.Tensor):
        return str(tuple(tensor_meta(value)))
    return type(value).__qualname__


def structure_token(meta: ResultMeta) -> int:
    """What planning depends on in a result."""
    leaves = [
        stable_text(getattr(leaf, "value", None)) if hasattr(leaf, "value") else repr(leaf)
        for leaf in meta.leaves
    ]
    return token(leaves, meta.changed, meta.flops)
