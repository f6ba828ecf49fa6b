"""The timeline of real steps, for ui.perfetto.dev or chrome://tracing.

Each rank writes ``rank<r>.json`` alone, with no talk to the others; :func:`merge_timelines` makes
of them ``timeline.json``, where a rank is one track and those of a model replica stand together.
The format is Chrome's trace events (complete events, ``"ph": "X"``, microseconds), one event on
each line of the file.

A rank's file is a whole JSON array after every step: each step overwrites the closing bracket, so a
killed process leaves what it had. Should it die in the middle of a write, merging drops the torn
line.

Times are ``time.perf_counter`` seconds. On one Linux host that clock is the same for all processes;
on others it starts anywhere, hence ``clock_offset_s``: seconds to add to get to the clock common to
all hosts, such as ``time.time() - time.perf_counter()`` taken once at the start, which is as good
as the hosts' clocks agree.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from os import SEEK_END, PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from ..plan.step.actions import Action, ActionKind

__all__ = ["TimedAction", "TimedCollective", "TimelineWriter", "make_folder", "merge_timelines"]

_KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "gradients of parameters",
    ActionKind.SEND_FORWARD: "send forward",
    ActionKind.RECV_FORWARD: "receive forward",
    ActionKind.SEND_BACKWARD: "send backward",
    ActionKind.RECV_BACKWARD: "receive backward",
}
_END = b"\n]\n"


class TimedAction(Protocol):
    """When an action ran, in ``time.perf_counter`` seconds."""

    @property
    def action(self) -> Action: ...

    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...


class TimedCollective(NamedTuple):
    """When a collective of a parallel layer ran, waiting included, in ``time.perf_counter`` seconds.

    Attributes:
        kind: such as ``all_reduce``.
        axis: name of the axis.
        ranks: world ranks that took part.
        num_elements: of the whole tensor.
    """

    kind: str
    axis: str
    ranks: tuple[int, ...]
    num_elements: int
    start_s: float
    end_s: float


class TimelineWriter:
    """Writes one rank's file; a context manager.

    Args:
        directory: made where it is missing; an older file of this rank in it is replaced.
        rank: the world rank.
        stage_index: the rank's stage.
        replica_index: which model replica the rank belongs to.
        clock_offset_s: seconds to add to this host's clock to get the one common to all hosts.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        rank: int,
        stage_index: int,
        *,
        replica_index: int = 0,
        clock_offset_s: float = 0.0,
    ) -> None:
        self._ids = {"pid": replica_index, "tid": rank}
        self._clock_offset_s = clock_offset_s
        make_folder(directory)
        self._file = (Path(directory) / f"rank{rank}.json").open("w+b")
        names = {
            "process_name": {"name": f"model replica {replica_index}"},
            "process_sort_index": {"sort_index": replica_index},
            "thread_name": {"name": f"rank {rank} (stage {stage_index})"},
            "thread_sort_index": {"sort_index": rank},
        }
        events = [{"name": key, "ph": "M", **self._ids, "args": args} for key, args in names.items()]
        self._file.write(b"[\n" + _lines(events) + _END)
        self._file.flush()

    def add_step(
        self,
        step_index: int,
        spans: Iterable[TimedAction],
        collectives: Iterable[TimedCollective] = (),
    ) -> None:
        """Appends the actions of one step, and the collectives inside them."""
        events = [self._event(step_index, span) for span in spans]
        events += [self._collective(step_index, collective) for collective in collectives]
        if not events:
            return
        self._file.seek(-len(_END), SEEK_END)
        self._file.write(b",\n" + _lines(events) + _END)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TimelineWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _event(self, step_index: int, span: TimedAction) -> dict[str, Any]:
        action = span.action
        kind = _KIND_NAMES[action.kind]
        arguments = {"kind": kind, "microbatch": action.microbatch_index, "step": step_index}
        return self._complete(str(action), kind, span.start_s, span.end_s, arguments)

    def _collective(self, step_index: int, collective: TimedCollective) -> dict[str, Any]:
        name = f"{collective.kind} over {collective.axis}"
        arguments = {
            "kind": collective.kind,
            "ranks": list(collective.ranks),
            "elements": collective.num_elements,
            "step": step_index,
        }
        return self._complete(name, "collective", collective.start_s, collective.end_s, arguments)

    def _complete(
        self, name: str, category: str, start_s: float, end_s: float, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": round((start_s + self._clock_offset_s) * 1e6, 3),
            "dur": round((end_s - start_s) * 1e6, 3),
            **self._ids,
            "args": arguments,
        }


def make_folder(directory: str | PathLike[str]) -> None:
    """
    Raises:
        OSError: it cannot be made, or no file in it.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def merge_timelines(directory: str | PathLike[str], *, num_ranks: int | None = None) -> Path:
    """Merges the ranks' files into ``timeline.json``, its time starting at 0.

    Args:
        directory: where the ranks wrote.
        num_ranks: take files of lower ranks only, since others are left from an earlier, larger
            run. None: all files.

    Returns:
        The path of the merged file.
    """
    files = {int(file.stem.removeprefix("rank")): file for file in Path(directory).glob("rank*.json")}
    events = [
        event
        for rank, file in sorted(files.items())
        if num_ranks is None or rank < num_ranks
        for event in _read(file)
    ]
    if not events:
        raise ValueError(
            f"{str(directory)!r} holds no rank<r>.json to merge: "
            "name the directory that the ranks wrote their timelines to"
        )
    begin = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        if event["ph"] == "X":
            event["ts"] = round(event["ts"] - begin, 3)
    path = Path(directory) / "timeline.json"
    # Several ranks may merge at once: each writes beside the file, then puts a whole one there.
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_bytes(b'{"displayTimeUnit": "ms", "traceEvents": [\n' + _lines(events) + b"\n]}\n")
    temporary.replace(path)
    return path


def _lines(events: Iterable[dict[str, Any]]) -> bytes:
    return ",\n".join(map(json.dumps, events)).encode()


def _read(file: Path) -> list[dict[str, Any]]:
    """The file's events, line by line, without what a killed process did not finish."""
    events = []
    for line in file.read_bytes().split(b"\n"):
        if line in (b"", b"[", b"]"):
            continue
        try:
            events.append(json.loads(line.removesuffix(b",")))
        except ValueError:
            break
    return events
