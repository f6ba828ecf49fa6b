"""The session: what ``smp.init()`` (:mod:`.lifecycle.starting`) sets up, the library's one mutable global.

Everything else is handed its collaborators; only the public functions, which a script calls without an
object, look here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import devices
from .alike_between import BetweenSteps
from .comm.collectives import Collectives
from .comm.groups.axis import Axis
from .comm.groups.peers import OneProcess, Peers, RankPeers
from .comm.groups.ranks import Ranks
from .comm.groups.stage_peers import StagePeers
from .comm.wires.choice import Kind, choose_wire, described, make_wire
from .comm.wires.wire import Wire
from .config import Config
from .errors import SMPError
from .plan.order.schedules import Policy
from .plan.topology import SHARD_AXIS, Topology

if TYPE_CHECKING:
    from .comm.groups.world import World
    from .systems.plan.parallel_plan import ParallelPlan


class ModuleManager:
    """What ``smp.state.module_manager`` has to say; transformers asks it in every ``save_pretrained``.

    Attributes:
        translate_functions: pairs (ours to Hugging Face's, back) of functions on state dicts; empty, since
            names are the model's own without tensor parallelism.
    """

    def __init__(self) -> None:
        self.translate_functions: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = []


class Session:
    """One job's configuration, ranks and model.

    Args:
        config: validated.
        topology: axes over all ranks.
        world: the processes; None where this process plays all stages.
        plan: of another system's configuration; ``config`` is then what it comes to in SMP's words.
        device: of this process.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        world: World | None,
        plan: ParallelPlan | None = None,
        device: torch.device = devices.CPU,
    ) -> None:
        self.plan = plan
        self.cfg = config  # the SMP API's name: scripts read smp.state.cfg.<parameter>
        self.topology = topology
        self.world = world
        self.stage_peers: StagePeers | None = None
        if world is not None:
            self.stage_peers = StagePeers(world, self.stage_axes, self.batch_axes)
        self.device = device
        # What the layers above put here; their types are theirs.
        self.model: Any = None
        self.module_manager = ModuleManager()
        self.optimizer: Any = None  # the last that was wrapped
        self._optimizers: list[weakref.ref[Any]] = []
        self.between_steps = BetweenSteps()
        self.unread_optimizer: str | None = None  # the file of a state that was saved, while there was none
        self.step: Any = None
        self.batch_owner: Any = None
        self.steps_run = 0
        self.is_tracing = False
        self._chosen_wire: Kind | None = None
        self.is_stopping = False  # agreed by all ranks
        self.process_groups: dict[str, Any] = {}
        # Called with each step's plan and recordings before it is executed; ``smp-lite plan`` listens.
        self.on_planned: Callable[..., None] | None = None
        self.takes_rest_alike = False  # ``smp-lite plan``: all microbatches are like the second, if that is
        self.checker: Any = None  # of ``smp-lite check``: runs each step
        self.observer: Any = None  # of the same: sees each command that runs
        self.assigned_stages: dict[int, tuple[Any, int]] = {}  # id(module) -> (module, stage)
        self.partition_stack: list[int] = []
        self.has_engine = False  # Colossal-AI's, which does what its configuration says beside the plan
        self.overrides = contextlib.ExitStack()  # of torch's own functions, until reset

    def add_optimizer(self, optimizer: Any) -> None:
        """One was wrapped; others that still exist go on working."""
        self.optimizer = optimizer
        self._optimizers.append(weakref.ref(optimizer))

    @property
    def optimizers(self) -> list[Any]:
        """All that are wrapped and still exist."""
        return [optimizer for each in self._optimizers if (optimizer := each()) is not None]

    def check_alone(self) -> None:
        """
        Raises:
            SMPError: another optimizer is wrapped, and gradients have one loss scale.
        """
        if len(self.optimizers) > 1:
            gc.collect()  # an earlier one, which nobody has any more
        if len(self.optimizers) > 1:
            raise SMPError(
                "fp16: True with a second smp.DistributedOptimizer: gradients have one loss scale, which one "
                "optimizer decides: give it all parameters, in groups"
            )

    def check_one_optimizer(self, caller: str) -> None:
        """
        Raises:
            SMPError: there are several, and a checkpoint has the state of one.
        """
        if len(self.optimizers) > 1:
            gc.collect()  # an earlier one, which nobody has any more
        if len(found := self.optimizers) > 1:
            kinds = ", ".join(type(each.optimizer).__name__ for each in found)
            raise SMPError(
                f"{caller}: the checkpoint has the state of one optimizer, and {len(found)} are wrapped "
                f"({kinds}): pass load_optimizer=False, and load each one's state_dict(), saved as "
                "user_content, yourself"
            )

    @property
    def num_stages(self) -> int:
        return self.cfg.partitions

    @property
    def rank(self) -> int:
        return self.world.rank if self.world else 0

    @property
    def has_own_batches(self) -> bool:
        """Whether the ranks of a stage bring batches of their own; else all bring the same."""
        return any(axis in self.topology.stage_axes for axis in self.batch_axes)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Data-parallel axes along which every rank holds a piece of each sharded parameter only."""
        if self.plan is not None:
            return self.plan.shard_axes
        return tuple(name for name, _ in self.topology.axes if name == SHARD_AXIS)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """Axes along which the ranks differ that hold one stage of one replica together."""
        own = (*self.topology.stage_axes, *self.shard_axes)
        return tuple(name for name, _ in self.topology.axes if name in own)

    @property
    def replica(self) -> str:
        """The kind of group of the ranks that hold one replica of the model: MP, unless it is sharded."""
        if not self.shard_axes:
            return "MP"
        own = (*dict(self.topology.kinds)["MP"], *self.shard_axes)
        return "+".join(name for name, _ in self.topology.axes if name in own)

    @property
    def copies(self) -> str:
        """The kind of group of the ranks that hold the same as this one: RDP, unless it is sharded."""
        kept = [axis for axis in dict(self.topology.kinds)["RDP"] if axis not in self.shard_axes]
        return "+".join(kept) if self.shard_axes else "RDP"

    @property
    def replica_size(self) -> int:
        """How many ranks hold one replica of the model."""
        return self.num_stages * math.prod(map(self.topology.axis_size, self.stage_axes))

    def group(self, kind: str) -> tuple[int, ...]:
        return self.world.group(kind) if self.world else (0,)

    def group_rank(self, kind: str) -> int:
        return self.world.group_rank(kind) if self.world else 0

    def policy(self) -> Policy:
        """The schedule; of ``auto`` what holds until one is chosen."""
        pipeline = self.cfg.pipeline
        if pipeline == "auto":  # a stage alone never waits
            pipeline = "zero_bubble" if self.num_stages > 1 else "interleaved"
        return Policy(pipeline, self.cfg.optimize, self.cfg.active_microbatches)

    # Collaborators for the model's runtime ------------------------------------------------------------------

    def peers(self) -> Peers:
        if self.world is None:
            return OneProcess(self.num_stages)
        return RankPeers(self.world, self._stages(), self.replica, self._with_one_batch())

    def stages_here(self) -> list[int]:
        """Of this process; asks nobody."""
        if self.world is None:
            return list(range(self.num_stages))
        return [self.stage_of(self.world.rank)]

    def wire(self) -> Wire | None:
        if self.world is None:
            return None
        stages = self._stages()
        rank_of_stage = [stages.index(stage) for stage in range(self.num_stages)]
        return make_wire(
            self._wire_kind(), self.world, rank_of_stage, self.process_groups.get("PP"), self.device
        )

    def _wire_kind(self) -> Kind:
        """Collective where it is asked for the first time."""
        assert self.world is not None
        if self._chosen_wire is None:
            group = self.process_groups.get("PP")
            self._chosen_wire = choose_wire(os.environ, self.world, group, self.device)
        return self._chosen_wire

    def describe_wire(self) -> str:
        """For the log's first lines."""
        return described(self._wire_kind(), self.device)

    def describe_collectives(self) -> str:
        """The same of what ranks sum and gather on devices."""
        assert self.world is not None
        groups = self.world.device_groups
        if groups is not None and groups.can_join(self.group("DP")):
            return f"sums {groups.backend}"
        if len(self.group("DP")) > 1 and self.world.reads_memory("DP"):
            return "sums ipc"
        return "sums through the host's memory"

    def axis(self, name: str = "tp") -> Axis:
        """The ranks of this one's stage along a tensor axis, or along several (names with ``+`` between).

        Raises:
            ValueError: there is no such axis.
        """
        if self.stage_peers is not None:
            return self.stage_peers.axis(name)
        return Axis(name, range(math.prod(map(self.topology.axis_size, name.split("+")))), 0)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have batches of their own, besides pp; gradients are means over them."""
        if self.plan is not None:
            return self.plan.role_axes("dp")
        replicas = dict(self.topology.kinds)["RDP"]
        if self.cfg.tensor_parallel_degree > 1 and not self.cfg.prescaled_batch:
            return (*replicas, "tp")
        return replicas

    def ranks(self) -> Ranks | None:
        """What gradient reduction needs to know of the ranks; None where there are no others."""
        if self.world is None or self.world.size == self.num_stages:
            return None
        axes = {name: size for name, size in self.topology.axes if name != "pp"}
        members = functools.partial(self.topology.along, rank=self.rank)
        return Ranks(self.batch_axes, axes, self._collectives, members)

    def _collectives(self, axes: Sequence[str], *, own: bool = False) -> Collectives | None:
        """For gradients, over the ranks along these axes; None where that is this rank alone.

        With ``own`` nobody else's collectives run in between, as they may in a process group that a script
        has too.
        """
        sizes = [self.topology.axis_size(axis) for axis in axes]
        if self.world is None or math.prod(sizes) == 1:
            return None
        kinds = {frozenset(members): kind for kind, members in self.topology.kinds}
        kind = kinds.get(frozenset(axes), "+".join(axes))
        by_mpi = self.cfg.horovod or self.cfg.ddp_dist_backend == "mpi" or not self.cfg.ddp
        if own or by_mpi or kind not in self.process_groups:
            return self.world.collectives(kind)
        return self.world.collectives_over(self.process_groups[kind], kind)

    def exchange_over_world(self, item: Any, what: str) -> Sequence[Any]:
        """Every rank's item; collective over the job."""
        return self.world.exchange(item, "WORLD", what) if self.world is not None else [item]

    def exchange_over_replicas(self, item: Any) -> list[Any]:
        """Every replica's object; collective over the dp group."""
        return self.world.exchange(item, "DP", "how a step failed") if self.world is not None else [item]

    def _stages(self) -> list[int]:
        """Of each rank of the pp group."""
        return [self.stage_of(rank) for rank in self.group("PP")]

    def stage_of(self, rank: int) -> int:
        """The stage that a rank holds, or a part of."""
        return self.topology.coordinate(rank).get("pp", 0)

    def ranks_of_stage(self, stage: int) -> list[int]:
        """All ranks of the job that hold the stage, or a part of it."""
        return [rank for rank in range(self.topology.world_size) if self.stage_of(rank) == stage]

    def _with_one_batch(self) -> list[tuple[int, ...]]:
        """Sets of ranks that get the same batch, of those that hold one replica."""
        kind = "PP" if self.has_own_batches else "MP"
        return sorted({self.topology.group(kind, rank) for rank in self.group(self.replica)})


_session: Session | None = None


def current() -> Session:
    """The session of this process.

    Raises:
        SMPError: ``smp.init()`` has not been called.
    """
    if _session is None:
        raise SMPError("call smp.init() first")
    return _session


def is_initialized() -> bool:
    """Whether ``smp.init()`` has been called; callable before it."""
    return _session is not None


def set_current(session: Session | None) -> None:
    """The session of this process from now on."""
    global _session
    _session = session
    devices.set_home(devices.CPU if session is None else session.device)
