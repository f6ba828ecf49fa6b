"""``static_mode``: a step that is recorded once and from then on replayed with other inputs.

The commands hold ordinary tensors that the user's function made from the batch: masks, shifted targets.
:class:`Tape` notes while recording every torch function that touches the batch or something made from it,
and runs them again on the next batch; nothing else of the user's function runs again. So whatever would
have come out differently must not matter: looking at data, drawing random numbers in the function, and
carrying tensors from one microbatch to the next are errors under ``static_mode``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..errors import SMPError
from .describe.signature import tensor_meta
from .recording import Recording
from .values.calls import Arguments
from .values.structure import exact_spec, flatten
from .values.torch_functions import LOOKS_AT_DATA, function_name


def refuse(what: str) -> SMPError:
    """The error for what replaying cannot repeat."""
    return SMPError(
        f"static_mode: True, but the step function {what}, which a replayed step would not do again: "
        "set static_mode to False"
    )


class Tape:
    """The ordinary calls of one microbatch that depend on its inputs.

    Args:
        inputs: the leaves of the microbatch's arguments.
    """

    def __init__(self, inputs: list[Any]) -> None:
        self._slots: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps recorded tensors alive, so that their ids stay theirs
        self._calls: list[tuple[Callable[..., Any], Arguments, list[int | None], list[int | None]]] = []
        self._bindings: list[tuple[Arguments, int, int]] = []
        self._num_inputs = len(inputs)
        self._num_slots = len(inputs)
        for number, leaf in enumerate(inputs):
            if isinstance(leaf, torch.Tensor):
                self._slots[id(leaf)] = number
                self._kept.append(leaf)

    def slot(self, tensor: object) -> int | None:
        return self._slots.get(id(tensor))

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an ordinary torch function and notes it if it depends on the inputs."""
        arguments = Arguments.of(args, kwargs)
        sources = [self.slot(tensor) for tensor in arguments.tensors]
        if all(source is None for source in sources):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in LOOKS_AT_DATA:
            raise refuse(f"looks at the data of its inputs ({function_name(func)}())")
        result = func(*args, **kwargs)
        leaves: list[Any] = []
        flatten(result, leaves)
        outputs: list[int | None] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                outputs.append(None)
                continue
            if id(leaf) not in self._slots:
                self._slots[id(leaf)] = self._num_slots
                self._kept.append(leaf)
                self._num_slots += 1
            outputs.append(self._slots[id(leaf)])
        if any(output is not None for output in outputs) or result is None:
            self._calls.append((func, arguments, sources, outputs))
        return result

    def bind(self, recording: Recording) -> None:
        """Finds the captured tensors that change from batch to batch."""
        for command in recording.commands:
            for i, source in enumerate(command.sources):
                slot = self.slot(command.arguments.tensors[i]) if source < 0 else None
                if slot is not None:
                    self._bindings.append((command.arguments, i, slot))

    def replay(self, inputs: list[Any]) -> dict[int, Any]:
        """Puts the tensors made from these inputs into the commands; returns all slots."""
        values: dict[int, Any] = dict(enumerate(inputs))
        for func, arguments, sources, outputs in self._calls:
            tensors = [
                tensor if source is None else values[source]
                for tensor, source in zip(arguments.tensors, sources, strict=True)
            ]
            args, kwargs = arguments.build(tensors)
            leaves: list[Any] = []
            flatten(func(*args, **kwargs), leaves)
            for slot, leaf in zip(outputs, leaves, strict=True):
                if slot is not None:
                    values[slot] = leaf
        for arguments, i, slot in self._bindings:
            arguments.tensors[i] = arguments.leaves[arguments.positions[i]] = values[slot]
        return values


def step_key(inputs: list[Any]) -> tuple[tuple[Any, ...], list[list[Any]]]:
    """Steps with equal keys can be replayed for one another, as long as the :func:`given_objects` stay.

    Returns:
        The key, and the leaves of each microbatch's arguments.
    """
    all_leaves: list[list[Any]] = []
    key: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    places: dict[int, int] = {}
    for args, kwargs in inputs:
        leaves: list[Any] = []
        key.append(exact_spec(flatten((args, kwargs), leaves)))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # Which of them are one tensor is part of it: the tape knows them by identity.
                key.append((places.setdefault(id(leaf), len(places)), tensor_meta(leaf)))
            else:
                key.append(_key_of(leaf))
        all_leaves.append(leaves)
    return tuple(key), all_leaves


def given_objects(inputs: list[Any]) -> list[Any]:
    """What among the arguments stands in a key by identity, and may change in place."""
    leaves: list[Any] = []
    flatten(inputs, leaves)
    found = {id(leaf): leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)}
    return [leaf for leaf in found.values() if type(leaf) not in _BY_VALUE]


def _key_of(leaf: Any) -> Hashable:
    kind = type(leaf)
    if kind is float or kind is complex:
        return kind, repr(leaf)  # 0.0 is not -0.0
    return (kind, leaf) if kind in _BY_VALUE else ("object", id(leaf))


_BY_VALUE = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
