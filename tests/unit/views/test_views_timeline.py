"""The trace files: format, what a killed process leaves, merging."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_lite as smp
from smp_lite.plan.step.actions import Action
from smp_lite.steps.step_timeline import TRACE_VARIABLE
from smp_lite.views.timeline import TimelineWriter, merge_timelines
from tests.api_support import batch, build, in_memory, train, wrap


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model of two stages after one step whose timeline goes to ``tmp_path``."""
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    smp.reset()
    in_memory()
    model, _ = wrap(build(), partial(torch.optim.SGD, lr=0.1))
    train(model, *batch())
    yield model
    atexit.unregister(model._timeline.close)
    smp.reset()


@dataclass(frozen=True)
class Ran:
    action: Action
    start_s: float
    end_s: float


def ran(name: str, start_s: float, end_s: float) -> Ran:
    return Ran(Action.parse(name), start_s, end_s)


def complete_events(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]


def test_file_of_one_rank(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path / "new", rank=2, stage_index=1, replica_index=1) as writer:
        writer.add_step(5, [ran("1F0", 10.0, 10.25), ran("1B3.1", 10.5, 11.0)])
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for event in json.loads((tmp_path / "new" / "rank2.json").read_text()):
        (events if event["ph"] == "X" else metadata).append(event)
    assert events == [
        {
            "name": "1F0",
            "cat": "forward",
            "ph": "X",
            "ts": 10_000_000.0,
            "dur": 250_000.0,
            "pid": 1,
            "tid": 2,
            "args": {"kind": "forward", "microbatch": 0, "step": 5},
        },
        {
            "name": "1B3.1",
            "cat": "backward",
            "ph": "X",
            "ts": 10_500_000.0,
            "dur": 500_000.0,
            "pid": 1,
            "tid": 2,
            "args": {"kind": "backward", "microbatch": 3, "step": 5},
        },
    ]
    assert {(e["ph"], e["pid"], e["tid"]) for e in metadata} == {("M", 1, 2)}
    assert {e["name"]: e["args"] for e in metadata} == {
        "process_name": {"name": "model replica 1"},
        "process_sort_index": {"sort_index": 1},
        "thread_name": {"name": "rank 2 (stage 1)"},
        "thread_sort_index": {"sort_index": 2},
    }


def test_file_is_whole_after_each_step(tmp_path: Path) -> None:
    """Nothing is closed and nothing flushed from outside."""
    writer = TimelineWriter(tmp_path, rank=0, stage_index=0)
    lengths = []
    for step_index in range(3):
        writer.add_step(step_index, [ran("0F0", step_index, step_index + 0.5)])
        lengths.append(len(json.loads((tmp_path / "rank0.json").read_text())))
    writer.add_step(3, [])
    lengths.append(len(json.loads((tmp_path / "rank0.json").read_text())))
    writer.close()
    assert lengths == [5, 6, 7, 7]


def test_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from types import SimpleNamespace\n"
        "from smp_lite.plan.step.actions import Action\n"
        "from smp_lite.views.timeline import TimelineWriter\n"
        f"writer = TimelineWriter({str(tmp_path)!r}, rank=0, stage_index=0)\n"
        "span = SimpleNamespace(action=Action.parse('0F0'), start_s=1.0, end_s=2.0)\n"
        "writer.add_step(0, [span])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    names = [event["name"] for event in json.loads((tmp_path / "rank0.json").read_text())]
    assert names[-1] == "0F0"


def test_merged_file_has_a_track_for_each_rank(tmp_path: Path) -> None:
    for rank, (replica_index, stage_index) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        with TimelineWriter(
            tmp_path, rank=rank, stage_index=stage_index, replica_index=replica_index
        ) as writer:
            writer.add_step(0, [ran(f"{stage_index}F0", 100 + rank, 100.5 + rank)])
    path = merge_timelines(tmp_path)
    assert path == tmp_path / "timeline.json"
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in complete_events(path)] == [
        (0, 0, "0F0", 0.0, 500_000.0),
        (0, 1, "1F0", 1_000_000.0, 500_000.0),
        (1, 2, "0F0", 2_000_000.0, 500_000.0),
        (1, 3, "1F0", 3_000_000.0, 500_000.0),
    ]
    tracks = {
        e["tid"]: e["args"]["name"]
        for e in json.loads(path.read_text())["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert tracks == {
        0: "rank 0 (stage 0)",
        1: "rank 1 (stage 1)",
        2: "rank 2 (stage 0)",
        3: "rank 3 (stage 1)",
    }


def test_ranks_merge_in_numeric_order(tmp_path: Path) -> None:
    for rank in (10, 9):
        with TimelineWriter(tmp_path, rank=rank, stage_index=0) as writer:
            writer.add_step(0, [ran("0F0", 1, 2)])
    assert [event["tid"] for event in complete_events(merge_timelines(tmp_path))] == [9, 10]


def test_offset_puts_hosts_on_one_clock(tmp_path: Path) -> None:
    for rank, (start_s, clock_offset_s) in enumerate([(5.0, 100.0), (70.5, 35.0)]):
        with TimelineWriter(tmp_path, rank=rank, stage_index=rank, clock_offset_s=clock_offset_s) as writer:
            writer.add_step(0, [ran("0F0", start_s, start_s + 1)])
    assert [e["ts"] for e in complete_events(merge_timelines(tmp_path))] == [0.0, 500_000.0]


@pytest.mark.parametrize("num_bytes_lost", [1, 3, 30])
def test_torn_file_is_merged_up_to_the_tear(tmp_path: Path, num_bytes_lost: int) -> None:
    with TimelineWriter(tmp_path, rank=0, stage_index=0) as writer:
        writer.add_step(0, [ran("0F0", 0, 1), ran("0F1", 1, 2), ran("0F2", 2, 3)])
    file = tmp_path / "rank0.json"
    os.truncate(file, file.stat().st_size - num_bytes_lost)
    names = [event["name"] for event in complete_events(merge_timelines(tmp_path))]
    # Up to three bytes are the closing bracket's.
    assert names == ["0F0", "0F1", "0F2"][: 3 if num_bytes_lost <= 3 else 2]


def test_files_of_an_earlier_larger_run_can_be_left_out(tmp_path: Path) -> None:
    for rank in range(3):
        with TimelineWriter(tmp_path, rank=rank, stage_index=0) as writer:
            writer.add_step(0, [ran("0F0", 1, 2)])
    path = merge_timelines(tmp_path, num_ranks=2)
    assert [event["tid"] for event in complete_events(path)] == [0, 1]


def test_rank_starts_its_file_anew(tmp_path: Path) -> None:
    for name in ("0F0", "0F1"):
        with TimelineWriter(tmp_path, rank=0, stage_index=0) as writer:
            writer.add_step(0, [ran(name, 1, 2)])
    assert [event["name"] for event in complete_events(merge_timelines(tmp_path))] == ["0F1"]


def test_nothing_to_merge_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no rank<r>\.json to merge"):
        merge_timelines(tmp_path)


def test_a_forked_child_leaves_the_timeline_to_its_parent(tmp_path: Path, traced: Any) -> None:
    child = os.fork()
    if child == 0:
        traced._timeline.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not (tmp_path / "timeline.json").exists()
    traced._timeline.close()
    assert complete_events(tmp_path / "timeline.json")
