"""The same with a process for each stage, and replicas."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.programs.cases import ON_RANKS
from tests.programs.registry import Program
from tests.programs.running import parameters_of


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize(("program", "stages", "replicas"), ON_RANKS)
def test_on_ranks(program: Program, stages: int, replicas: int) -> None:
    parameters = parameters_of(program, stages, program.pipelines[0])
    if replicas > 1:
        parameters["ddp"] = True
    arguments = {"kwargs": {"name": program.name}, "parameters": parameters}
    if refused := program.refused or program.refused_on_ranks:
        with pytest.raises(AssertionError, match=refused):
            run_distributed("tests.programs.running:run_on_ranks", stages * replicas, **arguments, fails=True)
        return
    found = run_distributed("tests.programs.running:run_on_ranks", stages * replicas, **arguments)
    assert found == [[]] * len(found)
