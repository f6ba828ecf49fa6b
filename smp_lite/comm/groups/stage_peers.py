"""The ranks that share one stage: its axes, and what becomes of a collective when one of them fails.

A layer that is split over ranks waits for all of them in the midst of its forward. A rank on which an action
fails will not come; it says so, and whoever waits for it hears that and fails as well, so that the step ends
on all ranks by the first error instead of at the watchdog's limit. What was under way never ends; so
afterwards every rank starts with new communicators.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection

import torch

from ...devices import CPU
from ...errors import PeerFailed
from ..collectives import Pending
from ..transports.transport import Tag
from .axis import Axis, Observer
from .world import World

__all__ = ["StagePeers"]

_LOOK_EVERY_S = 0.02


class StagePeers:
    """The ranks of one replica's stage, as one of them sees them.

    Args:
        world: the job.
        names: the axes on which they differ; without any, a stage is one rank.
        own_batches: those of them along which each has a batch of its own; along the others all get the same.
    """

    def __init__(self, world: World, names: tuple[str, ...], own_batches: Collection[str] = ()) -> None:
        self.names = names
        self.batch_names = tuple(name for name in names if name not in own_batches)
        """Axes along which ranks get the same batch."""
        self._world = world
        self._others = [rank for rank in world.topology.along(names, world.rank) if rank != world.rank]
        self._axes: dict[str, Axis] = {}
        self._observer: Observer | None = None
        self._list_number = 0
        self._looked_at = 0.0
        self._sent: list[Pending] = []

    @property
    def share_batch(self) -> bool:
        """Whether any other rank of the stage gets the same batch."""
        sizes = [self._world.topology.axis_size(name) for name in self.batch_names]
        return math.prod(sizes) > 1

    @property
    def sharing(self) -> Axis:
        """The ranks of the stage that get the same batch."""
        return self.axis("+".join(self.batch_names))

    @property
    def is_alone(self) -> bool:
        """Whether this rank is its whole stage."""
        return not self._others

    def axis(self, name: str) -> Axis:
        """The ranks along one axis, or along several taken as one (names with ``+`` between)."""
        if name not in self._axes:
            world = self._world
            self._axes[name] = Axis(
                name,
                world.group(name),
                world.group_rank(name),
                lambda: world.collectives(name),
                self._look,
            )
            self._axes[name].observer = self._observer
        return self._axes[name]

    def observe(self, observer: Observer) -> None:
        """Tells it of every collective from now on."""
        self._observer = observer
        for axis in self._axes.values():
            axis.observer = observer

    def of_first(self, number: int) -> int:
        """The number that the first of those with the same batch has; collective over them."""
        mine = torch.tensor([number], dtype=torch.int64, device=CPU)
        return int(self.sharing.broadcast(mine, 0))

    def begin_list(self) -> None:
        """A list of actions begins, the same on all ranks of the stage."""
        self._list_number += 1

    def announce_failure(self) -> None:
        """This rank will not come to the collectives of this list any more."""
        data = str(self._list_number).encode()
        self._sent = [pending for pending in self._sent if not pending.done()]
        self._sent += [self._world.transport.send(data, rank, Tag.STAGE_FAILURE) for rank in self._others]

    def start_anew(self) -> None:
        """After a list that failed on some rank; all ranks of the stage know that it did."""
        self._list_number += 1  # whoever did not look for it must not hear of it later
        for axis in self._axes.values():
            axis.renew()

    def _look(self, axis: Axis) -> None:
        """Raises PeerFailed if a rank of this stage has failed in this list."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        for rank in self._others:
            message = self._world.transport.receive(rank, Tag.STAGE_FAILURE)
            if message is not None and int(message) == self._list_number:
                raise PeerFailed(
                    f"rank {rank}, which holds a part of the same stage, has failed, so a collective over "
                    f"axis {axis.name!r} cannot end"
                )
