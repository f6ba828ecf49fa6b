"""Activation offloading: what checkpointed calls keep leaves memory between forward and backward.

From SMP's documentation ("Activation offloading"; parameters ``offload_activations`` and
``activation_loading_horizon``). A checkpointed call keeps its inputs. When the forward action ends in which
it ran they are written to a store (:mod:`.store`), and they come back some actions before the
backward that needs them; the list of actions is known, so there is nothing to guess. What would be back at
once stays.

Memory is given back by letting go of it. Nothing is written that somebody else holds, since it would stay in
memory all the same: a value that is to be sent, a residual, a tensor of the script's. torch counts the
tensors on a piece of memory, and it leaves when there are none but ours. One more is allowed, the leaf at
which a segment's backward ends: its numbers are never read, so its storage is emptied, and what the commands
are given is a view of it, which counts if anybody keeps that.

Reading and writing overlap with the next action; a forward waits for what was written before its predecessor,
so two actions' inputs at most are in memory beyond those within the horizon. On a device it is the stream
that computes that waits, and the host runs ahead.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ...comm.waiting import watchdog_s
from ...devices import home, is_host
from ...errors import SMPError
from ...plan.step.actions import Action, ActionKind
from ...record.describe.recomputed import kept_by
from .file_store import FileStore
from .kept_input import KeptInput, can_leave
from .pinned_store import PinnedStore
from .store import Store

__all__ = ["COUNTED_KINDS", "ActivationOffload", "longest_wait"]

COUNTED_KINDS = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD})
"""What the horizon counts: SMP's pipeline tasks. A ``W`` is a part of a backward that comes later (and has
nothing to do here: offloaded calls stay whole), so one horizon means the same in all pipelines."""

_NEVER = 1 << 60


def longest_wait(schedule: Iterable[Sequence[Action]]) -> float:
    """How many actions of a stage at most, its own included, a forward is before its backward.

    Infinite where they are in different lists: such inputs leave, whatever the horizon.
    """
    longest = 0.0
    for actions in schedule:
        compute = [action for action in actions if action.kind in COUNTED_KINDS]
        forward_at: dict[tuple[int, int], int] = {}
        for at, action in enumerate(compute):
            key = (action.microbatch_index, action.visit)
            if action.kind is ActionKind.FORWARD:
                forward_at[key] = at
            else:
                longest = max(longest, at - forward_at.get(key, -math.inf))
    return longest


class ActivationOffload:
    """What the checkpointed calls of one stage keep.

    Args:
        horizon: how many actions before its backward an input comes back.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.bytes_left = 0
        """Bytes that have left memory, over all steps."""
        self._store: Store | None = None
        self._of: dict[tuple[int, int], list[weakref.ref[KeptInput]]] = {}  # by microbatch and visit
        self._new: list[KeptInput] = []
        self._waiting: list[tuple[weakref.ref[KeptInput], list[torch.Tensor]]] = []  # held by others so far
        self._leaving: list[tuple[int, weakref.ref[KeptInput], torch.Tensor | None]] = []
        self._backward_at: dict[tuple[int, int], int] = {}
        self._backwards: list[tuple[int, int] | None] = []
        self._position = 0
        self._looks = 0

    def store(self) -> Store:
        """Made when it is needed first.

        Raises:
            SMPError: it cannot be.
        """
        if self._store is None:
            self._store = FileStore() if is_host(home()) else PinnedStore()
            weakref.finalize(self, self._store.close)
        return self._store

    # What recomputed() calls: a keeper ----------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> KeptInput | torch.Tensor:
        """Takes over an input of a checkpointed call."""
        if not can_leave(tensor):
            return tensor
        kept = next((found for found in self._new if found.is_of(tensor)), None)
        if kept is None:
            kept = KeptInput(tensor, self.store)
            self._new.append(kept)
        return kept

    @staticmethod
    def unpack(packed: KeptInput | torch.Tensor) -> torch.Tensor:
        """Gives it back."""
        return packed.get() if isinstance(packed, KeptInput) else packed

    # What the executor calls --------------------------------------------------------------------------------

    def begin(self, actions: Sequence[Action]) -> None:
        """A list of actions begins."""
        compute = [action for action in actions if action.kind in COUNTED_KINDS]
        self._backwards = [
            (action.microbatch_index, action.visit) if action.kind is ActionKind.BACKWARD else None
            for action in compute
        ]
        self._backward_at = {key: at for at, key in enumerate(self._backwards) if key is not None}
        self._position = 0

    def bring(self) -> Iterator[str]:
        """Yields what it waits for until the next action may run."""
        at = self._position
        for key in self._backwards[at : at + self.horizon + 1]:
            for kept in self._inputs(key):
                if kept.writing is None:
                    kept.come_back()
        yield from self._until(lambda: self._settled(at - 1), "written all activations that leave memory")
        key = self._backwards[at]
        for kept in self._inputs(key):
            kept.come_back()
        needed = self._inputs(key)
        yield from self._until(
            lambda: all(kept.is_here() for kept in needed),
            "read the activations that the next backward needs",
        )

    def leaf_for(self, leaf: torch.Tensor) -> torch.Tensor:
        """What the commands of a segment are given in place of its leaf."""
        return leaf[...] if leaf.requires_grad else leaf.detach()

    @contextlib.contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Within: a forward runs."""
        self._new.clear()
        with kept_by(self):
            yield
        key = (action.microbatch_index, action.visit)
        self._of[key] = [weakref.ref(kept) for kept in self._new]

    def leave(self, action: Action, leaves: Iterable[torch.Tensor]) -> None:
        """An action has ended; what its checkpointed calls keep may go.

        Args:
            action: that has ended.
            leaves: of the segment's backward, if it was a forward.
        """
        key = (action.microbatch_index, action.visit)
        if action.kind is ActionKind.FORWARD:
            back_at = self._backward_at.get(key, _NEVER)
            if back_at > self._position + self.horizon + 1:  # else it would be back at once
                self._waiting += [(weakref.ref(kept), list(leaves)) for kept in self._new]
            self._new.clear()
            self._send_away()
        else:
            self._of.pop(key, None)
            self._waiting = [(kept, leaves) for kept, leaves in self._waiting if kept() is not None]
        self._position += 1

    def end(self) -> None:
        """The list has ended, or is given up; what is in the store stays there."""
        self._new.clear()
        if self._store is not None:
            self._store.settle()

    def end_step(self) -> None:
        """The step has ended."""
        self.end()
        self._of.clear()
        self._waiting.clear()
        self._leaving.clear()

    def _inputs(self, key: tuple[int, int] | None) -> list[KeptInput]:
        found = [reference() for reference in self._of.get(key, ())] if key is not None else []
        return [kept for kept in found if kept is not None]

    def _send_away(self) -> None:
        """Begins to write what nobody else holds."""
        alive = [(kept, leaves) for kept_ref, leaves in self._waiting if (kept := kept_ref()) is not None]
        soon = {
            id(kept)
            for key in self._backwards[self._position + 1 : self._position + self.horizon + 2]
            for kept in self._inputs(key)
        }
        alive = [(kept, leaves) for kept, leaves in alive if id(kept) not in soon]
        ours: dict[int, int] = {}
        for references in self._of.values():
            for kept in (found for reference in references if (found := reference()) is not None):
                if kept.tensor is not None:
                    storage = kept.tensor.untyped_storage()._cdata
                    ours[storage] = ours.get(storage, 0) + 1
        candidates = {kept.tensor.untyped_storage()._cdata for kept, _ in alive if kept.tensor is not None}
        leaf_of = {
            storage: leaf
            for _, leaves in alive
            for leaf in leaves
            if (storage := _storage_of(leaf)) in candidates
        }
        still: list[tuple[weakref.ref[KeptInput], list[torch.Tensor]]] = []
        for kept, leaves in alive:
            if kept.tensor is None or kept.writing is not None:
                continue
            kept.check()
            storage = kept.tensor.untyped_storage()
            key = storage._cdata
            holders = torch._C._storage_Use_Count(key) - 1  # the storage object of this line is one
            leaf = leaf_of.get(key)
            del storage
            if holders > ours[key] + (leaf is not None):
                still.append((weakref.ref(kept), leaves))
                continue
            kept.leave()
            self._leaving.append((self._position, weakref.ref(kept), leaf))
        self._waiting = still

    def _settled(self, position: int) -> bool:
        """Whether all has left that was to leave before that action; lets go of what has left."""
        left = []
        late = False
        for at, reference, leaf in self._leaving:
            kept = reference()
            if kept is None:
                continue
            if kept.has_left(must=at < position):
                self.bytes_left += kept.num_bytes
                if leaf is not None:
                    storage = leaf.untyped_storage()
                    if torch._C._storage_Use_Count(storage._cdata) == 2:  # the leaf and this line's object
                        storage.resize_(0)
                    del storage
                continue
            left.append((at, reference, leaf))
            late |= at < position
        self._leaving = left
        return not late

    def _until(self, test: Callable[[], bool], what: str) -> Iterator[str]:
        """Yields until the store has done something.

        Raises:
            SMPError: it has failed, has ended, or takes longer than any wait may.
        """
        start = time.monotonic()
        while not test():
            waited = time.monotonic() - start
            reason = f"{self.store().name} has not {what}"
            if not self.store().is_working():
                raise SMPError(f"offload_activations: {reason}, and its thread has ended")
            if waited > watchdog_s():
                raise SMPError(f"offload_activations: waited {waited:.0f} s: {reason}")
            # Another text each time: whoever plays all stages takes the same ones for a deadlock. Two
            # waits in a row may be equally long.
            self._looks += 1
            yield f"{reason} for {waited:.6f} s (look {self._looks})"
            time.sleep(1e-4)


def _storage_of(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
