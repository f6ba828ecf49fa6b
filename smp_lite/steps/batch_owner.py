"""Whose batch a step is: pp rank 0's.

AWS's data pipelines load data on pp rank 0 alone; the other ranks go through a data set of the same length
whose items are empty tensors. So where the batch of another rank has other shapes or types, the step takes
that of pp rank 0, for recording as for the values: tensors are matched by their places in the arguments, and
everything else stays the rank's own. Batches that look alike are left alone: that their numbers are the same
too is checked later, since two ranks with different data of one shape are a mistake, and not a convention.

To find out costs one small message a step. It cannot be left to the steps before: what a rank sees of its
own batch says nothing of the others'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..comm.layout import arrival, as_bytes, departure
from ..comm.waiting import wait_until
from ..comm.world import World
from ..errors import SMPError, SMPMismatch
from ..record.values.placed import PlacedTensor, TensorMeta
from ..record.values.structure import flatten, rebuild

__all__ = ["BatchOwner"]

_WHAT = "the batch of a step"
_GROUP = "PP"
_Leaf = tuple[str, torch.dtype, tuple[int, ...]]


class BatchOwner:
    """Brings pp rank 0's batch to the ranks of a pp group that have another one.

    Args:
        world: the ranks. Making one is collective over the pp group.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks = world.group(_GROUP)
        self._rank = world.group_rank(_GROUP)
        self._collectives = world.collectives(_GROUP)
        self._digests: dict[tuple[_Leaf, ...], int] = {}

    def settle(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the step runs with. Collective over the pp group.

        Args:
            arguments: of the step function, by name, for the whole batch.

        Raises:
            SMPMismatch: tensors are at other places on another rank, or pp rank 0 has the empty batch.
            SMPTimeout: a rank did not come.
        """
        leaves: list[Any] = []
        spec = flatten(arguments, leaves)
        places = [i for i, leaf in enumerate(leaves) if _is_of_the_batch(leaf)]
        paths = list(_paths(spec))
        mine = tuple((paths[i], leaves[i].dtype, tuple(leaves[i].shape)) for i in places)
        if self._are_alike(mine):
            return arguments
        theirs = self._world.exchange([*mine], _GROUP, _WHAT)
        self._check(theirs)
        for place, data in zip(places, self._from_owner([leaves[i] for i in places]), strict=True):
            leaves[place] = data
        settled: dict[str, Any] = rebuild(spec, iter(leaves))
        return settled

    def _are_alike(self, mine: tuple[_Leaf, ...]) -> bool:
        digest = self._digests.get(mine)
        if digest is None:
            text = repr(mine).encode()
            digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
            self._digests[mine] = digest
        row = torch.tensor([digest], dtype=torch.int64)
        rows = torch.empty(len(self._ranks), 1, dtype=torch.int64)
        self._wait(self._collectives.all_gather(row, rows).done)
        return bool((rows == digest).all())

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

    def _from_owner(self, mine: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        is_owner = self._rank == 0
        about = [(TensorMeta.of(tensor), tensor.layout) for tensor in mine] if is_owner else None
        metas = self._world.exchange(about, _GROUP, _WHAT)[0]
        for (meta, layout), tensor in zip(metas, mine, strict=True):
            if layout is not torch.strided or meta.device.type != "cpu":
                raise SMPError(
                    f"pp rank 0 has a tensor of layout {layout} on {meta.device} in its batch, and other "
                    "ranks one of another shape: only dense CPU tensors are handed over. Load the batch on "
                    "every rank"
                )
            here = departure(tensor, meta) if is_owner else arrival(meta)
            if meta.num_bytes:
                self._wait(self._collectives.broadcast(as_bytes(here), 0).done)
            if is_owner or (tensor.dtype == meta.dtype and tuple(tensor.shape) == meta.shape):
                yield tensor  # its own: that its numbers are the owner's is checked like everywhere else
            else:
                yield here.requires_grad_(meta.requires_grad)

    def _wait(self, done: Callable[[], bool]) -> None:
        others = [rank for rank in self._ranks if rank != self._world.rank]
        wait_until(
            done,
            lambda: f"not all ranks of the pp group {list(self._ranks)} came to {_WHAT}",
            lambda: others,
        )


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
