"""Descriptions by what they depended on: modules that differ only in what was not read share one.

Blocks of a model often differ in nothing but their own number, which is read in some calls (for a block's
part of a cache) and not in others. A run of another such block on the same arguments would go the same way,
step by step, until it came to an attribute that this run has not come to, so it would show the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn

from ..code.watch import Names
from .attribute_reads import Unread, numbers_and_texts
from .signature import signature_without

__all__ = ["AlikeCalls"]

_MAX_UNREAD = 8
_MAX_CALLS = 32


class AlikeCalls:
    """Calls that were described, by what they did not read."""

    def __init__(self) -> None:
        # By the signature without all that could be unread; by what was unread, the signature without that.
        self._known: dict[Hashable, dict[Unread, dict[Hashable, list[tuple[Names, Any]]]]] = {}

    def learn(self, module: nn.Module, unread: Unread, names: Names, key: Any) -> None:
        """A call of the module was described, under ``key``; ``names`` are those of its code."""
        if not unread:
            return
        by_unread = self._known.setdefault(_family(module), {})
        if unread in by_unread or len(by_unread) < _MAX_UNREAD:
            calls = by_unread.setdefault(unread, {}).setdefault(signature_without(module, unread), [])
            if len(calls) < _MAX_CALLS:
                calls.append((names, key))

    def of(self, module: nn.Module) -> Iterator[tuple[Names, Any]]:
        """(Names, key) of calls of modules that differ from this one only in what those did not read."""
        if self._known:
            for unread, by_signature in self._known.get(_family(module), {}).items():
                yield from by_signature.get(signature_without(module, unread), ())


def _family(module: nn.Module) -> Hashable:
    candidates = numbers_and_texts(module)
    return candidates, signature_without(module, candidates)
