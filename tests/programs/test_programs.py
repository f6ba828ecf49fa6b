"""Every program gives plain torch's numbers, or is refused by the name that it expects."""

from __future__ import annotations

import os

import pytest

from smp_lite.errors import SMPError
from tests.harness import run_distributed
from tests.programs.registry import Program, programs
from tests.programs.running import parameters_of, run_in_memory

ALL = os.environ.get("SMP_LITE_ALL_TESTS") == "1"
CHOSEN = [program for program in programs().values() if ALL or not program.slow]

IN_MEMORY = [
    pytest.param(
        program, stages, pipeline, static, id=f"{program.name}-{stages}-{pipeline}{'-static' * static}"
    )
    for program in CHOSEN
    for stages in program.stages
    for pipeline in program.pipelines
    for static in ((False, True) if program.static else (False,))
]
ON_RANKS = [
    pytest.param(program, stages, replicas, id=f"{program.name}-{stages}x{replicas}")
    for program in CHOSEN
    for replicas in program.replicas
    for stages in program.ranks
]


@pytest.mark.parametrize(("program", "stages", "pipeline", "static"), IN_MEMORY)
def test_in_memory(program: Program, stages: int, pipeline: str, static: bool) -> None:
    if refused := program.refused or (static and program.refused_static):
        with pytest.raises(SMPError, match=refused):
            run_in_memory(program, stages, pipeline, static=static)
        return
    assert run_in_memory(program, stages, pipeline, static=static) == []


@pytest.mark.parametrize(("program", "stages", "replicas"), ON_RANKS)
def test_on_ranks(program: Program, stages: int, replicas: int) -> None:
    parameters = parameters_of(program, stages, program.pipelines[0])
    if replicas > 1:
        parameters["ddp"] = True
    arguments = {"kwargs": {"name": program.name}, "parameters": parameters}
    if refused := program.refused or program.refused_on_ranks:
        with pytest.raises(AssertionError, match=refused):
            run_distributed("tests.programs.running:run_on_ranks", stages * replicas, **arguments)
        return
    found = run_distributed("tests.programs.running:run_on_ranks", stages * replicas, **arguments)
    assert found == [[]] * len(found)
