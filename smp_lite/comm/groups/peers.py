"""The ranks of one mp group, as the runtime sees them: who plays which stage.

:class:`OneProcess` plays all stages by turns in one process, which is how the library is tested and
debugged. :class:`RankPeers` plays one, or one rank's part of one. Both drive the executors' generators, make
values of one stage known to all, and compare what the ranks recorded.

Where a stage has several ranks, values go between ranks of equal coordinates within it (the pp group). What
the ranks recorded, and how their actions went, is compared over all ranks that hold one replica: the mp
group, or more where parameters are sharded over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...devices import CPU, is_host
from ...errors import PeerFailed, SMPError, SMPMismatch
from ...record.state.random_state import put_back_states
from ...record.values.placed import TensorMeta
from ..layout import arrival, as_bytes, departure
from ..unawaited import keep, let_go_of_ended
from ..waiting import wait_until
from .world import World

PACK_BELOW_BYTES = 1 << 16
NUM_CHECKS = 6
"""How many checks ranks compare at a time: always as many, so that they meet wherever each of them is."""

_ONE_BATCH = (
    "All ranks of an mp group must see the same batch and take the same branches: seed and shard data "
    "by {}, never by smp.rank()"
)
_ONE_SHAPE = (
    "Ranks over which parameters are sharded bring them together for each block, so all must run the same "
    "modules on batches of the same sizes: take the same branches, and drop an incomplete last batch "
    "(drop_last=True)"
)
_OF_LOSSES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64))
_MASK = (1 << 62) - 1
_FAILED = -1


class Peers(Protocol):
    """What the step runner needs of the mp group."""

    stages: frozenset[int]
    """Stages that this process plays."""
    rank: int
    """World rank of this process; -1 where it plays all stages."""
    are_alone: bool
    """Whether there is nobody to compare with."""

    def drive(self, generators: Mapping[int, Iterator[str]]) -> None:
        """Runs the generators of this process's stages to their ends."""

    def advance(self, generators: Mapping[int, Iterator[str]]) -> set[str]:
        """Runs the generators as far as they come without waiting; returns what they wait for."""

    def share(self, items: Sequence[tuple[int, TensorMeta, torch.Tensor | None]]) -> list[torch.Tensor]:
        """For each (owner stage, metadata, tensor on the owner): the tensor's data, on every rank."""

    def share_object(self, payload: Any, stage: int, what: str) -> Any:
        """The owner's object on every rank."""

    def compare(self, checks: Sequence[Check], *, ahead: bool = False) -> bool:
        """Compares what ranks have recorded.

        Args:
            checks: as many as in every other call.
            ahead: this rank has recorded one microbatch and could run ahead of recording the others.

        Returns:
            Whether all ranks have said the same of ``ahead``. If not, nothing else was compared: those that
            could run ahead do not, and all meet again.

        Raises:
            SMPMismatch: the ranks do not agree on a check.
            PeerFailed: a rank has failed instead of coming; random streams are where it has left them.
        """

    def fail(self, text: str) -> None:
        """This rank will not come to the next :meth:`compare`: tells the others, and does not wait.

        Those that get the same batch have its random streams from then on.
        """

    def outcomes(
        self, mine: Any, what: str, keeps: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[Any], frozenset[tuple[int, int]]]:
        """What ranks say of a list of actions that has run.

        Args:
            mine: what this rank says; None: nothing.
            what: names it for those who wait.
            keeps: (microbatch, value) of what this rank's script keeps.

        Returns:
            What ranks have said, and what is kept on all of them.
        """


@dataclass(frozen=True)
class Check:
    """Something that must be the same on all mp ranks.

    Args:
        what: names it in the error.
        digest: a number of up to 62 bits.
        lines: describes it line by line, to find the first difference.
        of_batch: it must be the same only on the ranks that get the same batch.
        advice: what to do about it; "": that which goes for what has been recorded.
    """

    what: str
    digest: int
    lines: Callable[[], list[str]]
    of_batch: bool = False
    advice: str = ""


class PeerOutOfMemory(PeerFailed, torch.OutOfMemoryError):
    """The error of the rank that has failed, so that scripts can leave out its batch on all ranks."""


def peer_failed(text: str, its_error: str) -> PeerFailed:
    """Another rank has failed.

    Args:
        text: of the error.
        its_error: that rank's own, with its type in front.
    """
    kind = PeerOutOfMemory if its_error.startswith(torch.OutOfMemoryError.__name__) else PeerFailed
    return kind(text)


class OneProcess:
    """All stages in this process."""

    rank = -1
    are_alone = True

    def __init__(self, num_stages: int) -> None:
        self.stages = frozenset(range(num_stages))

    def drive(self, generators: Mapping[int, Iterator[str]]) -> None:
        if stuck := self.advance(generators):
            raise SMPError(f"all stages wait: {'; '.join(sorted(stuck))}")

    def advance(self, generators: Mapping[int, Iterator[str]]) -> set[str]:
        waiting = dict(generators)
        before: list[str] = []
        while waiting:
            reasons = []
            for stage, generator in list(waiting.items()):
                try:
                    reasons.append(next(generator))
                except StopIteration:
                    del waiting[stage]
            if reasons and reasons == before:
                return set(reasons)
            before = reasons
        return set()

    def share(self, items: Sequence[tuple[int, TensorMeta, torch.Tensor | None]]) -> list[torch.Tensor]:
        found = []
        for _, _, tensor in items:
            assert tensor is not None
            found.append(tensor.detach())
        return found

    def share_object(self, payload: Any, stage: int, what: str) -> Any:
        return payload

    def compare(self, checks: Sequence[Check], *, ahead: bool = False) -> bool:
        return True

    def fail(self, text: str) -> None:
        pass

    def outcomes(
        self, mine: Any, what: str, keeps: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[Any], frozenset[tuple[int, int]]]:
        return [mine] if mine is not None else [], frozenset(keeps)


class RankPeers:
    """One stage in this process, or a part of it; the others in other ranks of the mp group.

    Args:
        world: the job.
        stage_of_rank: for each member of the pp group, in group order, its stage.
        replica: the kind of group of the ranks that hold one replica of the model.
        with_one_batch: of these, the sets that get the same batch, as world ranks.
    """

    def __init__(
        self,
        world: World,
        stage_of_rank: Sequence[int],
        replica: str,
        with_one_batch: Sequence[tuple[int, ...]],
    ) -> None:
        self.world = world
        self.rank = world.rank
        self._replica = replica
        self.ranks = world.group(replica)
        self.stages = frozenset({stage_of_rank[world.group_rank("PP")]})
        self._rank_of_stage = {stage: i for i, stage in enumerate(stage_of_rank)}
        self.are_alone = len(self.ranks) == 1
        self._others = [rank for rank in self.ranks if rank != world.rank]
        self._with_one_batch = [[self.ranks.index(rank) for rank in ranks] for ranks in with_one_batch]
        self._collectives = world.collectives(replica)
        shares_stages = len(self.ranks) > len(world.group("PP"))
        self._between_stages = world.collectives("PP") if shares_stages else self._collectives
        self._num_failures = 0

    def drive(self, generators: Mapping[int, Iterator[str]]) -> None:
        for generator in generators.values():
            reason = next(generator, None)
            while reason is not None:
                stuck = reason

                def moved(generator: Iterator[str] = generator, stuck: str = stuck) -> bool:
                    nonlocal reason
                    reason = next(generator, None)
                    return reason != stuck

                self._wait(moved, stuck)

    def advance(self, generators: Mapping[int, Iterator[str]]) -> set[str]:
        waits: set[str] = set()
        for generator in generators.values():
            reason: str | None = None
            while True:
                before, reason = reason, self._next(generator)
                if reason is None:
                    break
                if reason == before:
                    waits.add(reason)
                    break
        return waits

    def _next(self, generator: Iterator[str]) -> str | None:
        """One look at what the generator waits for, if anything."""
        found: str | None = None

        def look() -> bool:
            nonlocal found
            found = next(generator, None)
            return True

        self._wait(look, "a step runs while it is recorded")  # names broken connections
        return found

    def _wait(self, test: Callable[[], bool], reason: str) -> None:
        wait_until(
            test,
            lambda: f"rank {self.world.rank}: {reason} (mp group {list(self.ranks)})",
            lambda: self._others,
        )

    def share(self, items: Sequence[tuple[int, TensorMeta, torch.Tensor | None]]) -> list[torch.Tensor]:
        results: list[torch.Tensor | None] = [None] * len(items)
        small: dict[tuple[int, bool], list[int]] = {}  # what devices have goes from one to the other
        for i, (stage, meta, tensor) in enumerate(items):
            if meta.num_bytes < PACK_BELOW_BYTES:
                small.setdefault((stage, is_host(meta.device)), []).append(i)
            else:
                here = departure(tensor, meta) if tensor is not None else arrival(meta)
                self._broadcast(as_bytes(here), stage)
                results[i] = here
        for (stage, _), indices in sorted(small.items()):
            self._share_packed(stage, indices, items, results)
        return [result for result in results if result is not None]

    def _share_packed(
        self,
        stage: int,
        indices: list[int],
        items: Sequence[tuple[int, TensorMeta, torch.Tensor | None]],
        results: list[torch.Tensor | None],
    ) -> None:
        """Small tensors of one stage travel in one message, each at a multiple of 16 bytes."""
        mine = stage in self.stages
        first = items[indices[0]][1]
        if not first.shape and first.dtype in _OF_LOSSES and all(items[i][1] == first for i in indices):
            self._share_numbers(stage, indices, items, results)
            return
        offsets, total = [], 0
        for i in indices:
            offsets.append(total)
            total += -(-items[i][1].num_bytes // 16) * 16
        pack = torch.empty(total, dtype=torch.uint8, device=first.device)
        for i, offset in zip(indices, offsets, strict=True):
            _, meta, tensor = items[i]
            slot = pack[offset : offset + meta.num_bytes].view(meta.dtype).view(meta.shape)
            if mine:
                assert tensor is not None
                slot.copy_(tensor.detach())
            results[i] = slot
        if total:
            self._broadcast(pack, stage)
        for i in indices:
            # Its own memory: a kept loss must not keep the whole message.
            kept = results[i]
            assert kept is not None
            results[i] = arrival(items[i][1]).copy_(kept)

    def _share_numbers(
        self,
        stage: int,
        indices: list[int],
        items: Sequence[tuple[int, TensorMeta, torch.Tensor | None]],
        results: list[torch.Tensor | None],
    ) -> None:
        """Numbers of one kind (the losses of all microbatches), side by side in one message."""
        meta = items[indices[0]][1]
        if stage in self.stages:
            own = [items[i][2] for i in indices]
            with torch.no_grad():
                row = torch.stack([tensor for tensor in own if tensor is not None])
        else:
            row = torch.empty(len(indices), dtype=meta.dtype, device=meta.device)
        self._broadcast(row.view(torch.uint8), stage)
        for i, number in zip(indices, row.unbind(), strict=True):
            results[i] = number.clone()  # its own memory

    def _broadcast(self, data: torch.Tensor, stage: int) -> None:
        pending = self._between_stages.broadcast(data, self._rank_of_stage[stage])
        self._wait(pending.done, f"a result of stage {stage} did not reach all its peers")

    def share_object(self, payload: Any, stage: int, what: str) -> Any:
        found = self.world.exchange(payload if stage in self.stages else None, "PP", what)
        return found[self._rank_of_stage[stage]]

    def compare(self, checks: Sequence[Check], *, ahead: bool = False) -> bool:
        row = [*[check.digest & _MASK for check in checks], int(ahead)]
        theirs = self._gather(row, "the end of recording a step").tolist()
        failed = {rank: row[1] for rank, row in zip(self.ranks, theirs, strict=True) if row[0] == _FAILED}
        if failed:
            heard = {rank: self.world.receive_failure(rank, number) for rank, number in failed.items()}
            self._go_on_alike({rank: streams for rank, (_, streams) in heard.items()})
            first, (text, _) = next(iter(heard.items()))
            raise peer_failed(
                f"rank {first} failed while it recorded a step, so the step cannot run: {text}. "
                "The next step can, if that rank goes on",
                text,
            )
        *columns, are_ahead = zip(*theirs, strict=True)
        if len(set(are_ahead)) > 1:
            return False
        for check, column in zip(checks, columns, strict=True):
            sets = self._with_one_batch if check.of_batch else [list(range(len(self.ranks)))]
            for members in sets:
                if any(column[i] != column[members[0]] for i in members):
                    lines = self.world.exchange(check.lines(), self._replica, f"comparing {check.what}")
                    ranks = [self.ranks[i] for i in members]
                    is_batch = check.of_batch or self._replica == "MP"
                    advice = _ONE_BATCH.format(self.world.data_rank(ranks)) if is_batch else _ONE_SHAPE
                    advice = check.advice or advice
                    found = _first_difference(check.what, [lines[i] for i in members], ranks)
                    raise SMPMismatch(f"{found}. {advice}")
        return True

    def _go_on_alike(self, streams: Mapping[int, Any]) -> None:
        """What is drawn next is what the rank that has failed draws, as in one process: others have recorded
        other parts of the step by then. ``streams`` are of those that have failed."""
        for members in self._with_one_batch:
            ranks = [self.ranks[i] for i in members]
            found = [streams[rank] for rank in ranks if rank in streams]
            if self.rank in ranks and found:
                put_back_states(found[0])

    def fail(self, text: str) -> None:
        self._num_failures += 1
        mine = torch.full((NUM_CHECKS + 1,), _FAILED, dtype=torch.int64, device=CPU)
        mine[1] = self._num_failures
        theirs = torch.empty(len(self.ranks), len(mine), dtype=torch.int64, device=CPU)
        keep(self._collectives.all_gather(mine, theirs), (mine, theirs))
        for posted in self.world.post_failure(self._num_failures, text, self._others):
            keep(posted, text)

    def outcomes(
        self, mine: Any, what: str, keeps: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[Any], frozenset[tuple[int, int]]]:
        found = self._gather([int(mine is not None), hash(tuple(keeps)) & _MASK], what).tolist()
        all_keep_the_same = all(row[1] == found[0][1] for row in found)
        if all_keep_the_same and not any(row[0] for row in found):
            return [], frozenset(keeps)
        told = self.world.exchange((mine, None if all_keep_the_same else keeps), self._replica, what)
        kept = [frozenset(theirs if theirs is not None else keeps) for _, theirs in told]
        return [each for each, _ in told if each is not None], frozenset.intersection(*kept)

    def _gather(self, numbers: list[int], what: str) -> torch.Tensor:
        """Each rank's numbers as a row."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=CPU)
        theirs = torch.empty(len(self.ranks), len(mine), dtype=torch.int64, device=CPU)
        pending = self._collectives.all_gather(mine, theirs)
        try:
            self._wait(pending.done, f"not all mp ranks came to {what}")
        except BaseException:
            keep(pending, (mine, theirs))  # they may come yet
            raise
        let_go_of_ended()
        return theirs


def _first_difference(what: str, lines: list[list[str]], ranks: Sequence[int]) -> str:
    """Names the first line in which two ranks differ."""
    for number in range(max(map(len, lines))):
        row = [found[number] if number < len(found) else "nothing" for found in lines]
        for member, text in enumerate(row):
            if text != row[0]:
                return f"{what} differs: rank {ranks[member]} {text}, rank {ranks[0]} {row[0]}"
    return f"{what} differs between ranks {list(ranks)}"
