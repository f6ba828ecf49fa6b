"""Environment variables, looked at when smp.init begins: a wrong value is an error, used or not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from ..comm.wires.choice import wanted_kind
from ..config import Config
from ..errors import SMPError
from ..runtime.graphs.stage_graphs import GRAPHS_VARIABLE, are_wanted
from ..smp_v1.before_script import asks_for_cpu
from ..steps.step_timeline import check_trace_folder

__all__ = ["check_variables", "warn_of_unused"]


def check_variables(environment: Mapping[str, str]) -> None:
    """
    Raises:
        SMPError: a variable has a value that it cannot have, or names a folder that cannot be written to.
    """
    are_wanted(environment)
    wanted_kind(environment)
    try:
        asks_for_cpu(environment)
    except ValueError as error:
        raise SMPError(str(error)) from None
    check_trace_folder(environment)


def warn_of_unused(environment: Mapping[str, str], config: Config) -> None:
    """Warns of what is asked for and has no effect with these parameters."""
    if are_wanted(environment) and not config.static_mode:
        warnings.warn(
            f"{GRAPHS_VARIABLE}=1 has no effect without static_mode: True in the parameters", stacklevel=3
        )
