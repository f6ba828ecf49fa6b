"""With which settings each program is run, always or only by ``make test-all``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.registry import Program, programs

__all__ = ["IN_MEMORY", "ON_RANKS"]

EVERY = 24
"""One in so many is run on real ranks always: that costs seconds, and differs from memory in little."""


def _case(program: Program, *settings: Any, name: str, always: bool) -> Any:
    marks = () if always and not program.slow else (pytest.mark.thorough,)
    return pytest.param(program, *settings, id=f"{program.name}-{name}", marks=marks)


IN_MEMORY = [
    _case(
        program,
        stages,
        pipeline,
        static,
        name=f"{stages}-{pipeline}{'-static' * static}",
        always=(stages, pipeline) == (program.stages[0], program.pipelines[0]),
    )
    for program in programs().values()
    for stages in program.stages
    for pipeline in program.pipelines
    for static in ((False, True) if program.static else (False,))
]
ON_RANKS = [
    _case(
        program,
        stages,
        replicas,
        name=f"{stages}x{replicas}",
        always=number % EVERY == 0 or program.always_on_ranks,
    )
    for number, program in enumerate(programs().values())
    for replicas in program.replicas
    for stages in program.ranks
]
