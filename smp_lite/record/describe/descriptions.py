"""Descriptions of calls, each made once and kept.

A call is looked up by what it calls (modules that are built alike are one), the plain Python values that its
code reads elsewhere, the structure and metadata of its arguments, and the torch state around it. The first
such call is described by a fake run; one that cannot be is run for real by its owner, and what that shows is
kept too, unless it depended on data.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from ..code.bytecode import with_nested
from ..code.reads import places_read
from ..code.watch import Names, mentioned_in
from ..state.ambient import Ambient
from ..state.places import PlacesRead
from ..values.calls import Arguments, Constant, ResultMeta
from ..values.placed import PlacedTensor
from .alike import AlikeCalls
from .effects import CannotBeRecorded, NeedsOpening
from .metadata import USES_OTHERS, MetadataInference
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


class Opened(NamedTuple):
    """The module's own code has to run where it is called, and why."""

    reason: str


class NeedsData(NamedTuple):
    """The call wants a number that is only in a tensor."""


class NotDescribed(NamedTuple):
    """Only running the call shows its result; under ``key`` that may be kept (None: it may not)."""

    key: Any


class Descriptions:
    """The cache of one recorder.

    Attributes:
        inferring: True while a fake run is on; module calls then skip hooks.
        read: what the code of the module reads that was described last.
        has_described: whether there has been a fake run since this was last set to False.
        codes_with_node_hooks: functions that put hooks on nodes of autograd, and those written in them.
    """

    def __init__(self) -> None:
        self.signatures = ModuleSignatures()
        self.inference = MetadataInference()
        self.inferring = False
        self.has_described = True  # of the model, to partition it
        self.read: PlacesRead | None = None
        self.codes_with_node_hooks: set[types.CodeType] = set()
        # Key of a call -> (description, content tokens by label, structure token).
        self._known: dict[Any, tuple[ResultMeta, dict[str, int], int]] = {}
        self._alike = AlikeCalls()
        self._apart: set[int] = set()  # signatures of modules that may hold what others of them do not
        self._last: dict[str, tuple[Any, Description]] = {}  # by label
        self._names: dict[int, Names] = {}  # by signature
        self._places: dict[int, tuple[int, int, PlacesRead]] = {}  # by module: (signature, functions, places)

    def describe(
        self, label: str, what: nn.Module | Callable[..., Any], arguments: Arguments, ambient: Ambient
    ) -> Description | Opened | NeedsData | NotDescribed:
        """What ``what`` of the arguments returns."""
        is_module = isinstance(what, nn.Module)
        key = self._key(label, what, arguments, ambient)
        last = self._last.get(label)
        try:
            if last is not None and last[0] == key:  # by identity nearly always: no hash of a long key
                return last[1]
            found = self._known.get(key)
            if found is None and is_module:
                key = self._key_of_alike(label, what, arguments, ambient) or key
                found = self._known.get(key)
        except Exception:  # an argument that cannot be hashed, or compared
            key, found = None, None
        if found is not None:
            meta, contents, structure = found
            content = contents.get(label)
            if content is None:
                content = contents[label] = content_token(label, arguments)
            description = Description(meta, content, structure)
            self._last[label] = (key, description)
            return description
        if is_module and any(isinstance(part, torch.jit.ScriptModule) for part in what.modules()):
            return NotDescribed(None)  # what its interpreter does with fake tensors changes from run to run
        self.inferring = self.has_described = True
        try:
            if is_module:
                meta, names, unread = self.inference.module(what, arguments)
                self._learn_names(what, names)
                if self.inference.met_state:
                    self._apart.add(self.signatures.of(what))
                key = key and self._key(label, what, arguments, ambient)
                if key:
                    self._alike.learn(what, unread, self._names[key[0]], key)
            else:
                meta = self.inference.function(what, arguments)
        except CannotBeRecorded:
            raise
        except NeedsOpening as effect:
            return Opened(str(effect)) if is_module else NotDescribed(None)
        except Exception as error:
            if is_module and self.inference.touched_placed:
                return Opened(USES_OTHERS)
            if isinstance(error, DataDependentOutputException):
                return NotDescribed(None) if is_module else NeedsData()
            if isinstance(error, DynamicOutputShapeException):
                return NotDescribed(None)
            # No fake kernel, or an error of the user's, which the real run will show.
            if is_module and self._names.get(self.signatures.of(what)) is None:
                self._learn_names(what, mentioned_in(what))
            return NotDescribed(key and self._key(label, what, arguments, ambient))
        finally:
            self.inferring = False
        return self._keep(key, label, arguments, meta)

    def forget(self) -> None:
        """Calls are described anew: something that they read is no longer what it was taken for."""
        self._known.clear()
        self._alike = AlikeCalls()
        self._last.clear()

    def _key(self, label: str, what: Any, arguments: Arguments, ambient: Ambient) -> Any:
        if isinstance(what, nn.Module):
            signature = self.signatures.of(what)
            self.read = places = self.places_of(what, signature)
            named, number = signature, places.look().number if places is not None else -1
        else:
            named, number = what, label
        leaves = [
            leaf.smp_meta if type(leaf) is PlacedTensor else _leaf_key(leaf) for leaf in arguments.leaves
        ]
        if named in self._apart:
            leaves.append(id(what))
        return (named, number, arguments.spec, ambient, *leaves)

    def _key_of_alike(self, label: str, module: nn.Module, arguments: Arguments, ambient: Ambient) -> Any:
        """Lets the call have the description of an alike module's; its key, or None if there is none."""
        signature = self.signatures.of(module)
        own_names = self._names.get(signature)
        for names, known in self._alike.of(module):
            if own_names is not None and own_names is not names:
                continue  # it has run, and what it does is known from that
            self._names[signature] = names
            key = self._key(label, module, arguments, ambient)
            if key[1:] == known[1:]:
                self._known[key] = self._known[known]
                return key
            if own_names is None:
                del self._names[signature]
                self._places.pop(id(module), None)
                self.read = None
        return None

    # What a module's code reads elsewhere -------------------------------------------------------------------

    def places_of(self, module: nn.Module, signature: int) -> PlacesRead | None:
        """Where the code of the module finds plain values; None as long as it has not run."""
        names = self._names.get(signature)
        if names is None:
            return None
        found = self._places.get(id(module))
        if found is None or found[0] != signature or found[1] != len(names.functions):
            found = (signature, len(names.functions), places_read(module, names))
            self._places[id(module)] = found
        return found[2]

    def functions_of(self, signature: int) -> Collection[types.CodeType]:
        """The code that modules of that signature have been seen to enter; it may become more."""
        return self._names[signature].functions

    def mentions(self, module: nn.Module, names: frozenset[str]) -> bool:
        """Whether code that has been seen in calls of the module has one of these names in it."""
        known = self._names.get(self.signatures.of(module))
        return known is not None and not known.attributes.isdisjoint(names)

    def all_places(self) -> list[PlacesRead]:
        """What the code of all modules reads that have been called."""
        return [places for _, _, places in self._places.values()]

    def _learn_names(self, module: nn.Module, names: Names) -> None:
        signature = self.signatures.of(module)
        for code in names.functions:
            if "grad_fn" in code.co_names or "register_prehook" in code.co_names:
                self.codes_with_node_hooks.update(with_nested(code)[1:])
        known = self._names.setdefault(signature, names)
        if known is not names:
            known.add(names)
        self.read = self.places_of(module, signature)
        assert self.read is not None
        self.read.look()

    # Calls run for real -------------------------------------------------------------------------------------

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
