"""The processes of the job and their groups.

One :class:`World` for each process: the topology, and object messages between ranks. Collectives on Python
objects are *roll calls* (:mod:`..objects.roll_call`): each member hears that all others are calling the same.
So a rank that calls something else, or does not call at all, is named in the error instead of leaving the
others waiting.
"""

from __future__ import annotations

import atexit
import os
import pickle
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...devices import home, is_host
from ...errors import SMPError
from ...plan.topology import Topology
from ...record.state.random_state import taken_states
from ..collectives import C10dCollectives, Collectives, Pending
from ..objects.roll_call import RollCall
from ..objects.roll_calls import RollCalls
from ..on_device.collectives import ByPlace, StagedCollectives
from ..on_device.groups import DeviceGroups, carries
from ..on_device.mapped import MappedCollectives
from ..on_device.queued import QueuedCollectives
from ..on_device.sharing import sharing_on, why_not_between
from ..transports.gloo import destroy_process_groups
from ..transports.transport import Tag, Transport
from ..tree import nearby
from ..waiting import wait_until, watch_departures, watchdog_s

_SMALL_BYTES = 1 << 16
_MEET_FOR_S = 5.0
"""How long a rank whose script has ended keeps what others may still look at."""


class World:
    """The ranks of the job.

    What collectives cost: in a group of up to 8 each member sends to every other; in a larger one a member
    sends at most 15 messages, all together about two for each member (:mod:`smp_lite.comm.tree`). One rank
    still sends to all others by itself in ``smp.broadcast``, where its peers call ``recv_from`` and so must
    name the one they hear, and in :meth:`post_failure`, which may wait for nobody and happens once. What all
    say to all, as host names in ``smp.init``, is as long as the group is large at each member.

    Args:
        topology: axes over all ranks.
        transport: between them.
    """

    def __init__(self, topology: Topology, transport: Transport) -> None:
        self.topology = topology
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.local_rank, self.local_size = transport.local_rank, transport.local_size
        self.device_groups: DeviceGroups | None = None
        """Which ranks can have process groups for tensors of their devices; None: none can."""
        self.may_read_memory = True
        """Whether sums over ranks that share a device may go by what each reads in the others' memory."""
        self._read_memory: dict[str, bool] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self.calls = RollCalls(transport, self.group, ("WORLD", *dict(topology.kinds)))
        watchdog_s()  # what is wrong with the variable shows now, not in the first long wait
        watch_departures(transport.departed)
        self._process = os.getpid()
        atexit.register(self._leave)

    def close(self) -> None:
        """Forgets the other ranks, so that this process can build another world."""
        watch_departures(dict)
        atexit.unregister(self._leave)
        self.transport.close()

    def _leave(self) -> None:
        """Says to those that may wait for this rank that its script has ended."""
        if os.getpid() != self._process:
            return  # a child that the script has forked has the parent's handlers, and is not this rank
        if self.device_groups is not None and self.rank != 0:
            destroy_process_groups()  # threads of NCCL ask rank 0's store, and complain once it has gone
        told: set[int] = set()
        for kind in self.calls.kinds:
            group = self.group(kind)
            told.update(self.calls.neighbours(kind))
            told.update(group[i] for i in nearby(len(group), group.index(self.rank)))
        self.transport.leave(self.calls.last_words(), sorted(told))
        if self.device_groups is not None:
            self.transport.meet_at_end(_MEET_FOR_S)

    # Groups -------------------------------------------------------------------------------------------------

    def group(self, kind: str) -> tuple[int, ...]:
        """World ranks of this rank's group of that kind, ascending.

        Args:
            kind: of the topology's, or names of axes with ``+`` between: the ranks that differ on these;
                ``""``: this rank alone.
        """
        if kind not in self._groups:
            named = "WORLD" if kind == "WORLD" else dict(self.topology.kinds).get(kind)
            self._groups[kind] = (
                self.topology.along(filter(None, kind.split("+")), self.rank)
                if named is None
                else self.topology.group(kind, self.rank)
            )
        return self._groups[kind]

    def group_rank(self, kind: str) -> int:
        return self.group(kind).index(self.rank)

    def data_rank(self, ranks: Sequence[int]) -> str:
        """What a script splits its data by, where these ranks share a batch: dp ranks are those of tensor
        parallelism too, which SMP gives batches of their own, or one."""
        sharers = self.topology.along(self.topology.stage_axes, ranks[0])
        return "smp.rdp_rank()" if len({*sharers} & {*ranks}) > 1 else "smp.dp_rank()"

    def collectives(self, kind: str) -> Collectives:
        """Over this rank's group, for one user of them; collective over the group."""
        self._meet(kind)
        ranks, groups = self.group(kind), self.device_groups
        host = self.transport.collectives(ranks)
        if is_host(home()):
            return host
        if groups is None or not groups.can_join(ranks):
            return self._without_groups(host, kind)

        def make_group() -> Any:
            self._meet(kind)  # since the first tensor of a device may be late
            return groups.new_group(ranks)

        return ByPlace(host, QueuedCollectives(make_group, ranks))

    def collectives_over(self, group: Any, kind: str) -> Collectives:
        """The same over a process group of these ranks, which a script may have too."""
        if is_host(home()):
            return C10dCollectives(group)
        if not carries(group, home()):
            return self._without_groups(C10dCollectives(group), kind)

        def meet() -> Any:
            self._meet(kind)
            return group

        return ByPlace(C10dCollectives(group), QueuedCollectives(meet, self.group(kind)))

    def _without_groups(self, host: Collectives, kind: str) -> Collectives:
        """Where a rank shares its device, or there is no backend for it."""
        ranks = self.group(kind)
        if len(ranks) == 1 or not self.reads_memory(kind):
            return StagedCollectives(host)
        names, answers = (self.transport.collectives(ranks) for _ in range(2))
        return ByPlace(host, MappedCollectives(sharing_on(home()), names, answers, self.group_rank(kind)))

    def reads_memory(self, kind: str) -> bool:
        """Whether the devices of the group's ranks read each other's memory; collective where it is asked for
        the first time."""
        if kind not in self._read_memory:
            allowed = self.exchange(self.may_read_memory, kind, "the first step's devices")
            self._read_memory[kind] = all(allowed) and not self.why_no_common_memory(kind)
        return self._read_memory[kind]

    def why_no_common_memory(self, kind: str) -> str:
        """Why the devices of the group's ranks cannot read each other's memory; "": they can; collective."""
        exchange = partial(self.exchange, kind=kind, what="whether devices read each other's memory")
        return why_not_between(self.group_rank(kind), self.local_size, exchange)

    def new_group(self, kind: str) -> Any:
        """What the transport's messages between the ranks of this one's group go over, for one user of it: a
        communicator, or a process group; collective over the group."""
        self._meet(kind)
        return self.transport.new_group(self.group(kind))

    def _meet(self, kind: str) -> None:
        """Before something blocks where a missing member is not noticed."""
        self.exchange(None, kind, "the first step")

    # Objects ------------------------------------------------------------------------------------------------

    def exchange(self, payload: Any, kind: str, what: str) -> list[Any]:
        """Collective over the group: every member's payload, in group order.

        Args:
            payload: picklable; None costs nothing.
            kind: of the group.
            what: names the call in errors; must be the same on all members.

        Raises:
            SMPTimeout: a member did not call; names the missing ranks.
            SMPMismatch: a member called something else.
        """
        return self._roll_call(self.calls.begin(payload, kind, what))

    def gather(self, payload: Any, kind: str, what: str) -> list[Any] | None:
        """Collective over the group: every member's payload on group rank 0, None on the others.

        What is small goes up the tree; what is large goes straight there once all have called.
        """
        group = self.group(kind)
        large = None
        if len(group) > self.calls.radix and self.rank != group[0]:
            data = pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
            if len(data) > _SMALL_BYTES:
                large, payload = data, _COMES_ITSELF
        found = self._roll_call(self.calls.begin(payload, kind, what, to_first=True))
        if large is not None:
            self._send(large, [group[0]], what)
        if self.rank != group[0]:
            return None
        for i, rank in enumerate(group[1:], start=1):
            if isinstance(found[i], _ComesItself):
                found[i] = self.receive_object(rank, what)
        return found

    def barrier(self, kind: str = "WORLD") -> None:
        self.exchange(None, kind, "barrier")

    def _roll_call(self, call: RollCall) -> list[Any]:
        def missing() -> str:
            while not call.inquire(time.monotonic(), watchdog_s()):
                time.sleep(0.001)
            return call.missing()

        try:
            wait_until(lambda: call.poll(time.monotonic()), missing, call.awaited)
        finally:
            call.give_up()
        if not call.under_way():
            return call.result()
        wait_until(
            lambda: not call.under_way(),
            lambda: (
                f"{call.what}: {call.under_way()} message(s) of rank {self.rank} to the {call.kind} group "
                "did not leave"
            ),
            lambda: [rank for rank in call.group if rank != self.rank],
        )
        return call.result()

    def send_object(self, payload: Any, dests: Sequence[int], what: str = "send") -> None:
        """To each of them; blocks until all have begun to receive."""
        if self.rank in dests:
            raise SMPError(f"rank {self.rank} cannot send to itself")
        self._send(pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL), dests, what)

    def _send(self, data: bytes, dests: Sequence[int], what: str) -> None:
        sends = {dest: self.transport.send(data, dest, Tag.MESSAGE, until_taken=True) for dest in dests}

        def all_taken() -> bool:
            for dest in [dest for dest, pending in sends.items() if pending.done()]:
                del sends[dest]
            return not sends

        wait_until(
            all_taken,
            lambda: f"{what} from rank {self.rank} to rank {', '.join(map(str, sends))} was not received",
            lambda: list(sends),
        )

    def post_failure(self, number: int, text: str, ranks: Sequence[int]) -> list[Pending]:
        """Says why this rank has failed, and where its random streams are, without waiting for anybody to
        hear it."""
        data = pickle.dumps((number, text, taken_states()), protocol=pickle.HIGHEST_PROTOCOL)
        return [self.transport.send(data, rank, Tag.FAILURE) for rank in ranks]

    def receive_failure(self, source: int, number: int) -> tuple[str, Any]:
        """Why ``source`` has failed for the ``number``-th time, and where its random streams were then;
        earlier words of it are passed over."""
        found: list[tuple[str, Any]] = []

        def receive() -> bool:
            message = self.transport.receive(source, Tag.FAILURE)
            if message is not None:
                their_number, text, streams = pickle.loads(message)
                if their_number == number:
                    found.append((text, streams))
            return bool(found)

        wait_until(receive, lambda: f"rank {source} has failed and does not say why", lambda: [source])
        return found[0]

    def receive_object(self, source: int, what: str = "recv_from") -> Any:
        found: list[bytes] = []

        def receive() -> bool:
            message = self.transport.receive(source, Tag.MESSAGE)
            if message is not None:
                found.append(message)
            return bool(found)

        wait_until(
            receive,
            lambda: f"{what}: rank {source} sent nothing to rank {self.rank}",
            lambda: [source],
        )
        return pickle.loads(found[0])


class _ComesItself:
    """Stands for a payload that is sent apart."""


_COMES_ITSELF = _ComesItself()
