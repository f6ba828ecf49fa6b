"""Figures, warnings and the table that a person sees."""

from __future__ import annotations

import pytest

from smp_lite.plan.partitioning.partition import ModuleCost, Partition
from smp_lite.plan.partitioning.report import (
    format_partition_table,
    partition_warnings,
    stage_summaries,
)


def _leaf(name: str, order: int, count: int, compute: float, **costs: object) -> ModuleCost:
    return ModuleCost(
        name=name,
        parameter_count=count,
        parameter_bytes=4 * count,
        state_bytes=16 * count,
        activation_bytes=1024,
        compute=compute,
        order=order,
        **({"parameter_ids": (f"{name}.weight",)} | costs),
    )


BLOCKS = tuple(
    ModuleCost(
        name=f"blocks.{i}",
        order=10 * i + 2,
        children=(
            _leaf(f"blocks.{i}.attention", 10 * i + 3, 4096, 3.0),
            ModuleCost(name=f"blocks.{i}.dropout", order=10 * i + 4),
            _leaf(f"blocks.{i}.mlp", 10 * i + 5, 8192, 6.0),
        ),
    )
    for i in range(4)
)
GPT = ModuleCost(
    name="",
    order=0,
    parameter_ids=("position",),
    parameter_count=512,
    parameter_bytes=2048,
    state_bytes=8192,
    children=(
        _leaf("embedding", 1, 16384, 0.0),
        ModuleCost(name="blocks", children=BLOCKS),
        _leaf("norm", 90, 128, 0.0),
        _leaf("head", 91, 16384, 4.0, parameter_ids=("embedding.weight",)),
    ),
)


def _place(num_stages: int, prefixes: dict[str, int]) -> Partition:
    """Each module on the stage of its longest prefix in `prefixes`, else 0."""
    stage_of = {}
    for module in GPT.walk():
        found = [p for p in prefixes if module.name == p or module.name.startswith(p + ".")]
        stage_of[module.name] = prefixes[max(found, key=len)] if found else 0
    return Partition(num_stages, stage_of)


SPLIT = _place(3, {"blocks.1.mlp": 1, "blocks.2": 1, "blocks.3": 1})

TABLE = """\
stage  modules                       parameters      bytes      state  activations   flops
-----  ----------------------------  ----------  ---------  ---------  -----------  ------
    0  embedding, blocks.0-1 | head      40,960  160.0 KiB  640.0 KiB      6.0 KiB   55.0%
    1  blocks.2-3, norm                  24,704   96.5 KiB  386.0 KiB      5.0 KiB   45.0%
    2  -                                      0        0 B        0 B          0 B    0.0%
-----  ----------------------------  ----------  ---------  ---------  -----------  ------
total                                    65,664  256.5 KiB    1.0 MiB     11.0 KiB  100.0%"""


def test_table() -> None:
    plain = ModuleCost(name="", order=0, children=GPT.children)
    partition = _place(3, {"blocks.2": 1, "blocks.3": 1, "norm": 1})
    assert format_partition_table(stage_summaries(plain, partition)) == TABLE


def test_the_table_shows_pieces_and_a_few_of_many_modules() -> None:
    split = _place(2, {"blocks.1.mlp": 1, "blocks.2": 0, "blocks.3": 1, "norm": 1})
    summaries = stage_summaries(GPT, split)
    assert summaries[0].pieces == (
        ("(root) (own)", "embedding", "blocks.0", "blocks.1.attention"),
        ("blocks.2",),
        ("head",),
    )
    assert "  (root) (own), embedding, blocks.0, blocks.1.attention | blocks.2 | head  " in (
        format_partition_table(summaries)
    )
    root = ModuleCost("", order=0, children=tuple(_leaf(name, 1, 1, 1.0) for name in "abcdef"))
    table = format_partition_table(
        stage_summaries(root, Partition(2, dict.fromkeys("abcde", 0) | {"f": 1, "": 0}))
    )
    assert "a, b, c, d, 1 more " in table


def test_modules_are_the_largest_whole_subtrees() -> None:
    modules = [summary.modules for summary in stage_summaries(GPT, SPLIT)]
    assert modules == [
        ("(root) (own)", "embedding", "blocks.0", "blocks.1.attention", "norm", "head"),
        ("blocks.1.mlp", "blocks.2-3"),
        (),
    ]


def test_separate_runs_of_one_list_are_separate_ranges() -> None:
    partition = _place(2, {"blocks.2": 1})
    modules = [summary.modules for summary in stage_summaries(GPT, partition)]
    assert modules[0][2:4] == ("blocks.0-1", "blocks.3")
    assert modules[1] == ("blocks.2",)


def test_a_range_passes_over_modules_without_parameters() -> None:
    layers = [_leaf("0", 1, 1, 1.0), ModuleCost("1", order=2), _leaf("2", 3, 1, 1.0)]
    layers += [ModuleCost("3", order=4), _leaf("4", 5, 1, 1.0)]
    root = ModuleCost("", order=0, children=tuple(layers))
    stage_of = {"": 0, "0": 0, "1": 0, "2": 0, "3": 0, "4": 1}
    modules = [summary.modules for summary in stage_summaries(root, Partition(2, stage_of))]
    assert modules == [("0-2",), ("4",)]


def test_totals_count_a_shared_parameter_once() -> None:
    summaries = stage_summaries(GPT, SPLIT)
    count = 512 + 16384 + 4 * 12288 + 128
    assert sum(summary.parameter_count for summary in summaries) == count
    assert sum(summary.parameter_bytes for summary in summaries) == 4 * count
    assert sum(summary.state_bytes for summary in summaries) == 16 * count
    assert sum(summary.cost(0.3) for summary in summaries) == pytest.approx(1)


def test_the_figures_of_one_stage() -> None:
    stage = stage_summaries(GPT, SPLIT)[1]
    assert stage.parameter_count == 8192 + 2 * 12288
    assert stage.activation_bytes == 5 * 1024
    assert stage.compute_share == pytest.approx(24 / 40)
    assert stage.cost(0.0) == pytest.approx(24 / 40)
    assert stage.cost(1.0) == pytest.approx(stage.memory_share)


def test_a_model_on_one_stage_is_one_entry() -> None:
    (summary,) = stage_summaries(GPT, _place(1, {}))
    assert summary.modules == ("(root)",)


def test_a_partition_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="has no stage for"):
        stage_summaries(GPT, Partition(2, {"": 0}))


def test_warnings_name_the_stage_the_figures_and_the_way_out() -> None:
    empty, largest = partition_warnings(stage_summaries(GPT, SPLIT), 0.0)
    assert empty.startswith("Stage 2 of 3 is empty")
    assert "Use fewer partitions" in empty
    assert largest.startswith("Stage 1 (blocks.1.mlp, blocks.2-3) is the largest with 60.0% of the")
    assert "1.80 x the mean of 33.3%" in largest
    assert "smp.partition" in largest


@pytest.mark.parametrize(("computes", "num_warnings"), [([1.19, 0.81], 0), ([1.21, 0.79], 1)])
def test_the_warning_starts_above_1_2_x_the_mean(computes: list[float], num_warnings: int) -> None:
    leaves = tuple(_leaf(f"l{i}", i, 8, compute) for i, compute in enumerate(computes))
    root = ModuleCost("", children=leaves)
    summaries = stage_summaries(root, Partition(2, {"": 0, "l0": 0, "l1": 1}))
    assert len(partition_warnings(summaries, 0.0)) == num_warnings


def test_without_costs_only_emptiness_is_warned_of() -> None:
    root = ModuleCost("", children=(ModuleCost("a", ("a.w",)),))
    summaries = stage_summaries(root, Partition(2, {"": 0, "a": 0}))
    assert len(partition_warnings(summaries, 0.5)) == 1
