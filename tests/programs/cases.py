"""With which settings each program is run, and which of that by ``make test`` too.

CI runs a fifth of the others each day: a sample that stayed the same has hidden programs that had failed
for days.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.registry import Program, programs

__all__ = ["IN_MEMORY", "ON_RANKS"]

EVERY = 24
"""One in so many is in ``make test``, in one process."""


def _case(program: Program, *settings: Any, name: str, always: bool) -> Any:
    marks = (pytest.mark.thorough,) if program.slow else () if always else (pytest.mark.slow,)
    return pytest.param(program, *settings, id=f"{program.name}-{name}", marks=marks)


IN_MEMORY = [
    _case(
        program,
        stages,
        pipeline,
        static,
        name=f"{stages}-{pipeline}{'-static' * static}",
        always=number % EVERY == 0 and (stages, pipeline) == (program.stages[0], program.pipelines[0]),
    )
    for number, program in enumerate(programs().values())
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
        always=program.always_on_ranks,
    )
    for program in programs().values()
    for replicas in program.replicas
    for stages in program.ranks
]
