"""Joins this process to the others of its job, by whatever they have in common: MPI, or a store.

MPI is loaded only where it is used, since loading it initialises it.
"""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping

from ...errors import SMPError
from ..waiting import watchdog_s
from .launcher import AtRendezvous, UnderMPI, note_joined, read_launch
from .start_watch import watched_start
from .transport import Transport

__all__ = ["connect"]


def connect(environment: MutableMapping[str, str]) -> Transport:
    """Joins this process to the others of its job; collective over all of them.

    Args:
        environment: of this process, in which it is noted that it has joined.

    Raises:
        ValueError: the environment contradicts itself; names the variables.
        SMPError: a rank has started this process, MPI cannot be loaded, or counts other ranks than its
            launcher.
        SMPTimeout: a rank did not come; names it.
    """
    launch = read_launch(environment)
    note_joined(environment, launch)
    if not isinstance(launch, AtRendezvous):
        try:
            has_others = isinstance(launch, UnderMPI) and launch.size != 1
            with watched_start(launch.rank, watchdog_s()) if has_others else contextlib.nullcontext():
                from .mpi import MPITransport

                return MPITransport(launch)
        except (ImportError, RuntimeError) as error:  # no mpi4py, or mpi4py finds no MPI library
            if isinstance(launch, UnderMPI):
                raise SMPError(
                    f"{launch.variable} is set, so MPI started this process, but mpi4py cannot be loaded: "
                    f"{error}. Install MPI with: pip install 'smp-lite[mpi]'"
                ) from error
        launch = AtRendezvous(rank=0, size=1, address="127.0.0.1", port=0)
    from .store import StoreTransport

    return StoreTransport(launch)
