"""The log: for each piece of memory that does not exist yet, what writes to it.

There is no list of everything. A memory holds its writes, a write what it reads, so that what nobody can ask
for any more is freed with the tensors that led to it. Views write nothing: a tensor is a memory and where in
it the elements lie (strides and offset as torch's meta kernels give them).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch._ops import OpOverload

from ..errors import SMPError

__all__ = ["Constant", "Memory", "Place", "Write", "origin_of"]

_numbers = itertools.count()
_SMALL_BYTES = 1 << 16
"""Constants up to this size are copied, so that nobody can change them."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class Memory:
    """What will be one storage.

    Attributes:
        num_bytes: its size.
        writes: in order; the first makes it.
    """

    num_bytes: int
    writes: list[Write] = field(default_factory=list)
    _held: weakref.ref[_Hold] | None = None

    def hold(self) -> object:
        """A thing that a tensor of this memory keeps."""
        found = self._held() if self._held is not None else None
        if found is None:
            found = _Hold()
            self._held = weakref.ref(found)
        return found

    @property
    def is_held(self) -> bool:
        """Whether there is a tensor that lies in it."""
        return self._held is not None and self._held() is not None


class _Hold:
    """(Tensors themselves must not be referred to weakly: torch would not let them become real.)"""


@dataclass(frozen=True, eq=False)
class Place:
    """Where in a memory the elements of a tensor lie."""

    memory: Memory
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, memory: Memory, twin: torch.Tensor) -> Place:
        """As a meta tensor lies."""
        return cls(
            memory,
            twin.dtype,
            tuple(twin.shape),
            tuple(twin.stride()),
            twin.storage_offset(),
            twin.is_conj(),
            twin.is_neg(),
        )

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in the memory that there is now."""
        found = torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )  # type: ignore[call-overload]
        found = torch._conj(found) if self.is_conj else found
        return torch._neg_view(found) if self.is_neg else found  # type: ignore[attr-defined]

    @property
    def is_all(self) -> bool:
        """Whether its elements are all of the memory, each once."""
        return self._num_bytes == self.memory.num_bytes and self._is_dense

    @property
    def _num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    @property
    def _is_dense(self) -> bool:
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True


class Constant:
    """A tensor with data, which a write reads: a small one is copied, of a large one it is known whether it
    has changed since."""

    def __init__(self, tensor: torch.Tensor) -> None:
        small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
        self._tensor = tensor.detach().clone() if small else tensor.detach()
        self._bits = None if small else _bits(self._tensor)

    @property
    def digest(self) -> tuple[int, ...]:
        """Of its numbers."""
        return (self._bits or _bits(self._tensor))[1:]

    def value(self) -> torch.Tensor:
        """The tensor.

        Raises:
            SMPError: it is not what it was.
        """
        if self._bits is not None and _bits(self._tensor) != self._bits:
            raise SMPError(
                f"a tensor of shape {list(self._tensor.shape)} was copied into a model under delayed "
                "initialization and changed afterwards, before the model was made: leave it as it is until "
                "the first step, or copy a clone"
            )
        return self._tensor

    def copy(self) -> torch.Tensor:
        """The same in memory of its own, as a source brings it."""
        return self.value().detach().clone()


@dataclass(eq=False)
class Write:
    """One operation that makes memory or changes it.

    Attributes:
        function: of torch, or a function without arguments that brings a tensor.
        args, kwargs: with a :class:`Place` or :class:`Constant` for each tensor.
        places: those among the arguments, each with whether the operation writes there.
        made: memory that it makes: (number of the result, place).
        state: of the generator before it, if it draws.
        generator: the script's own, which it draws from instead.
        dtype: torch's default at that time.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: list[tuple[Place, bool]]
    made: list[tuple[int, Place]]
    state: torch.Tensor | None = None
    generator: torch.Generator | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    number: int = field(default_factory=lambda: next(_numbers))

    def note(self) -> None:
        """Puts it behind the writes of each memory that it makes or changes."""
        changed = [place.memory for place, writes in self.places if writes]
        for memory in dict.fromkeys([*changed, *(place.memory for _, place in self.made)]):
            memory.writes.append(self)

    def fills(self, memory: Memory) -> bool:
        """Whether nothing of what was there before stays or is read."""
        if any(place.memory is memory for _, place in self.made):
            return True
        if str(self.function) not in _WHOLE:
            return False
        mine = [(place, writes) for place, writes in self.places if place.memory is memory]
        return len(mine) == 1 and mine[0][1] and mine[0][0].is_all


def origin_of(place: Place, known: Origins | None = None) -> int:
    """A digest of what its elements will be made from: operations, their numbers, states of generators.

    Two processes in which it is the same make the same elements, but of what functions bring that read files.

    Args:
        known: digests of what is written to each memory, which several tensors may share.
    """
    known = {} if known is None else known
    found = 0
    seen: set[Memory] = set()
    waiting = [place.memory]
    while waiting:
        memory = waiting.pop()
        if memory in seen:
            continue
        seen.add(memory)
        if memory not in known:
            known[memory] = _digest_of_writes(memory)
        digest, read = known[memory]
        found = crc32(digest.to_bytes(4), found)
        waiting += read
    return found


Origins = dict[Memory, tuple[int, list[Memory]]]
"""For each memory a digest of what is written to it, and which memories that reads."""


def _digest_of_writes(memory: Memory) -> tuple[int, list[Memory]]:
    found = 0
    for write in memory.writes:
        numbers = [
            arg.digest if isinstance(arg, Constant) else arg
            for arg in (*write.args, *write.kwargs.values())
            if isinstance(arg, int | float | Constant)
        ]
        source = getattr(write.function, "__self__", None)
        if isinstance(source, Constant):
            numbers.append(source.digest)
        name = str(write.function) if isinstance(write.function, OpOverload) else "a source"
        found = crc32(repr((name, numbers)).encode(), found)
        if write.state is not None:
            found = crc32(write.state.numpy().tobytes(), found)
    return found, list(dict.fromkeys(other.memory for write in memory.writes for other, _ in write.places))


_WHOLE = frozenset(
    [
        *("aten.copy_.default", "aten.zero_.default", "aten.fill_.Scalar", "aten.fill_.Tensor"),
        *("aten.normal_.default", "aten.uniform_.default"),
    ]
)
"""Operations that write all elements of their first argument and read none."""


def _bits(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Tells whether a tensor has changed."""
    if tensor.is_meta:
        return tensor._version, 0, 0  # has no numbers; an operation asks for its form
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = values.view(_INTEGERS[values.element_size()])
    first = whole[: max(1, len(whole) // 2)] if whole.dim() else whole
    with torch._C._DisableTorchDispatch():
        return tensor._version, int(whole.sum(dtype=torch.int64)), int(first.sum(dtype=torch.int64))
