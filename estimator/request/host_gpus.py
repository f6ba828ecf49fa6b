"""The GPUs that a job will find on each of its hosts, as far as the estimator can know, and its ranks.

The rules are the launch's own (`entrypoints.container.gpus`); here they meet what is known before there is
a host: the instance type, the job's environment, and for a job on this machine its GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smp_lite.config import ConfigError
from smp_lite.entrypoints.container.gpus import (
    LOCAL_GPU,
    check_ranks_per_host,
    computes_on_gpus,
    idle_gpus,
    shares_gpus,
)
from smp_lite.entrypoints.container.instance_types import gpus_of_type

__all__ = ["HostGpus"]


@dataclass(frozen=True)
class HostGpus:
    """The GPUs of a host, as far as they are known before the job runs.

    number: None where it is not known.
    limit: those that ranks would use; 0 where there is nothing to hold the ranks against.
    where: whose they are.
    share: whether several ranks may use one.
    """

    number: int | None
    limit: int
    where: str
    share: bool

    @classmethod
    def of(
        cls,
        instance_type: str | None,
        gpus_per_host: int | None,
        local: bool,
        environment: Mapping[str, Any],
    ) -> HostGpus:
        """Raises ConfigError where the environment says neither yes nor no to sharing."""
        of_type = gpus_of_type(instance_type)
        number = gpus_per_host if gpus_per_host is not None or of_type is None else of_type.count
        played_here = local and instance_type == LOCAL_GPU
        counts = computes_on_gpus(environment) and (played_here or not local)
        try:
            share = shares_gpus(environment)
        except ValueError as error:
            raise ConfigError(f"environment: {error}") from None
        return cls(
            number,
            limit=number or 0 if counts else 0,
            where="the host" if instance_type is None else f"instance_type={instance_type!r}",
            share=share,
        )

    def default(self, local: bool = False) -> int | None:
        """Ranks on each host that the launch starts if the job says no number; `local`: on this machine,
        which starts as many as it has GPUs for the job itself, and not those of the instance type."""
        if not self.number or (local and not self.limit):
            return None
        return self.number

    def check(self, processes: int) -> None:
        """Raises ConfigError where there are more ranks than GPUs for them."""
        try:
            check_ranks_per_host(processes, self.limit, where=self.where, share=self.share)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def idle(self, processes: int) -> str | None:
        return idle_gpus(processes, self.limit, where=self.where)
