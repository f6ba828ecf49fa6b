"""The choice among shapes and schedules: by time, within a bound, the same every time."""

from __future__ import annotations

import pytest

from smp_lite.plan.choosing.choice import Alternative, Choice, choose, microbatches_held
from smp_lite.plan.order.schedules import Policy, Work, compute_order
from smp_lite.plan.step.actions import ActionKind
from smp_lite.plan.step.lowering import Schedule, lower
from smp_lite.plan.step.segments import build_graph
from smp_lite.plan.step.simulate import simulate
from smp_lite.plan.step.work import ActionCosts
from tests.planning import chain, command, plan

ONCE = chain([0, 1, 2, 3], [2.0] * 4, weight_share=1.0)
ROUNDS = chain([0, 1, 2, 3] * 2, weight_share=1.0)
V = chain([0, 1, 2, 3, 3, 2, 1, 0], weight_share=1.0)


def alternatives(active: int = 8) -> list[Alternative]:
    return [
        Alternative("1F1B", ONCE, Policy("interleaved", active_microbatches=active)),
        Alternative("GPipe", ONCE, Policy("simple", active_microbatches=active)),
        Alternative("ZB-H1", ONCE, Policy("zero_bubble", active_microbatches=active)),
        Alternative("interleaved", ROUNDS, Policy("interleaved_virtual", active_microbatches=active)),
        Alternative("ZB-V", V, Policy("zero_bubble_v", active_microbatches=active)),
    ]


def names(choice: Choice) -> list[str]:
    return [outcome.alternative.name for outcome in choice.outcomes]


def test_the_fastest_within_what_1f1b_needs() -> None:
    choice = choose(alternatives(), 8)
    assert names(choice) == ["ZB-V", "ZB-H1", "interleaved", "1F1B", "GPipe"]
    assert choice.best is not None
    assert choice.best.makespan == pytest.approx(8 * 6 + 3)
    assert choice.best.peaks == (4, 4, 4, 4)
    excluded = {outcome.alternative.name: outcome.excluded for outcome in choice.outcomes if outcome.excluded}
    assert excluded == {"GPipe": "stage 0 needs 8, 4 allowed"}


def test_limits_of_ones_own() -> None:
    choice = choose(alternatives(), 8, limits=[6, 5, 4, 3])
    assert choice.best is not None
    assert choice.best.alternative.name == "interleaved"
    assert names(choice)[1] == "1F1B"
    wide = choose(alternatives(), 8, limits=[8] * 4)
    assert not any(outcome.excluded for outcome in wide.outcomes)
    assert [round(outcome.makespan, 6) for outcome in wide.outcomes] == [51, 54, 57, 66, 66]


def test_nothing_fits() -> None:
    choice = choose(alternatives(), 8, limits=[0.5] * 4)
    assert choice.best is None
    assert all(outcome.excluded for outcome in choice.outcomes)


def test_peaks_may_be_given() -> None:
    def peaks_of(alternative: Alternative, schedule: Schedule) -> list[float]:
        return [100.0 if alternative.name == "ZB-V" else 1.0] * len(schedule)

    choice = choose(alternatives(), 8, peaks_of=peaks_of, limits=[10] * 4, peak_text="{:.0f} B".format)
    assert choice.best is not None
    assert choice.best.alternative.name == "ZB-H1"
    assert choice.outcomes[-1].excluded == "stage 0 needs 100 B, 10 B allowed"


def test_messages_count() -> None:
    """A V and rounds send twice as much: where that is slow, whole stages win."""
    choice = choose(alternatives(), 8, latency_s=3.0, limits=[8] * 4)
    assert choice.best is not None
    assert choice.best.alternative.graph is ONCE


def test_measured_costs_count() -> None:
    """Where W are nearly nothing, ZB-H1 gains nearly nothing; where a stage is slow, it counts."""
    costs = {(stage, 0): ActionCosts(2.0, 3.9, 0.1) for stage in range(4)}
    policies = [Policy("interleaved", active_microbatches=8), Policy("zero_bubble", active_microbatches=8)]
    one, other = (
        choose([Alternative("x", ONCE, policy, costs)], 8).outcomes[0].makespan for policy in policies
    )
    assert one == pytest.approx(11 * 6)
    assert one - 3 * 0.1 * 2 - 1e-6 <= other < one
    slow = costs | {(2, 0): ActionCosts(20.0, 39.0, 1.0)}
    (outcome,) = choose([Alternative("x", ONCE, policies[0], slow)], 8).outcomes
    assert outcome.makespan > 8 * 60


def test_the_order_is_chosen_by_the_measured_costs() -> None:
    """With a W as long as by far the longest action it waits, with recorded costs it need not."""
    costs = {(stage, 0): ActionCosts(1.0, 1.0 + stage, 5.0) for stage in range(4)}
    works = [Work(m, ONCE) for m in range(8)]
    policy = Policy("zero_bubble", active_microbatches=8)
    assert compute_order(works, policy, costs=costs) != compute_order(works, policy)


def test_the_order_is_chosen_by_the_time_of_messages() -> None:
    """Megatron-LM's order has a forward more between a stage's result and its use than the least."""
    works = [Work(m, ROUNDS) for m in range(8)]
    policy = Policy("interleaved_virtual", active_microbatches=8)

    def makespan(latency: float) -> float:
        schedule = lower(compute_order(works, policy, latency=latency), works, 4)
        return simulate(schedule, works, latency_s=0.5).makespan

    assert makespan(0.5) < makespan(0.0) - 1


def test_what_ends_with_its_forward_is_not_held() -> None:
    frozen = [command(0, [], 0), command(1, [0], 1)]
    graph = build_graph(frozen, roots=[])
    assert microbatches_held(plan(graph, 3).schedule) == (0.0, 0.0)
    assert microbatches_held(plan(ONCE, 8).schedule) == (4, 3, 2, 1)


def test_the_table() -> None:
    header, rule, *rows = choose(alternatives(), 8).table(time="{:.0f} ms".format).splitlines()
    assert header.split() == ["alternative", "step", "idle", "peak", "note"]
    assert set(rule) == {"-", " "}
    assert rows[0].split() == ["ZB-V", "51", "ms", "5.9%", "4", "taken"]
    assert rows[-1].split(maxsplit=5) == ["GPipe", "66", "ms", "27.3%", "8", "stage 0 needs 8, 4 allowed"]


def test_two_of_one_name_and_too_few_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="several alternatives are called '1F1B'"):
        choose([*alternatives(), alternatives()[0]], 2)
    with pytest.raises(ValueError, match="2 limits for the 4 stages of '1F1B'"):
        choose(alternatives(), 2, limits=[1, 1])


def test_the_schedule_of_the_best_is_there() -> None:
    best = choose(alternatives(), 8).best
    assert best is not None
    weights = [a for actions in best.schedule for a in actions if a.kind is ActionKind.WEIGHT]
    assert len(weights) == 8 * len(V.segments)
