"""Keys under which the metadata of calls is cached, and tokens by which ranks compare them.

Two modules that are built alike share one cache entry: the *signature* of a module is its class, its plain
attributes, the metadata of its parameters and buffers, and the signatures of its children. Attributes that
are neither plain nor containers of plain values count by identity. A module's signature is computed again
when its *fingerprint* (all attributes, the training flags among them) has changed since the last step, or
when an attribute is heard to be set.

A *token* is a 64-bit number made of text that is the same in every process: names, metadata and plain
values, but no addresses.
"""

from __future__ import annotations

import hashlib
import operator
import zlib
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import nn

from ...devices import home
from ..parameters.tables import plain_table
from ..state.containers import same_plain
from ..state.flat_weights import SECOND_LISTS
from ..values.calls import ResultMeta
from ..values.placed import PlacedTensor, TensorMeta

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_PLAIN_SET = frozenset(_PLAIN)
_MODULE_TABLES = frozenset(nn.Module().__dict__) - {"training"} | SECOND_LISTS


def plain_key(value: Any) -> Hashable:
    """A hashable stand-in for any attribute or argument that is no tensor."""
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))  # 0.0 is not -0.0
    if kind in _PLAIN_SET:
        return (kind, value)
    base = tuple if isinstance(value, tuple) else list if isinstance(value, list) else None
    if base is not None and base.__len__(value) < 64:  # a class of the user's may have another len()
        return (kind, *[plain_key(item) for item in base.__iter__(value)])
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
        self._fingerprints: dict[int, list[Any]] = {}
        self._signatures: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._checked: set[int] = set()

    def new_step(self) -> None:
        self._checked.clear()

    def forget(self) -> None:
        """Parameters have changed their metadata (``requires_grad``): compute all anew."""
        self._signatures.clear()
        self._checked.clear()

    def changed(self, key: int) -> None:
        """An attribute in the module of that id, or the list of its parts, has changed."""
        self._checked.discard(key)
        self._parts.pop(key, None)

    def of(self, module: nn.Module) -> int:
        """A number that equal modules share."""
        key = id(module)
        if key not in self._checked:
            self._checked.add(key)
            fingerprint = self._fingerprint(module)
            if key not in self._signatures or not same_values(self._fingerprints[key], fingerprint):
                self._fingerprints[key] = fingerprint
                signature = self._signature(module)
                self._signatures[key] = self._numbers.setdefault(signature, len(self._numbers))
        return self._signatures[key]

    def unheard(self, module: nn.Module) -> str | None:
        """An attribute that has changed since the signature was taken, and both values; None if none has."""
        before = self._fingerprints.get(id(module))
        if (
            before is None
            or id(module) not in self._checked
            or same_values(before, self._fingerprint(module))
        ):
            return None
        old = iter(before)
        for name, part in module.named_modules():
            for key, value in part.__dict__.items():
                if key in _MODULE_TABLES:
                    continue
                was = next(old, None)
                if was is not value and not same_values([was], [value]):
                    return (
                        f"{name}.{key} was {was!r} and is {value!r}"
                        if name
                        else f"{key} was {was!r} and is {value!r}"
                    )
        return "an attribute was removed"

    def _fingerprint(self, module: nn.Module) -> list[Any]:
        parts = self._parts.get(id(module))
        if parts is None:
            parts = self._parts[id(module)] = list(module.modules())
        tables = _MODULE_TABLES
        return [v for part in parts for k, v in part.__dict__.items() if k not in tables]

    def _signature(self, module: nn.Module) -> Hashable:
        return signature_without(module)


def signature_without(
    module: nn.Module, unread: Collection[tuple[str, str]] = (), name: str = ""
) -> Hashable:
    """What equal modules have in common, but for the values of some attributes.

    Args:
        unread: (name of a part, its attribute, a plain value); a part that is there twice has two names.
        name: the module's own.
    """
    attributes: list[tuple[str, Any]] = [
        (key, plain_key(value) if (name, key) not in unread else type(value))
        for key, value in sorted(module.__dict__.items())
        if key not in _MODULE_TABLES
    ]
    state = [
        (key, None if tensor is None else tensor_meta(tensor))
        for table in (module._parameters, plain_table(module._buffers))
        for key, tensor in table.items()
    ]
    prefix = f"{name}." if name else ""
    children = [
        (key, None if child is None else signature_without(child, unread, prefix + key))
        for key, child in module._modules.items()
    ]
    return (type(module), tuple(attributes), tuple(state), tuple(children))


def same_values(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the same objects, or equal plain values."""
    if len(a) != len(b):
        return False
    if all(map(operator.is_, a, b)):
        return True
    return all(x is y or (type(x) in _PLAIN_SET and same_plain(x, y)) for x, y in zip(a, b))


def token(*parts: object) -> int:
    """64 bits of the parts' text."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 3


def stable_text(value: object) -> str:
    """Text of an argument without addresses."""
    if type(value) is torch.device:
        return value.type  # ranks that do the same have devices of other numbers
    if type(value) is str and value.partition(":")[0] == home().type:
        return repr(home().type)
    if type(value) in _PLAIN_SET:
        return repr(value)
    if isinstance(value, torch.Tensor):
        return repr(tensor_meta(value))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return f"{value.dtype}{value.shape}{zlib.crc32(value.tobytes())}"
    return type(value).__qualname__


def structure_token(meta: ResultMeta) -> int:
    """What planning depends on in a result."""
    leaves = [
        stable_text(getattr(leaf, "value", None)) if hasattr(leaf, "value") else repr(leaf)
        for leaf in meta.leaves
    ]
    return token(leaves, meta.changed, meta.flops)
