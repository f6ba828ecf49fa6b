"""The timeline of real steps that ``SMP_LITE_TRACE=folder`` asks for.

Each rank writes its own file after every step; whoever leaves last has merged them all into
``folder/timeline.json``, which ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping

from ..comm.groups.axis import Axis
from ..errors import SMPError
from ..runtime.step.step_runner import StepRunner
from ..session import Session
from ..views.timeline import TimedCollective, TimelineWriter, make_folder, merge_timelines

TRACE_VARIABLE = "SMP_LITE_TRACE"


def check_trace_folder(environment: Mapping[str, str]) -> None:
    """Makes the folder for a timeline, if one is asked for.

    Raises:
        SMPError: it is none, or no file can be made in it.
    """
    if not (directory := environment.get(TRACE_VARIABLE)):
        return
    try:
        make_folder(directory)
    except OSError as error:
        raise SMPError(
            f"{TRACE_VARIABLE}={directory!r}: the timeline cannot be written there "
            f"({error.strerror or error}): name a folder that can be written to, or leave it out"
        ) from error


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
        self._collectives: list[TimedCollective] = []
        if session.stage_peers is not None and not session.stage_peers.is_alone:
            session.stage_peers.observe(self._starts)
        self._process = os.getpid()
        atexit.register(self.close)

    @classmethod
    def if_asked(cls, session: Session, stages: frozenset[int]) -> StepTimeline | None:
        directory = os.environ.get(TRACE_VARIABLE)
        return cls(session, directory, stages) if directory else None

    def add_step(self, step_index: int, runner: StepRunner) -> None:
        for stage, spans in runner.spans().items():
            self._writers[stage].add_step(step_index, spans, self._collectives)
        self._collectives.clear()

    def _starts(self, kind: str, axis: Axis, num_elements: int) -> Callable[[], None]:
        start_s = time.perf_counter()

        def ends() -> None:
            self._collectives.append(
                TimedCollective(kind, axis.name, axis.ranks, num_elements, start_s, time.perf_counter())
            )

        return ends

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a child that the script has forked: the files are its parent's
        for writer in self._writers.values():
            writer.close()
        merge_timelines(self.directory, num_ranks=self._num_ranks)
