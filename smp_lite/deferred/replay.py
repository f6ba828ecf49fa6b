"""Makes memory: runs the operations that lead to it, in the order in which they were noted.

Only those run whose effect is read (a backward slice; a write that covers a memory ends it). What they made
on the way is freed after its last use, so beside what is asked for there is about one tensor at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from .log import Constant, Memory, Place, Write

__all__ = ["make", "plainly", "value_of"]

_Storages = dict[Memory, torch.UntypedStorage]


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Within: operations run, and no mode hears of them."""
    # Leaving inference mode turns gradients on, so that comes first.
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
        yield


_known: dict[Memory, tuple[int, torch.UntypedStorage]] = {}
"""What was made when a constructor last looked at numbers, as it was behind the write of that number. A loop
that looks again (``trunc_normal_`` draws until all are within) goes on from there."""


def forget_known() -> None:
    """The constructor has ended."""
    _known.clear()


def value_of(place: Place, *, looked_at: bool = False) -> torch.Tensor:
    """The elements of one tensor; unless they are only looked at, in memory that nobody else has."""
    (storage,) = make([place.memory], goes_on=looked_at)
    with plainly():
        return place.tensor(storage)


def make(memories: Sequence[Memory], *, goes_on: bool = False) -> list[torch.UntypedStorage]:
    """The storages of these memories, with what has been written to them until now.

    Args:
        memories: which.
        goes_on: what tensors refer to on the way is kept until it is looked at again.
    """
    wanted = list(dict.fromkeys(memories))
    writes = _needed(wanted, _known) if goes_on else None
    found: _Storages = {}
    numbers: dict[Memory, int] = {}
    if writes is not None:
        found = {memory: storage for memory, (_, storage) in _known.items()}
        numbers = {memory: number for memory, (number, _) in _known.items()}
    else:
        writes = _needed(wanted, {})
        assert writes is not None
    if goes_on:
        _known.clear()
    last_use = {memory: write.number for write in writes for memory in _touched(write)}
    before = torch.get_default_dtype()
    with plainly():
        try:
            for write in writes:
                torch.set_default_dtype(write.dtype)
                _run(write, found)
                numbers |= dict.fromkeys(_changed(write), write.number)
                for memory in _touched(write):
                    done = last_use[memory] == write.number and memory not in wanted
                    if done and not (goes_on and memory.is_held):
                        found.pop(memory, None)
        finally:
            torch.set_default_dtype(before)
    result = [found[memory] for memory in memories]
    if goes_on:
        of_now = last_use.keys() | set(wanted)  # what was known of others would add up, module by module
        _known.update({m: (numbers[m], s) for m, s in found.items() if m.is_held and m in of_now})
    return result


def is_written(memory: Memory) -> bool:
    """Whether anything but garbage is in it."""
    first = memory.writes[0]
    made_empty = str(first.function).startswith(("aten.empty", "aten.new_empty"))
    return memory.num_bytes == 0 or not made_empty or len(memory.writes) > 1


def _needed(wanted: Iterable[Memory], known: Mapping[Memory, tuple[int, Any]]) -> list[Write] | None:
    """The writes that lead there from what is known; None: what is known is too late for some of them."""
    found: dict[int, Write] = {}
    pending: list[tuple[Memory, float]] = [(memory, float("inf")) for memory in wanted]
    seen: set[tuple[int, float]] = set()
    while pending:
        memory, before = pending.pop()
        if (id(memory), before) in seen:
            continue
        seen.add((id(memory), before))
        base = known[memory][0] if memory in known else -1
        if base >= before:
            return None
        for write in reversed(memory.writes):
            if write.number <= base:
                break
            if write.number >= before:
                continue
            if write.number not in found:
                found[write.number] = write
                # What it reads, its own targets too where it does not cover them.
                pending += [
                    (place.memory, write.number)
                    for place, writes in write.places
                    if not (writes and write.fills(place.memory))
                ]
            if write.fills(memory):
                break
    return [found[number] for number in sorted(found)]


def _changed(write: Write) -> list[Memory]:
    return [place.memory for place, writes in write.places if writes] + [
        place.memory for _, place in write.made
    ]


def _touched(write: Write) -> list[Memory]:
    return [place.memory for place, _ in write.places] + [place.memory for _, place in write.made]


def _run(write: Write, found: _Storages) -> None:
    for place, _ in write.places:
        if place.memory not in found:  # what was there before is covered by this write
            found[place.memory] = torch.UntypedStorage(place.memory.num_bytes)

    def real(each: Any) -> Any:
        return each.tensor(found[each.memory]) if isinstance(each, Place) else each.value()

    args, kwargs = tree_map_only((Place, Constant), real, (write.args, write.kwargs))
    with _drawing(write) as generator:
        if generator is not None:
            kwargs["generator"] = generator
        result = write.function(*args, **kwargs)
    leaves = tree_flatten(result)[0]
    for number, place in write.made:
        found[place.memory] = _storage_of(leaves[number], place)


def _storage_of(tensor: torch.Tensor, place: Place) -> torch.UntypedStorage:
    storage = tensor.untyped_storage()
    lies_so = (
        tensor.dtype == place.dtype
        and tuple(tensor.stride()) == place.stride
        and tensor.storage_offset() == place.offset
        and storage.nbytes() == place.memory.num_bytes
        and (tensor.is_conj(), tensor.is_neg()) == (place.is_conj, place.is_neg)
    )
    if not lies_so:  # a kernel lays its result out in another way than its description
        storage = torch.UntypedStorage(place.memory.num_bytes)
        place.tensor(storage).copy_(tensor)
    return storage


@contextlib.contextmanager
def _drawing(write: Write) -> Iterator[torch.Generator | None]:
    if write.state is None:
        yield None
    elif write.generator is not None:
        own = torch.Generator()
        own.set_state(write.state.clone())
        yield own
    else:
        now = torch.get_rng_state()
        torch.set_rng_state(write.state.clone())
        try:
            yield None
        finally:
            torch.set_rng_state(now)
