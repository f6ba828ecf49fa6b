"""Descriptions of calls, each made once and kept.

A call is looked up by what it calls (modules that are built alike are one), the structure and metadata of its
arguments, and the torch state around it. The first such call is described by a fake run; one that cannot be
is run for real by its owner, and what that shows is kept too, unless it depended on data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from .ambient import Ambient
from .calls import Arguments, Constant, ResultMeta
from .metadata import MetadataInference, MutableArgument
from .signature import (
    ModuleSignatures,
    plain_key,
    stable_text,
    structure_token,
    tensor_meta,
    token,
)


class Description(NamedTuple):
    """What a call returns; ``content`` stands for the call, ``structure`` for what planning needs of it."""

    meta: ResultMeta
    content: int
    structure: int


class NeedsData(NamedTuple):
    """The call returns Python data of an argument (``torch.equal``): nothing to record."""


class NotDescribed(NamedTuple):
    """Only running the call shows its result; under ``key`` that may be kept (None: it may not)."""

    key: Any


class Descriptions:
    """The cache of one recorder.

    Attributes:
        inferring: True while a fake run is on; module calls then skip hooks.
    """

    def __init__(self) -> None:
        self.signatures = ModuleSignatures()
        self.inference = MetadataInference()
        self.inferring = False
        # Key of a call -> (description, content tokens by label, structure token).
        self._known: dict[Any, tuple[ResultMeta, dict[str, int], int]] = {}

    def describe(
        self, label: str, what: nn.Module | Callable[..., Any], arguments: Arguments, ambient: Ambient
    ) -> Description | NeedsData | NotDescribed:
        """What ``what`` of the arguments returns.

        Raises:
            MutableArgument: a module stored tensors in an object that it was given.
        """
        is_module = isinstance(what, nn.Module)
        named = (None, self.signatures.of(what)) if is_module else (label, what)
        key: Any = (*named, arguments.spec, ambient, *[_leaf_key(leaf) for leaf in arguments.leaves])
        try:
            found = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed
            key, found = None, None
        if found is not None:
            meta, contents, structure = found
            content = contents.get(label)
            if content is None:
                content = contents[label] = content_token(label, arguments)
            return Description(meta, content, structure)
        self.inferring = True
        try:
            infer: Callable[..., ResultMeta] = self.inference.module if is_module else self.inference.function
            meta = infer(what, arguments)
        except MutableArgument:
            raise
        except DataDependentOutputException:
            return NotDescribed(None) if is_module else NeedsData()
        except DynamicOutputShapeException:
            return NotDescribed(None)
        except Exception:
            # No fake kernel, a hook, or an error of the user's, which the real run will show.
            return NotDescribed(key)
        finally:
            self.inferring = False
        return self._keep(key, label, arguments, meta)

    def learn(self, unknown: NotDescribed, label: str, arguments: Arguments, meta: ResultMeta) -> None:
        """Keeps what a real run has shown, if the next call will surely show the same."""
        constants = [leaf.value for leaf in meta.leaves if type(leaf) is Constant]
        if unknown.key is not None and all(type(value) in (str, bool, type(None)) for value in constants):
            self._keep(unknown.key, label, arguments, meta)

    def _keep(self, key: Any, label: str, arguments: Arguments, meta: ResultMeta) -> Description:
        content, structure = content_token(label, arguments), structure_token(meta)
        if key is not None:
            self._known[key] = (meta, {label: content}, structure)
        return Description(meta, content, structure)


def content_token(label: str, arguments: Arguments) -> int:
    """Stands for a call when ranks compare what they recorded."""
    return token(label, *[stable_text(leaf) for leaf in arguments.leaves])


def _leaf_key(leaf: Any) -> Any:
    return tensor_meta(leaf) if isinstance(leaf, torch.Tensor) else plain_key(leaf)
