"""Who started this process, and as which rank: read from the environment alone.

Neither MPI nor torch is needed to tell, so that a job without MPI never loads it: loading it would contact
a server that is meant for another process (``srun torchrun script.py`` leaves the variables of ``srun`` to
all processes of torchrun).

====================  ========================  ========================  =======================
launcher              rank                      size                      the ranks meet
====================  ========================  ========================  =======================
torchrun, by hand     RANK                      WORLD_SIZE                MASTER_ADDR:MASTER_PORT
mpirun of Open MPI    OMPI_COMM_WORLD_RANK      OMPI_COMM_WORLD_SIZE      in MPI
mpirun of MPICH       PMI_RANK                  PMI_SIZE                  in MPI
srun --mpi=pmix       PMIX_RANK                 MPI knows                 in MPI
srun --mpi=none       SLURM_PROCID              SLURM_NTASKS              MASTER_ADDR:MASTER_PORT
====================  ========================  ========================  =======================

Where two have left their variables, the innermost one counts: torchrun above all (TORCHELASTIC_RUN_ID is
there), then MPI, then RANK and WORLD_SIZE by hand, then Slurm.

A process that a rank starts inherits all of them, and is not that rank. So a rank notes in its environment
that it has joined its job, as which process, and what each launcher had left then. In another process what
is still the same says nothing; what has changed is of a launcher that the rank has started.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ...errors import SMPError
from ...errors_record import ERROR_DIR_VARIABLE

__all__ = ["JOINED_VARIABLE", "Alone", "AtRendezvous", "Launch", "UnderMPI", "note_joined", "read_launch"]

JOINED_VARIABLE = "SMP_LITE_JOINED"
"""What a rank leaves for the processes that it starts."""

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PARAMETERS = "SM_HP_MP_PARAMETERS"
_LEFT_BY = {
    "MPI": ("OMPI_", "PMIX_", "PMI_", "PRTE_"),
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_"),
    "Slurm": ("SLURM_",),
}
"""How the names of what each kind of launcher leaves begin."""
_TOLD_APART_BY = {
    "MPI": (
        *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", ERROR_DIR_VARIABLE),
    ),
    "torch": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", _TORCHRUN),
    "Slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"),
}
"""What differs between two launches of a kind, one of which was started in a rank of the other."""
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", None),
)


@dataclass(frozen=True)
class UnderMPI:
    """An MPI launcher started this process.

    Args:
        rank: as the launcher says.
        size: number of processes; None where only MPI itself can tell.
        variable: of the environment, which showed it.
    """

    rank: int
    size: int | None
    variable: str


@dataclass(frozen=True)
class AtRendezvous:
    """The ranks meet at an address, without MPI.

    Args:
        rank: of this process.
        size: number of processes.
        address: of the host that offers the store.
        port: of the store there; 0: a free one, for one process alone.
        local_rank: among the processes of this host; None if the launcher does not say.
        local_size: number of them; None if the launcher does not say.
        store_is_there: the launcher offers the store; else rank 0 does.
    """

    rank: int
    size: int
    address: str
    port: int
    local_rank: int | None = None
    local_size: int | None = None
    store_is_there: bool = False


@dataclass(frozen=True)
class Alone:
    """No launcher has left a trace: one process, or an MPI whose launcher nobody knows."""


Launch = UnderMPI | AtRendezvous | Alone


def note_joined(environment: MutableMapping[str, str], launch: Launch) -> None:
    """Leaves word for processes that this rank will start; see the module's docstring."""
    rank = 0 if isinstance(launch, Alone) else launch.rank
    found = {kind: _fingerprint(environment, kind) for kind in _LEFT_BY}
    environment[JOINED_VARIABLE] = json.dumps({"process": os.getpid(), "rank": rank, **found})


def read_launch(environment: Mapping[str, str]) -> Launch:
    """How this process was started.

    Raises:
        SMPError: by a rank, which has left it its own variables; says the way out.
        ValueError: variables contradict each other, are no numbers, or one is missing; names them.
    """
    joined = json.loads(environment.get(JOINED_VARIABLE, "{}"))
    # A rank that runs another program in its place stays one.
    if joined.get("process") in (None, os.getpid()):
        return _read_all(environment)
    of_rank = {kind for kind in _LEFT_BY if joined[kind] == _fingerprint(environment, kind)}
    if "MPI" in of_rank and _TORCHRUN not in environment and _are_ranks_of_mpi(environment):
        of_rank.add("torch")  # exported by the rank for torch.distributed
    prefixes = tuple(prefix for kind in of_rank for prefix in _LEFT_BY[kind])
    launch = _read_all({name: text for name, text in environment.items() if not name.startswith(prefixes)})
    if isinstance(launch, Alone) and not isinstance(_read_all(environment), Alone):
        raise SMPError(_not_a_rank(joined["rank"], environment))
    return launch


def _fingerprint(environment: Mapping[str, str], kind: str) -> list[str | None]:
    return [environment.get(name) for name in _TOLD_APART_BY[kind]]


def _are_ranks_of_mpi(environment: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE repeat what MPI's launcher says."""
    here = environment.get("RANK"), environment.get("WORLD_SIZE")
    return any(here == (environment.get(rank), environment.get(size or "")) for rank, size in _MPI)


def _not_a_rank(rank: int, environment: Mapping[str, str]) -> str:
    text = f"smp.init() was called in a process that rank {rank} has started, and that is no rank itself. "
    # The first is how multiprocessing knows that it imports the script again; the second comes later.
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) or multiprocessing.parent_process() is not None:
        return text + (
            "multiprocessing imports the script again in every process that it spawns (a DataLoader with "
            "multiprocessing_context='spawn' does): put smp.init, and all that follows it, under "
            "if __name__ == '__main__':"
        )
    left = [prefix for prefixes in _LEFT_BY.values() for prefix in prefixes]
    left += [ERROR_DIR_VARIABLE, _PARAMETERS]  # of this job: its folder for failures, and its parameters
    names = tuple(prefix for prefix in left if any(name.startswith(prefix) for name in environment))
    return text + (
        "Start it with smp-lite run, mpirun or torchrun, or without the rank's variables: subprocess.run("
        f"..., env={{k: v for k, v in os.environ.items() if not k.startswith({names})}})"
    )


def _read_all(environment: Mapping[str, str]) -> Launch:
    """By all variables that are there.

    Raises:
        ValueError: as of :func:`read_launch`.
    """
    if _TORCHRUN not in environment:
        for rank_variable, size_variable in _MPI:
            if rank_variable in environment:
                return _under_mpi(environment, rank_variable, size_variable)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _at_rendezvous(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
        return _at_rendezvous(environment, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    return Alone()


def _under_mpi(environment: Mapping[str, str], rank_variable: str, size_variable: str | None) -> UnderMPI:
    rank, size = _number(environment, rank_variable), None
    if size_variable is not None:
        size = _size(environment, rank_variable, size_variable)
    # Scripts that also use torch.distributed export these; they must mean the same ranks.
    for mine, variable, by_mpi in ((rank, "RANK", rank_variable), (size, "WORLD_SIZE", size_variable)):
        if mine is None or variable not in environment:
            continue
        if _number(environment, variable) != mine:
            raise ValueError(
                f"{by_mpi}={mine}, but {variable}={environment[variable]}: unset {variable}, or start the "
                "script with one launcher only"
            )
    return UnderMPI(rank, size, rank_variable)


def _at_rendezvous(
    environment: Mapping[str, str], rank_variable: str, size_variable: str, local_variable: str
) -> AtRendezvous | Alone:
    size = _size(environment, rank_variable, size_variable)
    if size == 1 and "MASTER_ADDR" not in environment:
        return Alone()
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(variable):
            raise ValueError(
                f"{size_variable}={size}, but {variable} is not set, so the ranks cannot find each other: "
                "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, or start the script "
                "with mpirun, torchrun or srun --mpi=pmix"
            )
    return AtRendezvous(
        _number(environment, rank_variable),
        size,
        environment["MASTER_ADDR"],
        _number(environment, "MASTER_PORT", least=1),
        _number(environment, local_variable) if local_variable in environment else None,
        _number(environment, "LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in environment else None,
        # torchrun's agent listens on the port itself; torch's own env:// rendezvous looks here too.
        store_is_there=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _size(environment: Mapping[str, str], rank_variable: str, size_variable: str) -> int:
    """The number of processes, if the rank is one of them."""
    pair = (rank_variable, size_variable)
    for variable, other in (pair, pair[::-1]):
        if variable not in environment:
            raise ValueError(f"{other} is set, but {variable} is not: set both, or unset {other}")
    rank, size = _number(environment, rank_variable), _number(environment, size_variable, least=1)
    if rank >= size:
        raise ValueError(f"{rank_variable}={rank}, but {size_variable}={size}: ranks count from 0")
    return size


def _number(environment: Mapping[str, str], variable: str, least: int = 0) -> int:
    text = environment[variable]
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{variable}={text!r}: it must be a whole number of at least {least}")
    return number
