"""Order files of torch's pipelines, written by torch itself, in our simulator: ours take no longer."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules

from smp_lite.plan.order.schedules import Work
from smp_lite.plan.order.torch_orders import merged_order, read_order_file, read_rows
from smp_lite.plan.step.actions import ActionKind
from smp_lite.plan.step.lowering import lower
from smp_lite.plan.step.schedule_text import compute_lists
from smp_lite.plan.step.segments import SegmentGraph, build_graph
from smp_lite.plan.step.simulate import ScheduleDeadlock, Simulation, simulate
from tests.planning import chain, command, plan

SIZES = [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (6, 12), (8, 16)]


def order_file(name: str, num_stages: int, num_microbatches: int, folder: Path) -> str:
    """What torch's schedule writes; it is made without processes, of stages that know their numbers only."""
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    stages: list[Any] = [
        SimpleNamespace(
            group_size=num_stages,
            group_rank=0,
            num_stages=2 * num_stages,
            stage_index=index,
            is_last=index == 2 * num_stages - 1,
            submod=None,
        )
        for index in (0, 2 * num_stages - 1 if is_v else num_stages)
    ]
    if not hasattr(torch_schedules, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    schedule = getattr(torch_schedules, name)(stages, num_microbatches)
    path = folder / "order.csv"
    has_formats = "format" in inspect.signature(schedule._dump_csv).parameters  # torch 2.8: this one alone
    schedule._dump_csv(str(path), **({"format": "compute_only"} if has_formats else {}))
    return path.read_text()


def pieces(num_stages: int, *, is_v: bool) -> SegmentGraph:
    """Two visits of each stage, the last stage's too, F = B = W."""
    row = list(range(num_stages))
    way = [*row, *reversed(row)] if is_v else [*row, *row]
    return build_graph(
        [
            replace(command(stage, [i - 1] if i else [], i, weight_cost=1.0), unit=i)
            for i, stage in enumerate(way)
        ],
        roots=[len(way) - 1],
    )


def replayed(text: str, graph: SegmentGraph, num_microbatches: int) -> Simulation:
    lists = read_order_file(text)
    works = [Work(m, graph) for m in range(num_microbatches)]
    schedule = lower(merged_order(lists, works), works, len(lists))
    assert compute_lists(schedule) == compute_lists(lists)
    return simulate(schedule, works)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("ScheduleInterleaved1F1B", "interleaved_virtual"),
        ("ScheduleInterleavedZeroBubble", "zero_bubble"),
        ("ScheduleZBVZeroBubble", "zero_bubble_v"),
        ("ScheduleDualPipeV", "zero_bubble_v"),
    ],
)
def test_ours_takes_no_longer(
    name: str, pipeline: str, num_stages: int, num_microbatches: int, tmp_path: Path
) -> None:
    graph = pieces(num_stages, is_v=pipeline == "zero_bubble_v")
    theirs = replayed(order_file(name, num_stages, num_microbatches, tmp_path), graph, num_microbatches)
    ours = plan(graph, num_microbatches, pipeline=pipeline, active_microbatches=2 * num_stages).simulate()
    # The same work, whichever backwards are whole.
    assert theirs.work == pytest.approx(ours.work) == pytest.approx(6 * num_stages * num_microbatches)
    assert ours.makespan <= theirs.makespan + 1e-6


def test_a_file_of_each_kind_of_action() -> None:
    text = "0F0,0F1,(3F0;3B0)OVERLAP_F_B,3F1,3I1,,3W1,0B0,0I1,0W1\n,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"
    lists = read_order_file(text)
    assert compute_lists(lists).splitlines() == [
        "0F0 0F1 0F0.1 0B0.1 0F1.1 0B1.1 0W1.1 0B0 0B1 0W1",
        "1F0 1F0.1 1F1 1F1.1 1B0.1 1B0 1B1.1 1B1",
    ]


def test_lists_that_wait_for_one_another() -> None:
    lists = read_order_file("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleDeadlock, match="the lists cannot end: stages wait at 0B0, 1F1"):
        merged_order(lists, [Work(m, chain([0, 1])) for m in range(2)])


def test_a_whole_backward_costs_as_much_as_its_parts() -> None:
    graph = chain([0, 1], weight_share=1.0)
    works = [Work(m, graph) for m in range(2)]
    lists = read_rows([["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]])
    found = simulate(lower(merged_order(lists, works), works, 2), works)
    lengths = {str(t.action): t.end - t.start for stage in found.timings for t in stage}
    assert (lengths["0B0"], lengths["0B1"], lengths["0W1"]) == (2, 1, 1)
    assert sum(action.kind is ActionKind.WEIGHT for actions in lists for action in actions) == 3


@pytest.mark.parametrize("entry", ["0X1", "0F", "0SEND_F1", "(0F1;0B1", "(0F1)SOMETHING"])
def test_an_entry_that_is_none_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="is not an action of an order file"):
        read_order_file(f"0F0,{entry}\n")


def test_a_stage_of_two_ranks_is_named() -> None:
    with pytest.raises(ValueError, match="stage 1 is on rank 0 and on rank 1"):
        read_order_file("0F0,1F0\n1F1\n")


def test_what_the_graph_has_not_is_named() -> None:
    with pytest.raises(ValueError, match=r"0F0\.1 is in a list, but microbatch 0 has no such segment"):
        merged_order(read_order_file("0F0,1F0\n"), [Work(0, chain([0]))])
