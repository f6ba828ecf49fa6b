"""Whose batch a step is: pp rank 0's.

AWS's data pipelines load data on pp rank 0 alone; the other ranks go through a data set of the same length
whose items are empty tensors. So where the batch of another rank has other shapes or types, the step takes
that of pp rank 0, for recording as for the values: tensors are matched by their places in the arguments, and
everything else stays the rank's own. From then on every step does, since a dummy may happen to look like the
data; and random numbers go on from where pp rank 0 is, which may have drawn some to make the batch. Tensors
that share memory there share it everywhere (:mod:`.overlaps`).

Until then batches that look alike are left alone. That their numbers are the same too is checked, in every
step: two ranks with different data of one shape are a mistake, and not a convention. This costs one small
message a step, and reading the batch once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm.groups.world import World
from ..comm.layout import arrival, as_bytes, departure
from ..comm.waiting import wait_until
from ..devices import CPU
from ..errors import SMPError, SMPMismatch
from ..record.state.random_state import put_back_states, taken_states
from ..record.values.memory import digest_of
from ..record.values.microbatch import like
from ..record.values.placed import PlacedTensor, TensorMeta
from ..record.values.structure import flatten, rebuild
from .overlaps import memory_of, overlaps, tensors_in

__all__ = ["BatchOwner"]

_WHAT = "the batch of a step"
_Leaf = tuple[str, torch.dtype, tuple[int, ...]]


class BatchOwner:
    """Brings pp rank 0's batch to the ranks of its group that have another one.

    Args:
        world: the ranks. Making one is collective over the group.
        group: which ranks share a batch: ``PP``, or ``MP`` where the ranks of a stage get the same.

    Attributes:
        hands_over: whether all ranks have pp rank 0's batch by now, whatever they bring.
    """

    def __init__(self, world: World, group: str) -> None:
        self._world = world
        self._group = group
        self._ranks = world.group(group)
        self._rank = world.group_rank(group)
        self._collectives = world.collectives(group)
        self._digests: dict[tuple[object, ...], int] = {}
        self.hands_over = False  # as soon as a rank has had a dummy

    def settle(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the step runs with. Collective over the pp group.

        Args:
            arguments: of the step function, by name, for the whole batch.

        Raises:
            SMPMismatch: tensors are at other places on another rank, pp rank 0 has the empty batch, or one of
                the same shape has other numbers.
            SMPTimeout: a rank did not come.
        """
        shown = {name: _shown(value) for name, value in arguments.items()}
        leaves: list[Any] = []
        spec = flatten(shown, leaves)
        paths = list(_paths(spec))
        places = [i for i, leaf in enumerate(leaves) if _is_of_the_batch(leaf)]
        places.sort(key=paths.__getitem__)  # keywords and keys may come in another order
        mine = tuple((paths[i], leaves[i].dtype, tuple(leaves[i].shape)) for i in places)
        contents = [digest_of(leaves[i]) for i in places]
        patterns = tuple(overlap.pattern for overlap in overlaps([leaves[i] for i in places]))
        looks, numbers = self._compare((mine, patterns), contents)
        if not self.hands_over and looks:
            if not numbers:
                raise self._other_numbers(mine, contents)
            return arguments
        self.hands_over = True
        self._check(self._world.exchange([*mine], self._group, _WHAT))
        for place, data in zip(places, self._from_owner([leaves[i] for i in places]), strict=True):
            leaves[place] = data
        settled: dict[str, Any] = rebuild(spec, iter(leaves))
        return {name: _as(arguments[name], value) for name, value in settled.items()}

    def _compare(self, look: tuple[object, ...], contents: list[int]) -> tuple[bool, bool]:
        """Whether all batches look alike, and whether they are."""
        digest = self._digests.get(look)
        if digest is None:
            text = repr(look).encode()
            digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
            self._digests[look] = digest
        row = torch.tensor([digest, zlib.crc32(repr(contents).encode())], dtype=torch.int64, device=CPU)
        rows = torch.empty(len(self._ranks), 2, dtype=torch.int64, device=CPU)
        self._wait(self._collectives.all_gather(row, rows).done)
        found = rows.tolist()
        looks, numbers = (all(other[i] == found[0][i] for other in found) for i in range(2))
        return looks, numbers

    def _other_numbers(self, mine: tuple[_Leaf, ...], contents: list[int]) -> SMPMismatch:
        found = self._world.exchange(contents, self._group, _WHAT)
        member, place = next(
            (member, place)
            for member, theirs in enumerate(found)
            for place, number in enumerate(theirs)
            if number != found[0][place]
        )
        path, dtype, shape = mine[place]
        return SMPMismatch(
            f"the batch of a step differs: {path}, {_words(dtype, shape)}, has other numbers on rank "
            f"{self._ranks[member]} than on rank {self._ranks[0]}, which must see the same batch: seed and "
            f"shard data by {self._world.data_rank(self._ranks)}, never by smp.rank()"
        )

    def _check(self, theirs: list[list[_Leaf]]) -> None:
        """The owner's batch must fit into every rank's arguments, and be one."""
        owners = theirs[0]
        for member, leaves in enumerate(theirs):
            rank, owner = self._ranks[member], self._ranks[0]
            here, there = ([path for path, _, _ in found] for found in (leaves, owners))
            if here != there:
                differs = sorted(set(here) ^ set(there)) or here
                has = rank if differs[0] in here else owner
                raise SMPMismatch(
                    f"the batch of a step is pp rank 0's, and rank {rank} has no place for it: the tensor "
                    f"{differs[0]} is among the arguments on rank {has} only. A rank that loads no data must "
                    "pass arguments of the same nesting, with tensors of any shape where the data would be"
                )
            for (path, _, shape), (_, dtype, owners_shape) in zip(leaves, owners, strict=True):
                if 0 in owners_shape and 0 not in shape:
                    raise SMPMismatch(
                        f"the batch of a step is pp rank 0's, and that of rank {owner} is empty: {path} is "
                        f"{_words(dtype, owners_shape)} there and has shape {list(shape)} on rank {rank}. "
                        "Load the data where smp.pp_rank() is 0"
                    )

    def _from_owner(self, mine: list[torch.Tensor]) -> list[torch.Tensor]:
        is_owner = self._rank == 0
        about = None
        if is_owner:
            shared = overlaps(mine)
            about = [_About.of(tensor) for tensor in mine], shared, taken_states()
        described, shared, states = self._world.exchange(about, self._group, _WHAT)[0]
        if not is_owner:
            put_back_states(states)
        together = {member for overlap in shared for member in overlap.members}
        for number, each in enumerate(described):
            if problem := each.problem(shares=number in together):
                raise SMPError(
                    f"pp rank 0 has {problem} in its batch, and other ranks have dummies: it cannot be "
                    "handed over. Load the batch on every rank"
                )
        settled = list(mine)
        for overlap in shared:
            if is_owner:
                self._broadcast(memory_of(overlap, mine))
            else:
                memory, tensors = tensors_in(overlap)
                self._broadcast(memory)
                for number, tensor in tensors.items():
                    settled[number] = tensor.requires_grad_(described[number].meta.requires_grad)
        for number, (each, tensor) in enumerate(zip(described, mine, strict=True)):
            if number not in together:
                here = departure(tensor, each.meta) if is_owner else arrival(each.meta)
                if each.meta.num_bytes:
                    self._broadcast(as_bytes(here))
                if not is_owner or here.stride() != tensor.stride():  # a slice arrives without its gaps
                    settled[number] = here.requires_grad_(each.meta.requires_grad)
        return settled

    def _broadcast(self, row: torch.Tensor) -> None:
        self._wait(self._collectives.broadcast(row, 0).done)

    def _wait(self, done: Callable[[], bool]) -> None:
        others = [rank for rank in self._ranks if rank != self._world.rank]
        wait_until(
            done,
            lambda: f"not all ranks of the {self._group.lower()} group {list(self._ranks)} came to {_WHAT}",
            lambda: others,
        )


@dataclass(frozen=True)
class _About:
    """What other ranks must know of a tensor of the owner's."""

    meta: TensorMeta
    layout: torch.layout
    is_lazy: bool  # to be conjugated or negated when it is read

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _About:
        return cls(TensorMeta.of(tensor), tensor.layout, tensor.is_conj() or tensor.is_neg())

    def problem(self, *, shares: bool) -> str:
        """What it is that cannot be handed over; "" for what can.

        Args:
            shares: it shares memory with another tensor.
        """
        if self.layout is not torch.strided:
            return f"a tensor of layout {self.layout} on {self.meta.device}"
        return "the conjugate of another tensor" if shares and self.is_lazy else ""


def _shown(value: Any) -> Any:
    """An argument with dictionaries in the place of other mappings, which step functions cut as well."""
    if isinstance(value, Mapping) and (type(value) is dict or not isinstance(value, dict)):
        return {key: _shown(item) for key, item in value.items()}
    return type(value)(map(_shown, value)) if type(value) in (list, tuple) else value


def _as(argument: Any, value: Any) -> Any:
    """What :func:`_shown` has made of an argument, with other tensors in it, as that argument is."""
    if isinstance(argument, Mapping) and (type(argument) is dict or not isinstance(argument, dict)):
        return like(argument, {key: _as(item, value[key]) for key, item in argument.items()})
    if type(argument) in (list, tuple):
        return type(argument)(map(_as, argument, value))
    return value


def _is_of_the_batch(leaf: Any) -> bool:
    """Whether it is data; parameters and results of earlier steps are the library's own."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter | PlacedTensor)


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _paths(spec: Any, before: str = "") -> Iterator[str]:
    """How a user would write the place of each leaf, in the leaves' order."""
    if spec is None:
        yield before
        return
    kind = spec[0]
    names: Any = None
    if kind == "dict":
        names, parts = spec[1], spec[2:]
    elif kind in ("mapping", "dataclass"):
        names, parts = spec[2], spec[3:]
    elif kind == "pytree":
        parts = spec[3:]
    else:
        parts = spec[2:] if kind in ("namedtuple", "tuple subclass", "list subclass") else spec[1:]
    for i, part in enumerate(parts):
        if names is None:
            yield from _paths(part, f"{before}[{i}]")
        elif not before:
            yield from _paths(part, str(names[i]))  # an argument's name
        else:
            where = f".{names[i]}" if kind == "dataclass" else f"[{names[i]!r}]"
            yield from _paths(part, before + where)
