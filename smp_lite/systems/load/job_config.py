"""The configuration that ``smp-lite plan`` and ``check`` are given: a file of any of the five systems."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import PARAMETERS_VARIABLE
from ...config.errors import ConfigError
from ..plan.parallel_plan import ParallelPlan
from .detect import DIALECTS
from .given import CONFIG_VARIABLE, variable_for
from .loading import load_plan, read_configuration
from .supported import refuse_unsupported

__all__ = ["JobConfig", "add_config_arguments", "read_job_config"]


@dataclass(frozen=True)
class JobConfig:
    """One file, read.

    Attributes:
        source: its path.
        overrides: ``key=value`` of the command line.
        plan: what it asks for.
        parameters: SMP's, where it is SageMaker's file; else the plan counts.
    """

    source: str
    dialect: str | None
    overrides: tuple[str, ...]
    plan: ParallelPlan
    parameters: Mapping[str, Any] | None

    def environment(self) -> dict[str, str]:
        """The variable that tells ranks."""
        return {CONFIG_VARIABLE: variable_for(self.source, self.dialect, self.overrides)}


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; changes (``key=value``) stand before the script."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a configuration of one of five systems (see smp-lite explain); takes the place of --parameters",
    )
    parser.add_argument(
        "--dialect", choices=DIALECTS, help="whose configuration it is, where the file does not tell"
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="number of ranks, where the configuration leaves it open"
    )


def read_job_config(args: argparse.Namespace, overrides: Sequence[str]) -> JobConfig | None:
    """What ``--config`` names; None without one.

    Raises:
        ConfigError: it cannot be read, does not fit the number of ranks, or options contradict each other.
        SMPError: it asks for what this version cannot run.
    """
    if args.world_size is not None and args.world_size < 1:
        raise ConfigError(f"--world-size {args.world_size}: there is at least one rank")
    if args.config is None:
        if overrides:
            raise ConfigError(f"{overrides[0]} changes a configuration, but there is none: add --config FILE")
        if args.dialect is not None:
            raise ConfigError(f"--dialect {args.dialect} says whose configuration --config FILE is: add that")
        return None
    if args.parameters is not None:
        raise ConfigError("--config and --parameters are two configurations: give one of them")
    for name in (PARAMETERS_VARIABLE, CONFIG_VARIABLE):
        if name in os.environ:
            raise ConfigError(f"--config, but the environment variable {name} is set too: unset it")
    written = read_configuration(args.config, dialect=args.dialect, overrides=overrides)
    plan = load_plan(
        args.config, world_size=args.world_size, dialect=args.dialect, overrides=tuple(overrides)
    )
    if plan.dialect != "sagemaker":
        refuse_unsupported(plan)
    parameters = written.tree if plan.dialect == "sagemaker" else None
    return JobConfig(args.config, args.dialect, tuple(overrides), plan, parameters)
