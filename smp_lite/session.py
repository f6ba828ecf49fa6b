"""The session: what ``smp.init()`` sets up, and the library's one mutable global.

Everything else is handed its collaborators; only the public functions, which a script calls without an
object, look here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .comm.collectives import C10dCollectives, Collectives, MPICollectives
from .comm.peers import MPIPeers, OneProcess, Peers
from .comm.wires import C10dWire, MPIWire, Wire
from .config import Config, load_config
from .errors import SMPError
from .errors_record import record_failure
from .plan.schedules import Policy
from .plan.topology import Topology

if TYPE_CHECKING:
    from .comm.world import World

WIRE_VARIABLE = "SMP_LITE_WIRE"
"""``mpi`` (default) or ``c10d``: what tensors travel over between stages."""


class Session:
    """One job's configuration, ranks and model.

    Args:
        config: validated.
        topology: axes over all ranks.
        world: the processes; None where this process plays all stages.
    """

    def __init__(self, config: Config, topology: Topology, world: World | None) -> None:
        self.cfg = config  # the SMP API's name: scripts read smp.state.cfg.<parameter>
        self.topology = topology
        self.world = world
        self.device = torch.device("cpu")
        # What the layers above put here; their types are theirs.
        self.model: Any = None
        self.optimizer: Any = None
        self.step: Any = None
        self.steps_run = 0
        self.is_tracing = False
        self.process_groups: dict[str, Any] = {}
        # Called with each step's plan and recordings before it is executed; ``smp-lite plan`` listens.
        self.on_planned: Callable[..., None] | None = None
        self.assigned_stages: dict[int, tuple[Any, int]] = {}  # id(module) -> (module, stage)
        self.partition_stack: list[int] = []

    @property
    def num_stages(self) -> int:
        return self.cfg.partitions

    @property
    def rank(self) -> int:
        return self.world.rank if self.world else 0

    def group(self, kind: str) -> tuple[int, ...]:
        return self.world.group(kind) if self.world else (0,)

    def group_rank(self, kind: str) -> int:
        return self.world.group_rank(kind) if self.world else 0

    def policy(self) -> Policy:
        return Policy(self.cfg.pipeline, self.cfg.optimize, self.cfg.active_microbatches)

    # Collaborators for the model's runtime ------------------------------------------------------------------

    def peers(self) -> Peers:
        if self.world is None:
            return OneProcess(self.num_stages)
        return MPIPeers(self.world, self._stage_of_mp_rank())

    def wire(self) -> Wire | None:
        if self.world is None:
            return None
        stages = self._stage_of_mp_rank()
        rank_of_stage = [stages.index(stage) for stage in range(self.num_stages)]
        kind = os.environ.get(WIRE_VARIABLE, "mpi")
        if kind == "mpi":
            return MPIWire(self.world.new_comm("MP", "the first step"), rank_of_stage)
        if kind != "c10d":
            raise ValueError(f"{WIRE_VARIABLE}={kind!r}: it must be 'mpi' or 'c10d'")
        if not self.process_groups:
            raise SMPError(f"{WIRE_VARIABLE}=c10d needs ddp: True in the parameters")
        ranks = self.group("MP")
        return C10dWire(self.process_groups["MP"], [ranks[i] for i in rank_of_stage])

    def collectives(self) -> Collectives | None:
        """Over the dp group, if gradients are to be averaged."""
        if self.world is None or len(self.group("DP")) == 1:
            return None
        if self.cfg.horovod or self.cfg.ddp_dist_backend == "mpi":
            return MPICollectives(self.world.new_comm("DP", "the first step"))
        return C10dCollectives(self.process_groups["DP"])

    def _stage_of_mp_rank(self) -> list[int]:
        return [self.topology.coordinate(rank)["pp"] for rank in self.group("MP")]


_session: Session | None = None
_planning: tuple[Mapping[str, Any] | None, Callable[..., None]] | None = None


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


def init(config: Mapping[str, Any] | str | None = None) -> None:
    """Sets the library up; the first call of a script. Collective over all ranks.

    Args:
        config: the parameters of SageMaker's ``modelparallel`` dict, or the path of a JSON file with them.
            ``SM_HP_MP_PARAMETERS``, which launchers set, wins over it.

    Raises:
        ConfigError: a parameter is wrong; the text names it.
        SMPError: it was called before.
    """
    global _session
    if _session is not None:
        raise SMPError("smp.init() was called twice: call it once, first thing in the script")
    if _planning is not None:
        given, on_planned = _planning
        _session = _in_memory(
            load_config(config if given is None else given, os.environ if given is None else {})
        )
        _session.on_planned = on_planned
        return
    from .comm import world as world_module

    try:
        validated = load_config(config, os.environ)
        validated.check_world_size(world_module.world_size())
    except ValueError:
        _install_excepthook(world_module.world_rank())
        raise
    topology = Topology.from_placement(
        world_module.world_size(), validated.partitions, 1, validated.placement_strategy
    )
    _install_excepthook(world_module.world_rank())
    session = Session(validated, topology, world_module.World(topology))
    assert session.world is not None
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // session.world.local_size))
    if validated.ddp:
        from .comm.process_groups import init_process_groups

        session.process_groups = init_process_groups(
            session.world, backend=validated.ddp_dist_backend, port=validated.ddp_port
        )
    _session = session


def init_in_memory(config: Mapping[str, Any]) -> None:
    """Like :func:`init`, but this one process plays all stages, without MPI.

    For debugging a script under pdb, for tests, and for planning: losses and gradients are the same as
    with one process for each stage.
    """
    global _session
    if _session is not None:
        raise SMPError("smp.init() was called twice: call it once, first thing in the script")
    _session = _in_memory(load_config(config, {}))


def _in_memory(config: Config) -> Session:
    topology = Topology.from_placement(config.partitions, config.partitions, 1, "cluster")
    return Session(config, topology, None)


@contextlib.contextmanager
def planning(parameters: Mapping[str, Any] | None, on_planned: Callable[..., None]) -> Iterator[None]:
    """Within: :func:`init` plays all stages in this process, and ``on_planned`` sees each step's plan.

    Args:
        parameters: win over the environment and over what the script gives; None: as in :func:`init`.
        on_planned: called with a batch of work and the recordings before it would be executed.
    """
    global _planning
    _planning = (parameters, on_planned)
    try:
        yield
    finally:
        _planning = None
        reset()


def reset() -> None:
    """Forgets the session, so that :func:`init` can be called again in this process (tests, notebooks)."""
    global _session
    if _session is not None and _session.process_groups:
        from .comm.process_groups import destroy_process_groups

        destroy_process_groups()
    _session = None


def _install_excepthook(rank: int) -> None:
    """An uncaught exception on one rank ends all of them, and is the last thing that the rank shows."""
    if getattr(sys.excepthook, "smp_lite", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        from .comm.world import abort, world_size

        shown_by_launcher = record_failure((kind, error, trace), rank)
        sys.stdout.flush()
        if not shown_by_launcher:
            text = "".join(traceback.format_exception(kind, error, trace))
            sys.stderr.write(f"rank {rank} failed:\n{text}")
        sys.stderr.flush()
        if world_size() > 1:
            abort(1)

    hook.smp_lite = True  # type: ignore[attr-defined]
    sys.excepthook = hook
