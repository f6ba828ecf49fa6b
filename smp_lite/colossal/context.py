"""Starting a job, and where a rank stands in it: Colossal-AI's ``launch`` and ``global_context``."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy
import torch

from ..errors import SMPError
from ..lifecycle.starting import init
from ..session import Session, current, is_initialized
from ..systems.plan.parallel_plan import ParallelPlan

__all__ = [
    "GlobalContext",
    "ParallelMode",
    "colossal_plan",
    "global_context",
    "gpc",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]


class ParallelMode(Enum):
    """What the ranks of a group share. The values are Colossal-AI's."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    SEQUENCE_DP = "sequence_dp"
    PARALLEL_1D = "1d"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_2P5D_XZ = "2p5d_xz"


_ALWAYS = {"global": "WORLD", "data": "DATA", "model": "MODEL", "pipe": "PIPELINE", "tensor": "TENSOR"}
_OF_TENSOR_MODE = {"1d": "1d", "2d": "2d", "2p5d": "2.5d", "3d": "3d", "sequence": "sequence"}


def colossal_plan(what: str) -> tuple[Session, ParallelPlan]:
    """The session and its plan, which is Colossal-AI's.

    Args:
        what: asks for it, for the error.

    Raises:
        SMPError: the job has not been started, or with another system's configuration.
    """
    if not is_initialized():
        raise SMPError(f"{what}: start the job first, with launch(config) or smp.init(config)")
    session = current()
    if session.plan is None or session.plan.dialect != "colossal":
        raise SMPError(
            f"{what} belongs to configurations of Colossal-AI, and this job has another one: start it with "
            "launch(dict(parallel=dict(pipeline=..., tensor=...)))"
        )
    return session, session.plan


class GlobalContext:
    """Ranks and sizes by :class:`ParallelMode`, of this process. Import it as ``global_context as gpc``."""

    def get_global_rank(self) -> int:
        """Of this process among all."""
        return colossal_plan("gpc.get_global_rank")[0].rank

    def get_local_rank(self, parallel_mode: ParallelMode) -> int:
        """Its position in its group of a mode.

        Raises:
            SMPError: the job has no groups of this mode.
        """
        return self._group("get_local_rank", parallel_mode).index(self.get_global_rank())

    def get_world_size(self, parallel_mode: ParallelMode) -> int:
        """Ranks of its group of a mode."""
        return len(self._group("get_world_size", parallel_mode))

    def get_ranks_in_group(self, parallel_mode: ParallelMode) -> list[int]:
        """World ranks of its group of a mode, ascending."""
        return list(self._group("get_ranks_in_group", parallel_mode))

    def is_initialized(self, parallel_mode: ParallelMode) -> bool:
        """Whether the job has groups of a mode."""
        return is_initialized() and _kind(parallel_mode, colossal_plan("gpc.is_initialized")[1]) is not None

    def is_first_rank(self, parallel_mode: ParallelMode) -> bool:
        """Whether it is the first of its group."""
        return self.get_local_rank(parallel_mode) == 0

    def is_last_rank(self, parallel_mode: ParallelMode) -> bool:
        """Whether it is the last of its group."""
        return self.get_local_rank(parallel_mode) == self.get_world_size(parallel_mode) - 1

    def is_pipeline_first_stage(self) -> bool:
        """Whether it is on the first pipeline rank."""
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self) -> bool:
        """Whether it is on the last pipeline rank."""
        return self.is_last_rank(ParallelMode.PIPELINE)

    @property
    def data_parallel_size(self) -> int:
        """Replicas."""
        return self.get_world_size(ParallelMode.DATA)

    @property
    def pipeline_parallel_size(self) -> int:
        """Pipeline ranks."""
        return self.get_world_size(ParallelMode.PIPELINE)

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share a layer."""
        return self.get_world_size(ParallelMode.TENSOR)

    def _group(self, what: str, mode: ParallelMode) -> tuple[int, ...]:
        session, plan = colossal_plan(f"gpc.{what}")
        if not isinstance(mode, ParallelMode):
            raise TypeError(f"gpc.{what}({mode!r}): it takes a ParallelMode, such as ParallelMode.PIPELINE")
        kind = _kind(mode, plan)
        if kind is None:
            raise SMPError(
                f"gpc.{what}(ParallelMode.{mode.name}): this job has no such groups; its parallel.tensor has "
                f"mode {plan.tensor.mode!r}"
            )
        return plan.topology.group(kind, session.rank)


def _kind(mode: ParallelMode, plan: ParallelPlan) -> str | None:
    """What the topology calls the groups; None: there are none."""
    if mode.value in _ALWAYS:
        return _ALWAYS[mode.value]
    family, _, which = mode.value.partition("_")
    if plan.tensor.mode != _OF_TENSOR_MODE[family]:
        return None
    if family == "1d":
        return "TENSOR"
    return mode.value.upper() if family == "sequence" else which.upper()


global_context = gpc = GlobalContext()


def launch(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Starts the job: :func:`smp_lite.init` with a configuration of Colossal-AI, and seeds. Collective.

    Args:
        config: a dict with ``parallel``, the path of a Python file that sets it, or None for neither.
        rank, world_size: checked against what the launcher (mpirun, torchrun) says.
        host, port, backend, local_rank: accepted; ranks find each other by their launcher.
        seed: of Python's, numpy's and torch's generators, the same on all ranks, since all build one model.
        verbose: whether rank 0 says the sizes.

    Raises:
        ConfigError: the configuration is wrong; the text names the key.
        SMPError: ``rank`` or ``world_size`` are not the launcher's.
    """
    init({} if config is None else config, dialect="colossal")
    session, plan = colossal_plan("launch")
    for name, given, found in (("rank", rank, session.rank), ("world_size", world_size, plan.world_size)):
        if given is not None and given != found:
            raise SMPError(
                f"launch({name}={given}): the launcher says {found}. Leave {name} out, or start the script "
                "with as many processes"
            )
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if verbose and session.rank == 0:
        print(
            f"smp_lite: data {plan.dp_size}, pipeline {plan.pp_size}, tensor {plan.tp_size} "
            f"(mode {plan.tensor.mode})",
            flush=True,
        )


def launch_from_torch(
    config: Any = None, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """:func:`launch`, of a job that torchrun started."""
    launch(config, backend=backend, seed=seed, verbose=verbose)


def launch_from_openmpi(
    config: Any = None,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """:func:`launch`, of a job that mpirun started."""
    launch(config, host=host, port=port, backend=backend, seed=seed, verbose=verbose)


launch_from_slurm = launch_from_openmpi
