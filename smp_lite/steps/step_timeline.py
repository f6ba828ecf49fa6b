"""The timeline of real steps that ``SMP_LITE_TRACE=folder`` asks for.

Each rank writes its own file after every step; whoever leaves last has merged them all into
``folder/timeline.json``, which ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import atexit
import os
import time

from ..runtime.step_runner import StepRunner
from ..session import Session
from ..views.timeline import TimelineWriter, merge_timelines

TRACE_VARIABLE = "SMP_LITE_TRACE"


class StepTimeline:
    """Writers for the stages that this process plays.

    Args:
        session: ranks.
        directory: where the files go.
        stages: stages played here.
    """

    def __init__(self, session: Session, directory: str, stages: frozenset[int]) -> None:
        world = session.world
        one_host = world is None or world.local_size == world.size
        offset_s = 0.0 if one_host else time.time() - time.perf_counter()
        self.directory = directory
        self._num_ranks = world.size if world is not None else session.num_stages
        self._writers = {
            stage: TimelineWriter(
                directory,
                session.rank if world is not None else stage,
                stage,
                replica_index=session.group_rank("DP"),
                clock_offset_s=offset_s,
            )
            for stage in sorted(stages)
        }
        atexit.register(self.close)

    @classmethod
    def if_asked(cls, session: Session, stages: frozenset[int]) -> StepTimeline | None:
        directory = os.environ.get(TRACE_VARIABLE)
        return cls(session, directory, stages) if directory else None

    def add_step(self, step_index: int, runner: StepRunner) -> None:
        for stage, spans in runner.spans().items():
            self._writers[stage].add_step(step_index, spans)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        merge_timelines(self.directory, num_ranks=self._num_ranks)
