"""What a rank does before it becomes the script: the package of SMP v1's name, and CUDA where asked for."""

from __future__ import annotations

from collections.abc import Mapping

from .alias import add_alias

__all__ = ["CUDA_AS_CPU_VARIABLE", "prepare"]

CUDA_AS_CPU_VARIABLE = "SMP_LITE_CUDA_AS_CPU"
"""``1``: "cuda" means the CPU (:mod:`.cuda_as_cpu`), which ``smp-lite run --cuda-as-cpu`` sets."""


def prepare(environment: Mapping[str, str]) -> None:
    """Readies this process for a script of SMP v1.

    Raises:
        ValueError: another ``smdistributed.modelparallel`` is installed, or the variable is wrong.
    """
    add_alias()
    asked = environment.get(CUDA_AS_CPU_VARIABLE) or "0"
    if asked not in ("0", "1"):
        raise ValueError(f"{CUDA_AS_CPU_VARIABLE}={asked!r}: it must be '1' or '0'")
    if asked == "1":
        from .cuda_as_cpu import turn_on  # imports torch

        turn_on()
