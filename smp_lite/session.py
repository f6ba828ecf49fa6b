"""The session: what ``smp.init()`` sets up, and the library's one mutable global.

Everything else is handed its collaborators; only the public functions, which a script calls without an
object, look here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .amp import overflows_of_the_whole_model
from .comm.collectives import C10dCollectives, Collectives
from .comm.peers import OneProcess, Peers, RankPeers
from .comm.wires import C10dWire, Wire
from .config import Config, load_config
from .errors import PeerFailed, SMPError
from .errors_record import record_failure
from .optim.norms import norms_of_the_whole_model
from .optim.optimizer_check import other_optimizers_checked
from .plan.schedules import Policy
from .plan.topology import Topology
from .record.interception import stop_intercepting
from .stop_notice import listen, stop_listening

if TYPE_CHECKING:
    from .comm.transport import Transport
    from .comm.world import World

WIRE_VARIABLE = "SMP_LITE_WIRE"
"""``mpi`` (the default in an MPI job) or ``c10d``: what tensors travel over between stages."""


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
        self.unread_optimizer: str | None = None  # the file of a state that was saved, while there was none
        self.step: Any = None
        self.steps_run = 0
        self.is_tracing = False
        self.is_stopping = False  # agreed by all ranks
        self.process_groups: dict[str, Any] = {}
        # Called with each step's plan and recordings before it is executed; ``smp-lite plan`` listens.
        self.on_planned: Callable[..., None] | None = None
        self.checker: Any = None  # of ``smp-lite check``: runs each step
        self.observer: Any = None  # of the same: sees each command that runs
        self.assigned_stages: dict[int, tuple[Any, int]] = {}  # id(module) -> (module, stage)
        self.partition_stack: list[int] = []
        self.overrides = contextlib.ExitStack()  # of torch's own functions, until reset

    def open(self) -> Session:
        """Makes what looks at all parameters at once, in torch's own functions, mean the whole model."""
        self.overrides.enter_context(norms_of_the_whole_model(self))
        self.overrides.enter_context(overflows_of_the_whole_model(self))
        self.overrides.enter_context(other_optimizers_checked(self))
        return self

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
        return RankPeers(self.world, self._stage_of_mp_rank())

    def wire(self) -> Wire | None:
        if self.world is None:
            return None
        stages = self._stage_of_mp_rank()
        rank_of_stage = [stages.index(stage) for stage in range(self.num_stages)]
        has_mpi = self.world.transport.has_mpi
        kind = os.environ.get(WIRE_VARIABLE, "mpi" if has_mpi else "c10d")
        if kind not in ("mpi", "c10d"):
            raise ValueError(f"{WIRE_VARIABLE}={kind!r}: it must be 'mpi' or 'c10d'")
        if kind == "mpi" and not has_mpi:
            raise SMPError(f"{WIRE_VARIABLE}=mpi, but the job runs without MPI: unset it, or use mpirun")
        if kind == "c10d" and has_mpi:
            if not self.process_groups:
                raise SMPError(f"{WIRE_VARIABLE}=c10d needs ddp: True in the parameters")
            return C10dWire(self.process_groups["MP"], rank_of_stage)
        return self.world.wire("MP", rank_of_stage)

    def collectives(self) -> Collectives | None:
        """Over the dp group, if gradients are to be averaged."""
        if self.world is None or len(self.group("DP")) == 1:
            return None
        if self.cfg.horovod or self.cfg.ddp_dist_backend == "mpi":
            return self.world.collectives("DP")
        return C10dCollectives(self.process_groups["DP"])

    def exchange_over_replicas(self, item: Any) -> list[Any]:
        """Every replica's object; collective over the dp group."""
        return self.world.exchange(item, "DP", "how a step failed") if self.world is not None else [item]

    def _stage_of_mp_rank(self) -> list[int]:
        return [self.topology.coordinate(rank)["pp"] for rank in self.group("MP")]


_session: Session | None = None
_rehearsal: tuple[Mapping[str, Any] | None, Callable[[Session], None]] | None = None


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
    if _rehearsal is not None:
        given, prepare = _rehearsal
        _session = _in_memory(
            load_config(config if given is None else given, os.environ if given is None else {})
        )
        prepare(_session)
        return
    from .comm.connect import connect
    from .comm.world import World

    listen()
    transport = connect(os.environ)
    _install_excepthook(transport)
    validated = load_config(config, os.environ)
    validated.check_world_size(transport.size)
    _check_needs_of_mpi(validated, transport)
    topology = Topology.from_placement(transport.size, validated.partitions, 1, validated.placement_strategy)
    session = Session(validated, topology, World(topology, transport))
    assert session.world is not None
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // session.world.local_size))
    if validated.ddp:
        from .comm.process_groups import init_process_groups

        session.process_groups = init_process_groups(
            session.world, backend=validated.ddp_dist_backend, port=validated.ddp_port
        )
    _session = session.open()


def _check_needs_of_mpi(config: Config, transport: Transport) -> None:
    if transport.has_mpi or transport.size == 1:
        return
    found = None
    if config.horovod:
        found = "horovod: True"
    elif config.ddp_dist_backend in ("mpi", "nccl"):
        found = f"ddp_dist_backend: {config.ddp_dist_backend!r}"
    if found is not None:
        raise SMPError(
            f"{found} needs a job started by MPI, and this one was started without (torchrun, or RANK and "
            "WORLD_SIZE by hand): start it with mpirun, or use ddp: True with ddp_dist_backend: 'gloo'"
        )


def init_in_memory(config: Mapping[str, Any]) -> None:
    """Like :func:`init`, but this one process plays all stages, without MPI.

    For debugging a script under pdb, for tests, and for planning: losses and gradients are the same as
    with one process for each stage.
    """
    global _session
    if _session is not None:
        raise SMPError("smp.init() was called twice: call it once, first thing in the script")
    _session = _in_memory(load_config(config, {}))
    listen()


def _in_memory(config: Config) -> Session:
    topology = Topology.from_placement(config.partitions, config.partitions, 1, "cluster")
    return Session(config, topology, None).open()


@contextlib.contextmanager
def planning(parameters: Mapping[str, Any] | None, on_planned: Callable[..., None]) -> Iterator[None]:
    """Within: :func:`init` plays all stages in this process, and ``on_planned`` sees each step's plan.

    Args:
        parameters: win over the environment and over what the script gives; None: as in :func:`init`.
        on_planned: called with a batch of work and the recordings before it would be executed.
    """

    def prepare(session: Session) -> None:
        session.on_planned = on_planned

    with _rehearsing(parameters, prepare):
        yield


@contextlib.contextmanager
def checking(parameters: Mapping[str, Any] | None, checker: Any) -> Iterator[None]:
    """Within: :func:`init` plays all stages in this process, and ``checker`` runs each step.

    Args:
        parameters: as in :func:`planning`.
        checker: a :class:`smp_lite.check.stepping.StepChecker`.
    """

    def prepare(session: Session) -> None:
        session.checker = checker

    with _rehearsing(parameters, prepare):
        yield


@contextlib.contextmanager
def _rehearsing(parameters: Mapping[str, Any] | None, prepare: Callable[[Session], None]) -> Iterator[None]:
    global _rehearsal
    _rehearsal = (parameters, prepare)
    try:
        yield
    finally:
        _rehearsal = None
        reset()


def reset() -> None:
    """Forgets the session, so that :func:`init` can be called again in this process (tests, notebooks)."""
    global _session
    if _session is not None:
        _session.overrides.close()
    if _session is not None and _session.world is not None:
        if _session.process_groups:
            from .comm.gloo import destroy_process_groups

            destroy_process_groups()
        _session.world.close()
    stop_listening()
    stop_intercepting()
    _session = None


_PEER_HAS_S = 2.0
"""How long a rank that fails because of another waits for it to say why."""


def _install_excepthook(transport: Transport) -> None:
    """An uncaught exception on one rank ends all of them, and is the last thing that the rank shows."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, PeerFailed):
            time.sleep(_PEER_HAS_S)  # that rank shows the cause, and ends this one with its job
        shown_by_launcher = record_failure((kind, error, trace), transport.rank)
        sys.stdout.flush()
        if not shown_by_launcher:
            text = "".join(traceback.format_exception(kind, error, trace))
            # Not sys.stderr: torch.distributed calls this with a buffer there, which is lost by the abort.
            stream = sys.__stderr__ or sys.stderr
            stream.write(f"rank {transport.rank} failed:\n{text}")
            stream.flush()
        _tell_torchrun(error)
        if transport.size > 1:
            transport.abort(1)

    sys.excepthook = hook


def _tell_torchrun(error: BaseException) -> None:
    """torchrun shows the earliest error that was left for it as the root cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # what is recorded is the exception that is being handled
        except BaseException as handled:
            get_error_handler().record_exception(handled)
