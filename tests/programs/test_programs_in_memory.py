"""Every program gives plain torch's numbers, or is refused by the name that it expects."""

from __future__ import annotations

import pytest

from smp_lite.errors import SMPError
from tests.programs.cases import IN_MEMORY
from tests.programs.registry import Program
from tests.programs.running import run_in_memory


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize(("program", "stages", "pipeline", "static"), IN_MEMORY)
def test_in_memory(program: Program, stages: int, pipeline: str, static: bool) -> None:
    if refused := program.refused or (static and program.refused_static):
        with pytest.raises(SMPError, match=refused):
            run_in_memory(program, stages, pipeline, static=static)
        return
    assert run_in_memory(program, stages, pipeline, static=static) == []
