"""How many pieces each stage gets: by time, within a bound, no more than are worth it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smp_lite.plan.choosing.pieces import MemoryEstimate, ModelCosts, estimate_memory, pieces_graph
from smp_lite.plan.choosing.shape_choice import (
    ShapeChoice,
    Unit,
    candidate_of,
    choose_shape,
    shape_candidates,
)
from smp_lite.plan.order.schedules import Policy
from smp_lite.plan.partitioning.partition import ModuleCost, Partition
from smp_lite.plan.partitioning.solver import solve_partition
from smp_lite.plan.partitioning.virtual_stages import piece_stages
from tests.planning import chain, plan

POLICY = Policy("interleaved", active_microbatches=8)
NOTHING = Unit("s", 1.0, 0.0, float("inf"), 0.0, 0.0, "made up")
SLOW = replace(NOTHING, latency=4.0)
STATE, KEPT, LOSS = 1_000, 100, 7


def tree(
    num_blocks: int, *, kept: int, loss: int = 0, tied: bool = False, compute: float = 1.0
) -> ModuleCost:
    """Blocks in a row; the first and the last share their parameter if tied."""
    blocks = []
    for number in range(num_blocks):
        shares = tied and number in (0, num_blocks - 1)
        blocks.append(
            ModuleCost(
                f"blocks.{number}",
                ("shared.w" if shares else f"blocks.{number}.w",),
                1,
                250,
                STATE,
                kept + (loss if number == num_blocks - 1 else 0),
                compute,
                50,
                order=number + 2,
            )
        )
    return ModuleCost("", order=0, children=(ModuleCost("blocks", children=tuple(blocks)),))


def model(num_blocks: int = 16, **options: Any) -> ModelCosts:
    return ModelCosts(
        tree(num_blocks, kept=4 * KEPT, loss=LOSS, **options),
        tree(num_blocks, kept=KEPT, **options),
        tree(num_blocks, kept=0, loss=LOSS, **options),
    )


def choice_of(
    costs: ModelCosts, num_stages: int = 4, *, unit: Unit = NOTHING, limit: int | None = None
) -> ShapeChoice:
    candidates, notes = shape_candidates(costs, num_stages, 8, memory_weight=0.5)
    return choose_shape(candidates, 8, POLICY, unit, memory_limit=limit, notes=notes)


def taken_name(choice: ShapeChoice) -> str:
    assert choice.choice.best is not None
    return choice.choice.best.alternative.name


def test_equal_costs_take_several_pieces() -> None:
    choice = choice_of(model())
    assert taken_name(choice) == "zero_bubble, 4 pieces"
    assert choice.taken is not None
    assert choice.taken.pipelines == ("interleaved_virtual", "zero_bubble")
    assert choice.taken.pipeline == "zero_bubble"
    stages = [choice.taken.partition.stage_of[f"blocks.{i}"] for i in range(16)]
    assert stages == [*piece_stages(4, 4)]
    assert len(choice.outcomes) == 10 and not choice.notes


def test_each_message_is_time_so_there_and_back_wins() -> None:
    choice = choice_of(model(), unit=replace(NOTHING, latency=0.25))
    assert taken_name(choice) == "zero_bubble_v, 2 pieces, v"
    assert choice.taken is not None
    assert choice.taken.pipelines == ("interleaved", "zero_bubble_v")
    stages = [choice.taken.partition.stage_of[f"blocks.{i}"] for i in range(16)]
    assert stages == [stage for stage in piece_stages(4, "v") for _ in range(2)]


def test_slow_messages_take_one_piece() -> None:
    choice = choice_of(model(), unit=SLOW)
    assert choice.taken is not None
    assert taken_name(choice) == "zero_bubble, 1 piece"
    assert choice.taken.partition == solve_partition(model().balanced, 4, memory_weight=0.5)


def test_slow_bytes_take_one_piece() -> None:
    assert taken_name(choice_of(model(), unit=replace(NOTHING, bytes_per_unit=10.0))).endswith("1 piece")


def test_what_splitting_takes_counts_so_small_modules_stay_whole() -> None:
    """Each block takes 3.5 and a whole 10 % more where its backward is split."""
    small = choice_of(model(), unit=replace(NOTHING, split=0.35))
    assert taken_name(small) == "interleaved_virtual, 4 pieces"
    free = {o.alternative.name: o.makespan for o in choice_of(model()).outcomes}
    found = {o.alternative.name: o.makespan for o in small.outcomes}
    assert found["interleaved, 1 piece"] == free["interleaved, 1 piece"]
    # Four blocks a stage, eight microbatches: nothing can hide it.
    assert found["zero_bubble, 1 piece"] >= free["zero_bubble, 1 piece"] + 8 * 4 * 0.35 - 1e-6


def test_what_the_library_does_for_each_action_and_message_counts() -> None:
    free, found = (
        {o.alternative.name: o.makespan for o in choice_of(model(), unit=unit).outcomes}
        for unit in (NOTHING, replace(NOTHING, action=0.125))
    )
    more = {name: found[name] - free[name] for name in free}
    # A forward and a backward of a piece in the middle: themselves, and a message at each end.
    assert more["interleaved, 1 piece"] >= 8 * 2 * 3 * 0.125
    assert more["interleaved_virtual, 4 pieces"] > 3 * more["interleaved, 1 piece"]


def test_little_is_not_worth_more_pieces() -> None:
    """A bubble of less than 1 %, whatever the pieces."""
    candidates, _ = shape_candidates(model(32), 2, 64, memory_weight=0.5)
    choice = choose_shape(candidates, 64, POLICY, NOTHING, memory_limit=10**9)
    assert taken_name(choice) == "zero_bubble, 1 piece"
    best, faster = choice.outcomes[:2]
    assert best.makespan * 0.98 < faster.makespan < best.makespan
    assert "% faster, for more pieces: too little" in choice.table().splitlines()[3]


def test_what_1f1b_needs_is_the_bound() -> None:
    choice = choice_of(model(12))
    peaks = {outcome.alternative.name: max(outcome.peaks) for outcome in choice.outcomes}
    bound = peaks["interleaved, 1 piece"] * 1.05
    assert {o.alternative.name for o in choice.outcomes if o.excluded} == {
        name for name, peak in peaks.items() if peak > bound
    }
    assert peaks["zero_bubble_v, 2 pieces, v"] > bound > peaks["zero_bubble, 1 piece"]


def test_a_limit_excludes() -> None:
    """1F1B and ZB-H1 hold four microbatches of four blocks; a stage's state is that of four blocks."""
    costs = model()
    held = 4 * STATE + 4 * 4 * KEPT
    free = choice_of(costs, limit=10 * held)
    assert not any(outcome.excluded for outcome in free.outcomes)
    tight = choice_of(costs, limit=held)
    assert {name(o) for o in tight.outcomes if not o.excluded} >= {"interleaved, 1 piece"}
    assert all(max(o.peaks) > held for o in tight.outcomes if o.excluded)
    assert "stage 0 needs" in tight.table() and f"{held / 1024:.1f} KiB allowed" in tight.table()


def name(outcome: Any) -> str:
    return str(outcome.alternative.name)


def test_a_limit_that_one_schedule_keeps_leaves_one() -> None:
    """Until a W has run its microbatch is held: the last stage holds as many, and a loss besides."""
    costs = model()
    candidate = candidate_of(costs, solve_partition(costs.balanced, 4, memory_weight=0.5))
    assert candidate.pipelines == ("interleaved", "zero_bubble")
    choice = choose_shape([candidate], 8, POLICY, NOTHING, memory_limit=4 * STATE + 4 * 4 * KEPT)
    assert choice.taken is not None
    assert (choice.taken.pipeline, choice.taken.pipelines) == ("interleaved", ("interleaved",))


def test_nothing_fits() -> None:
    choice = choice_of(model(), limit=4 * STATE)
    assert choice.taken is None
    assert all(outcome.excluded for outcome in choice.outcomes)


def test_too_few_modules_are_said() -> None:
    choice = choice_of(model(4))
    assert taken_name(choice).endswith("1 piece")
    last = choice.table().splitlines()[-1]
    assert last == "not enough modules to cut apart for 2 pieces, 3 pieces, 4 pieces, 2 pieces, v"


def test_what_is_not_tried_of_large_steps_is_said() -> None:
    for num_microbatches, names, said in (
        (800, ["1 piece", "2 pieces", "2 pieces, v"], "3 pieces, 4 pieces"),
        (4_000, ["1 piece"], "2 pieces, 3 pieces, 4 pieces, 2 pieces, v"),
    ):
        candidates, notes = shape_candidates(model(), 4, num_microbatches, memory_weight=0.5)
        assert [candidate.name for candidate in candidates] == names
        assert notes == [f"not tried, since the step is large (set virtual_stages for it): {said}"]


def test_gradients_of_shared_parameters_stay_whole() -> None:
    costs = model(8, tied=True, compute=2.0)
    partition = solve_partition(costs.balanced, 2, memory_weight=0.5)
    segments = pieces_graph(costs.balanced, partition).segments
    assert [s.stage_index for s in segments] == [0, 1, 0]  # the head is where the embedding is
    assert sum(s.forward_cost for s in segments) == 16
    assert sum(s.weight_cost for s in segments) == 12
    graph = pieces_graph(costs.balanced, partition)
    assert list(graph.value_bytes.values()) == [50, 50]


def test_memory_is_what_microbatches_hold_and_the_loss_until_its_backward() -> None:
    costs = model(4)
    partition = Partition(2, {"": 0, "blocks": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1})
    memory = estimate_memory(costs, partition)
    assert memory == MemoryEstimate(
        (2 * STATE, 2 * STATE), {(0, 0): 2 * KEPT, (1, 0): 2 * KEPT}, {(0, 0): 0, (1, 0): LOSS}
    )
    graph = pieces_graph(costs.balanced, partition)
    assert memory.peaks(plan(graph, 4).schedule) == (2 * STATE + 4 * KEPT, 2 * STATE + 2 * KEPT + LOSS)
    everything = plan(graph, 4, pipeline="simple").schedule
    assert memory.peaks(everything) == (2 * STATE + 8 * KEPT, 2 * STATE + 8 * KEPT + 4 * LOSS)


def test_what_waits_for_its_w_is_kept_and_the_loss_is_not() -> None:
    memory = MemoryEstimate((0, 0), {(0, 0): 0, (1, 0): 10}, {(1, 0): 1})
    late = plan(chain([0, 1], weight_share=1.0), 4, pipeline="zero_bubble").schedule
    last = [str(action) for action in late[1] if action.value is None]
    assert last[:5] == ["1F0", "1B0", "1F1", "1B1", "1W0"]
    assert memory.peaks(late) == (0, 21)


def test_memory_of_other_visits_than_there_are_pieces_is_shared_out() -> None:
    memory = MemoryEstimate((0, 0), {(0, 0): 10, (1, 0): 10}, {})
    again = plan(chain([0, 1, 0, 1]), 1).schedule
    assert memory.peaks(again) == (10, 10)


@pytest.mark.parametrize(
    ("stages", "pipelines"),
    [
        ((0, 0, 1, 1), ("interleaved", "zero_bubble")),
        ((0, 1, 0, 1), ("interleaved_virtual", "zero_bubble")),
        ((0, 1, 1, 0), ("interleaved", "zero_bubble_v")),
    ],
)
def test_a_given_partition_has_the_pipelines_of_its_shape(
    stages: tuple[int, ...], pipelines: tuple[str, ...]
) -> None:
    places = {f"blocks.{i}": stage for i, stage in enumerate(stages)}
    partition = Partition(2, {"": 0, "blocks": 0, **places})
    assert candidate_of(model(4), partition).pipelines == pipelines
    assert candidate_of(model(4), partition, ["simple"]).pipelines == ("simple",)
