"""``smp.init()``: makes the session, and changes torch's own functions and the process's hooks for it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import devices
from ..amp import overflows_of_the_whole_model
from ..comm.wires.choice import WIRE_VARIABLE
from ..config import PARAMETERS_VARIABLE, Config, load_config
from ..errors import PeerFailed, SMPError
from ..errors_record import record_failure
from ..nn.guarding import close_all as close_guards
from ..optim.checked_settings import other_optimizers_checked
from ..optim.norms.whole_model import norms_of_the_whole_model
from ..plan.topology import Topology
from ..record.backward.engine import start_threads
from ..record.interception import start_intercepting, stop_intercepting
from ..record.parameters.away import forget_all
from ..session import Session, current, is_initialized, set_current
from ..stop_notice import listen, stop_listening
from ..systems.load.given import config_of, given_plan
from ..systems.load.supported import refuse_unsupported
from .alike import check_alike
from .freed_memory import keep_freed_memory
from .variables import check_variables, warn_of_unused

if TYPE_CHECKING:
    from ..comm.transports.transport import Transport
    from ..systems.plan.parallel_plan import ParallelPlan


@dataclass(frozen=True)
class _Rehearsal:
    """How :func:`init` makes a session for a command that runs a script without its ranks.

    Attributes:
        prepare: is given the session.
        parameters, plan: win over the environment and over what the script gives.
        world_size: number of ranks, where the script's own configuration leaves it open.
    """

    prepare: Callable[[Session], None]
    parameters: Mapping[str, Any] | None = None
    plan: ParallelPlan | None = None
    world_size: int | None = None


_rehearsal: _Rehearsal | None = None
_on_session: Callable[[Session], None] | None = None


def init(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    dialect: str | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Sets the library up; the first call of a script. Collective over all ranks.

    Args:
        config: the parameters of SageMaker's ``modelparallel`` dict, or the path of a JSON file with them; or
            a configuration of another system (Enflame, Colossal-AI, LiBai, torchprime), as a dict or a file,
            recognised by its shape. ``SM_HP_MP_PARAMETERS`` and ``SMP_LITE_CONFIG``, which launchers set, win
            over it.
        dialect: whose configuration it is, where its shape does not tell.
        overrides: ``key=value``, as that system writes it on its command line.

    Raises:
        ConfigError: a parameter is wrong; the text names it.
        SMPError: it was called before, with other parameters. (With the same ones it does nothing:
            transformers calls it while it is imported, and then the script does.)
    """
    if is_initialized():
        _check_again(config, dialect, overrides)
        return
    if _rehearsal is not None:
        session = _rehearsed(_rehearsal, config, dialect, overrides)
        set_current(session)
        _rehearsal.prepare(session)
        return
    from ..comm.groups.world import World
    from ..comm.transports.connect import connect

    listen()
    keep_freed_memory()
    transport = connect(os.environ)
    _install_excepthook(transport)
    check_variables(os.environ)
    plan, config = given_plan(config, os.environ, transport.size, dialect, overrides)
    if plan is not None:
        refuse_unsupported(plan)
        for text in plan.warnings if transport.rank == 0 else ():
            warnings.warn(text, stacklevel=2)
        validated = config_of(plan, has_mpi=transport.has_mpi)
    else:
        validated = load_config(config, os.environ)
        validated.check_world_size(transport.size)
    if transport.rank == 0 and (hints := validated.hints_text()) is not None:
        print(f"smp_lite: {hints}", flush=True)
    if transport.rank == 0:
        warn_of_unused(os.environ, validated)
    _check_needs_of_mpi(validated, transport)
    topology = (
        plan.topology
        if plan is not None
        else Topology.from_placement(
            transport.size,
            validated.partitions,
            validated.tensor_parallel_degree,
            validated.placement_strategy,
            sharded=validated.sharded_data_parallel_degree,
        )
    )
    choice = devices.chosen_here(transport.local_rank, transport.local_size)
    session = Session(validated, topology, World(topology, transport), plan, choice.device)
    assert session.world is not None
    check_alike(session.world, validated, choice.device, os.environ)
    by_host = validated.ddp and validated.ddp_dist_backend in ("gloo", "mpi")
    session.world.may_read_memory = not by_host and os.environ.get(WIRE_VARIABLE, "ipc") == "ipc"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // session.world.local_size))
    if validated.ddp:
        from ..comm.groups.process_groups import init_process_groups

        # Another system's configuration does not say; what was put in for it is meant for the host.
        is_open = plan is not None and not devices.is_host(session.device)
        with _port_explained(validated.ddp_port):
            session.process_groups = init_process_groups(
                session.world,
                backend="auto" if is_open else validated.ddp_dist_backend,
                port=validated.ddp_port,
                device=session.device,
            )
    set_current(_open(session))
    if choice.text:
        wire = session.describe_wire()
        has_others = validated.ddp and not devices.is_host(session.device)
        sums = f"; {session.describe_collectives()}" if has_others else ""
        if transport.rank == 0:
            print(f"smp_lite: {choice.text}; {wire}{sums}", flush=True)
    if _on_session is not None:
        _on_session(session)


@contextlib.contextmanager
def _port_explained(given: int | None) -> Iterator[None]:
    """Within: an error about a port that nobody has given to this job says where its number is from."""
    try:
        yield
    except SMPError as error:
        if given is not None or "cannot listen on port" not in str(error):
            raise
        raise SMPError(
            f"{error}, or unset the environment variable MASTER_PORT, from which the number is: two jobs of "
            "one machine cannot have the same"
        ) from error


def _check_again(given: Any, dialect: str | None, overrides: Sequence[str]) -> None:
    """A second call of :func:`init`: the first one counts, so it may not ask for anything else."""
    if given is None or PARAMETERS_VARIABLE in os.environ or _rehearsal is not None:
        return  # what counts does not come from this call
    session = current()
    plan, given = given_plan(given, os.environ, session.topology.world_size, dialect, overrides)
    if plan is not None or session.plan is not None:
        if plan != session.plan:
            raise SMPError(
                "smp.init() was called again, with another configuration. The first call counts: give it "
                "this one, or call smp.reset() between (in notebooks and tests)"
            )
        return
    asked, has = load_config(given, {}).model_dump(), current().cfg.model_dump()
    differ = [f"{key}={asked[key]!r} (is {has[key]!r})" for key in asked if asked[key] != has[key]]
    if differ:
        raise SMPError(
            f"smp.init() was called again, with other parameters: {', '.join(differ)}. The first call "
            "counts: give it these, or call smp.reset() between (in notebooks and tests)"
        )


def _check_needs_of_mpi(config: Config, transport: Transport) -> None:
    if transport.has_mpi or transport.size == 1:
        return
    found = None
    if config.horovod:
        found = "horovod: True"
    elif config.ddp_dist_backend == "mpi":
        found = "ddp_dist_backend: 'mpi'"
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
    if is_initialized():
        raise SMPError(
            "smp.init() was called twice: call it once, first thing in the script, or smp.reset() before it "
            "(a cell of a notebook that runs again)"
        )
    set_current(_in_memory(load_config(config, {})))
    listen()


def _in_memory(config: Config, plan: ParallelPlan | None = None) -> Session:
    if plan is not None:
        return _open(Session(config, plan.topology, None, plan, devices.chosen_here(0, 1).device))
    mp_size = config.partitions * config.tensor_parallel_degree
    topology = Topology.from_placement(mp_size, config.partitions, config.tensor_parallel_degree, "cluster")
    return _open(Session(config, topology, None, device=devices.chosen_here(0, 1).device))


def _rehearsed(rehearsal: _Rehearsal, given: Any, dialect: str | None, overrides: Sequence[str]) -> Session:
    plan = rehearsal.plan
    if rehearsal.parameters is not None:
        return _in_memory(_checked(load_config(rehearsal.parameters, {}), rehearsal.world_size))
    if plan is None:
        plan, given = given_plan(given, os.environ, rehearsal.world_size, dialect, overrides)
    if plan is None:
        return _in_memory(_checked(load_config(given, os.environ), rehearsal.world_size))
    refuse_unsupported(plan)
    return _in_memory(config_of(plan, has_mpi=False), plan)


def _checked(config: Config, world_size: int | None) -> Config:
    if world_size is not None:
        config.check_world_size(world_size)
    return config


def _open(session: Session) -> Session:
    """Makes what looks at all parameters at once, in torch's own functions, mean the whole model."""
    if devices.is_host(session.device):
        start_threads()
    start_intercepting()
    session.overrides.enter_context(norms_of_the_whole_model(session))
    session.overrides.enter_context(overflows_of_the_whole_model(session))
    session.overrides.enter_context(other_optimizers_checked(session))
    return session


def on_session(function: Callable[[Session], None]) -> None:
    """Calls ``function`` with the session that :func:`init` makes of this rank; for ``smp-lite check``."""
    global _on_session
    _on_session = function


@contextlib.contextmanager
def planning(
    parameters: Mapping[str, Any] | None,
    on_planned: Callable[..., None],
    *,
    plan: ParallelPlan | None = None,
    world_size: int | None = None,
) -> Iterator[None]:
    """Within: :func:`init` plays all stages in this process, and ``on_planned`` sees each step's plan.

    Args:
        parameters: win over the environment and over what the script gives; None: as in :func:`init`.
        on_planned: called with a batch of work and the recordings before it would be executed.
        plan: of another system's configuration, in the place of ``parameters``.
        world_size: number of ranks, where the script's own configuration leaves it open.
    """

    def prepare(session: Session) -> None:
        session.on_planned = on_planned

    with _rehearsing(_Rehearsal(prepare, parameters, plan, world_size)):
        yield


@contextlib.contextmanager
def checking(
    parameters: Mapping[str, Any] | None,
    checker: Any,
    *,
    plan: ParallelPlan | None = None,
    world_size: int | None = None,
) -> Iterator[None]:
    """Within: :func:`init` plays all stages in this process, and ``checker`` runs each step.

    Args:
        parameters, plan, world_size: as in :func:`planning`.
        checker: a :class:`smp_lite.check.stepping.StepChecker`, or another with its ``begin`` and ``run``.
    """

    def prepare(session: Session) -> None:
        session.checker = checker
        checker.begin(session)

    with _rehearsing(_Rehearsal(prepare, parameters, plan, world_size)):
        yield


@contextlib.contextmanager
def _rehearsing(rehearsal: _Rehearsal) -> Iterator[None]:
    global _rehearsal
    _rehearsal = rehearsal
    try:
        yield
    finally:
        _rehearsal = None
        reset()


def reset() -> None:
    """Forgets the session, so that :func:`init` can be called again in this process (tests, notebooks)."""
    had_groups = _end(current()) if is_initialized() else False
    stop_listening()
    stop_intercepting()
    close_guards()
    forget_all()
    set_current(None)
    if had_groups:
        gc.collect()  # groups are parts of cycles, and have threads that poll


def _end(session: Session) -> bool:
    """Lets go of what others know of the session; returns whether it had process groups."""
    session.overrides.close()
    if session.model is not None:
        session.model.end_waiting()  # whoever goes on with the module has what was built
    if session.process_groups:
        from ..comm.transports.gloo import destroy_process_groups

        destroy_process_groups()
    if session.world is not None:
        session.world.close()
    return bool(session.process_groups)


_PEER_HAS_S = 2.0
"""How long a rank that fails because of another waits for it to say why."""


def _install_excepthook(transport: Transport) -> None:
    """An uncaught exception on one rank ends all of them, and is the last thing that the rank shows."""

    process = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if os.getpid() != process:  # a child that the script has forked: not the rank
            sys.__excepthook__(kind, error, trace)
            return
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
