"""A call as data: its arguments taken apart, its result described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .placed import TensorMeta
from .structure import Spec, flat_spec, flatten, is_flat, rebuild


class Arguments:
    """Flattened arguments of a call with its tensors apart."""

    __slots__ = ("leaves", "positions", "spec", "tensors")

    def __init__(self, leaves: list[Any], spec: Spec) -> None:
        self.leaves = leaves
        self.spec = spec
        self.positions: list[int] = []
        self.tensors: list[torch.Tensor] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self.positions.append(i)
                self.tensors.append(leaf)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        spec = flat_spec(args, kwargs)
        if spec is not None:
            return cls(list(args), spec)
        leaves: list[Any] = []
        spec = flatten((args, kwargs), leaves)
        return cls(leaves, spec)

    def copy(self) -> Arguments:
        """The same arguments, to be replaced one by one."""
        same = Arguments([], self.spec)
        same.leaves, same.tensors, same.positions = list(self.leaves), list(self.tensors), self.positions
        return same

    def replace(self, i: int, tensor: torch.Tensor | None) -> None:
        """Another tensor in the place of the i-th; None: nothing, until it is built with others."""
        self.tensors[i] = self.leaves[self.positions[i]] = tensor  # type: ignore[assignment]

    def forget(self, sources: Sequence[int]) -> None:
        """Lets go of the placed tensors, which their sources stand for from now on."""
        for i, source in enumerate(sources):
            if source >= 0:
                self.tensors[i] = self.leaves[self.positions[i]] = None  # type: ignore[assignment]

    def build(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other tensors."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        if is_flat(self.spec, len(leaves)):
            return tuple(leaves), {}
        args, kwargs = rebuild(self.spec, iter(leaves))
        return args, kwargs


@dataclass(frozen=True)
class NewTensor:
    """A result leaf that is a new tensor.

    ``links`` are the tensor arguments that a gradient of it would reach, each as often as it would be added
    to there; ``aliases`` one whose memory it shares (a view), or None. Arguments are numbered among the
    tensor arguments. ``shares``: the first of the call's new results whose memory it shares, or None.
    ``is_view``: of something that the call has made, whether it returns that or not. ``is_buffer``: it lies
    in the memory of one of the module's buffers.
    """

    meta: TensorMeta
    links: tuple[int, ...]
    aliases: int | None = None
    is_view: bool = False
    shares: int | None = None
    is_buffer: bool = False


@dataclass(frozen=True)
class SameTensor:
    """A result leaf that is one of the tensor arguments itself."""

    argument: int


@dataclass(frozen=True)
class Repeated:
    """A result leaf that is the same tensor as an earlier new one."""

    index: int


@dataclass(frozen=True)
class Constant:
    """A result leaf that is no tensor."""

    value: Any


@dataclass(frozen=True)
class ChangedArgument:
    """A tensor argument changed in place, with its metadata after the call."""

    argument: int
    meta: TensorMeta
    links: tuple[int, ...]


@dataclass(frozen=True)
class ResultMeta:
    """Everything that recording needs to know of a call's result.

    ``buffers`` are the module's own that the call changes, by name within it, ``rebound`` those of them
    that it binds anew, ``returned`` those in whose memory its results lie. ``saved_state`` are parameters
    and buffers that its backward will read, ``saved_arguments`` the tensor arguments of that kind,
    ``unguarded`` what it changes of its own state without autograd noticing. ``sets_attributes`` tells of
    Python attributes that it sets on tensors. ``states`` are where the random generators went, if the call
    ran for real and drew from them.
    """

    spec: Spec
    leaves: tuple[NewTensor | SameTensor | Repeated | Constant, ...]
    changed: tuple[ChangedArgument, ...] = ()
    buffers: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    sets_attributes: bool = False
    unguarded: tuple[str, ...] = ()
    saved_state: tuple[str, ...] = ()
    saved_arguments: tuple[int, ...] = ()
    states: tuple[torch.Tensor, ...] = ()
    draws: bool = False
    flops: float = 0.0
    kept_bytes: int = 0
