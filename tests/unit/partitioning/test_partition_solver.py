"""Automatic placement of whole module trees: known failure modes, sharing, what gets opened."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from smp_lite.plan.partitioning.partition import ModuleCost, Partition
from smp_lite.plan.partitioning.report import stage_summaries
from smp_lite.plan.partitioning.solver import solve_partition


class _Trace:
    """Builds trees whose modules are called in the order in which they are built."""

    def __init__(self) -> None:
        self.num_calls = 0

    def leaf(self, name: str, compute: float = 1.0, **costs: object) -> ModuleCost:
        """A called module that holds one parameter, `name.weight`, unless `costs` says else."""
        self.num_calls += 1
        fields = {"parameter_ids": (f"{name}.weight",), "parameter_count": 1, "state_bytes": 1}
        return ModuleCost(name=name, compute=compute, order=self.num_calls, **(fields | costs))

    def bare(self, name: str, compute: float = 0.0, **costs: object) -> ModuleCost:
        """A called module without parameters."""
        self.num_calls += 1
        return ModuleCost(name=name, compute=compute, order=self.num_calls, **costs)

    def sequence(self, name: str, computes: Sequence[float], **costs: object) -> ModuleCost:
        """A called container of numbered leaves, as nn.Sequential."""
        self.num_calls += 1
        order = self.num_calls
        prefix = f"{name}." if name else ""
        leaves = tuple(self.leaf(f"{prefix}{i}", c) for i, c in enumerate(computes))
        return ModuleCost(name=name, order=order, children=leaves, **costs)

    def block(self, name: str, computes: Sequence[float], **costs: object) -> ModuleCost:
        """A called container with named parts and glue of its own, as a residual block."""
        self.num_calls += 1
        order = self.num_calls
        leaves = tuple(self.leaf(f"{name}.{'abcdef'[i]}", c) for i, c in enumerate(computes))
        return ModuleCost(name=name, order=order, children=leaves, **costs)


def _root(*children: ModuleCost, **costs: object) -> ModuleCost:
    return ModuleCost(name="", order=0, children=children, **costs)


def _stages(partition: Partition, *names: str) -> list[int]:
    return [partition.stage_of[name] for name in names]


def _largest_share(root: ModuleCost, partition: Partition, memory_weight: float) -> float:
    return max(summary.cost(memory_weight) for summary in stage_summaries(root, partition))


def test_a_flat_sequential_of_equal_layers_is_cut_evenly() -> None:
    partition = solve_partition(_Trace().sequence("", [1.0] * 8), 4, memory_weight=0.8)
    assert _stages(partition, *map(str, range(8))) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_huge_embedding_does_not_swallow_stages() -> None:
    trace = _Trace()
    embedding = trace.leaf("embedding", 1.0, state_bytes=10_000)
    root = _root(embedding, trace.sequence("layers", [5.0] * 6), trace.leaf("head"))
    partition = solve_partition(root, 4, memory_weight=0.8)
    assert _stages(partition, "embedding", *(f"layers.{i}" for i in range(6)), "head") == [
        *(0, 1, 1, 2, 2, 3, 3, 3),
    ]


def test_two_blocks_and_four_stages_are_split_inside_the_blocks() -> None:
    trace = _Trace()
    root = _root(trace.block("net1", [3.0, 4.0]), trace.block("net2", [4.0, 1.0, 2.0]))
    partition = solve_partition(root, 4, memory_weight=0.0)
    assert _stages(partition, "net1.a", "net1.b", "net2.a", "net2.b", "net2.c") == [0, 1, 2, 3, 3]
    assert _stages(partition, "", "net1", "net2") == [0, 0, 2]


def test_a_dominant_child_is_opened() -> None:
    trace = _Trace()
    root = _root(trace.leaf("stem"), trace.block("trunk", [10.0, 10.0, 10.0, 10.0]), trace.leaf("head"))
    partition = solve_partition(root, 2, memory_weight=0.0)
    assert _stages(partition, "stem", "trunk.a", "trunk.b") == [0, 0, 0]
    assert _stages(partition, "trunk.c", "trunk.d", "head") == [1, 1, 1]


def test_a_dominant_child_is_opened_through_several_levels() -> None:
    trace = _Trace()
    inner = ModuleCost(name="a.body", order=1, children=(trace.block("a.body.core", [4.0, 4.0]),))
    root = _root(ModuleCost(name="a", order=1, children=(inner, trace.leaf("a.norm", 0.1))))
    root = _root(*root.children, trace.leaf("b", 0.1))
    partition = solve_partition(root, 2, memory_weight=0.0)
    assert _stages(partition, "a.body.core.a", "a.body.core.b", "a.norm", "b") == [0, 1, 1, 1]


def test_fewer_modules_than_stages_leaves_the_last_stages_empty() -> None:
    partition = solve_partition(_Trace().sequence("", [1.0, 1.0]), 4, memory_weight=0.8)
    assert _stages(partition, "", "0", "1") == [0, 0, 1]


def test_blocks_stay_whole_where_cutting_them_gains_little() -> None:
    trace = _Trace()
    blocks = tuple(trace.block(f"h.{i}", [1.0, 1.0]) for i in range(12))
    root = _root(ModuleCost(name="h", children=blocks), trace.leaf("head", 1.0))
    partition = solve_partition(root, 4, memory_weight=0.0)
    assert [set(_stages(partition, f"h.{i}.a", f"h.{i}.b")) for i in range(12)] == [
        {i // 3} for i in range(12)
    ]


def test_a_gain_of_less_than_a_tenth_does_not_open_a_block() -> None:
    trace = _Trace()
    children = [trace.leaf("a", 6.0), trace.block("b", [1.0, 6.0]), trace.leaf("c", 6.0)]
    partition = solve_partition(_root(*children), 2, memory_weight=0.0)
    assert partition.stage_of["b.a"] == partition.stage_of["b.b"]


def test_nested_blocks_opened_in_vain_stay_where_they_were() -> None:
    trace = _Trace()
    huge = trace.leaf("huge", 100.0)
    inner = tuple(trace.block(f"outer.{name}", [10.0, 10.0]) for name in "xy")
    outer = ModuleCost(name="outer", order=inner[0].order, children=inner)
    partition = solve_partition(_root(huge, outer, trace.leaf("tail", 30.0)), 3, memory_weight=0.0)
    assert {partition.stage_of[module.name] for module in outer.walk()} == {1}


def test_blocks_that_need_not_be_cut_are_closed_again() -> None:
    trace = _Trace()
    first = trace.block("h.0", [8.0, 8.0])
    rest = tuple(trace.block(f"h.{i}", [2.0, 2.0]) for i in range(1, 4))
    root = _root(ModuleCost(name="h", children=(first, *rest)))
    partition = solve_partition(root, 4, memory_weight=0.0)
    assert _stages(partition, "h.0.a", "h.0.b") == [0, 1]
    for i in (1, 2, 3):
        assert len(set(_stages(partition, f"h.{i}.a", f"h.{i}.b"))) == 1


def test_a_module_to_keep_whole_is_never_opened() -> None:
    trace = _Trace()
    root = _root(trace.block("a", [9.0, 9.0], keep_whole=True), trace.leaf("b"))
    partition = solve_partition(root, 3, memory_weight=0.0)
    assert _stages(partition, "a", "a.a", "a.b", "b") == [0, 0, 0, 1]
    whole = solve_partition(_root(trace.leaf("c"), trace.leaf("d"), keep_whole=True), 2, memory_weight=0.0)
    assert set(whole.stage_of.values()) == {0}


def test_a_containers_own_parameters_stand_before_its_parts() -> None:
    trace = _Trace()
    root = _root(
        trace.block("a", [8.0, 8.0], parameter_ids=("a.scale",), parameter_count=1, compute=8.0),
        parameter_ids=("position",),
    )
    partition = solve_partition(root, 3, memory_weight=0.0)
    assert _stages(partition, "", "a", "a.a", "a.b") == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("computes", "expected"),
    [([2.0, 2.0, 8.0], [0, 0, 0, 1, 0]), ([8.0, 2.0, 2.0], [1, 0, 1, 1, 1])],
)
def test_shared_parameters_stay_together_at_the_better_end(
    computes: list[float], expected: list[int]
) -> None:
    trace = _Trace()
    embedding = trace.leaf("embedding", 0.0)
    layers = trace.sequence("layers", computes)
    head = trace.leaf("head", 4.0, parameter_ids=("embedding.weight",))
    partition = solve_partition(_root(embedding, layers, head), 2, memory_weight=0.0)
    names = ("embedding", "layers.0", "layers.1", "layers.2", "head")
    assert _stages(partition, *names) == expected


def test_blocks_tied_by_one_parameter_are_opened_to_free_the_rest() -> None:
    trace = _Trace()
    children = []
    for name in ("encoder", "decoder"):
        embed = trace.leaf(f"{name}.embed", 1.0, parameter_ids=("shared",))
        body = trace.block(f"{name}.body", [10.0, 10.0])
        children.append(ModuleCost(name=name, order=embed.order, children=(embed, body)))
    partition = solve_partition(_root(*children), 2, memory_weight=0.0)
    assert _stages(partition, "encoder.body", "decoder.body") == [0, 1]
    assert partition.stage_of["encoder.embed"] == partition.stage_of["decoder.embed"]


def test_what_the_root_shares_stays_on_stage_0() -> None:
    trace = _Trace()
    layers = trace.sequence("layers", [9.0, 5.0, 3.0])
    root = _root(layers, trace.leaf("head", parameter_ids=("w",)), parameter_ids=("w",))
    partition = solve_partition(root, 2, memory_weight=0.0)
    assert _stages(partition, "", "head", "layers.0", "layers.1") == [0, 0, 0, 1]


def test_modules_tied_by_different_parameters_all_stay_together() -> None:
    trace = _Trace()
    ties = {"a": ("x", "a.own"), "b": ("y", "x"), "c": ("y", "c.own")}
    children = []
    for name, parameter_ids in ties.items():
        leaves = [trace.leaf(f"{name}.{i}", 5.0, parameter_ids=(p,)) for i, p in enumerate(parameter_ids)]
        children.append(ModuleCost(name=name, keep_whole=True, children=tuple(leaves)))
    partition = solve_partition(_root(*children, trace.leaf("d")), 3, memory_weight=0.0)
    assert _stages(partition, "a", "b", "c", "d") == [0, 0, 0, 1]


def test_module_lists_called_in_turn_are_cut_in_execution_order() -> None:
    order = iter(range(1, 9))
    pairs = [(next(order), next(order)) for _ in range(4)]
    lists = tuple(
        ModuleCost(
            name=name,
            children=tuple(
                ModuleCost(f"{name}.{i}", (f"{name}.{i}.w",), compute=1.0, order=pair[which])
                for i, pair in enumerate(pairs)
            ),
        )
        for which, name in enumerate(("attention", "mlp"))
    )
    partition = solve_partition(_root(*lists), 2, memory_weight=0.0)
    for name in ("attention", "mlp"):
        assert _stages(partition, *(f"{name}.{i}" for i in range(4))) == [0, 0, 1, 1]


@pytest.mark.parametrize(("weight", "expected"), [(0.0, [0, 1, 1, 1]), (1.0, [0, 0, 0, 1])])
def test_memory_weight_chooses_what_is_balanced(weight: float, expected: list[int]) -> None:
    trace = _Trace()
    figures = [(9.0, 1), (1.0, 1), (1.0, 1), (1.0, 9)]
    leaves = [trace.leaf(f"l{i}", c, state_bytes=b) for i, (c, b) in enumerate(figures)]
    partition = solve_partition(_root(*leaves), 2, memory_weight=weight)
    assert _stages(partition, "l0", "l1", "l2", "l3") == expected


def test_activations_count_as_memory() -> None:
    trace = _Trace()
    leaves = [trace.leaf(f"l{i}", activation_bytes=12 if i == 0 else 0) for i in range(4)]
    partition = solve_partition(_root(*leaves), 2, memory_weight=1.0)
    assert _stages(partition, "l0", "l1", "l2", "l3") == [0, 1, 1, 1]


def test_without_any_cost_modules_are_counted() -> None:
    leaves = [ModuleCost(f"l{i}", (f"l{i}.w",)) for i in range(6)]
    partition = solve_partition(_root(*leaves), 3, memory_weight=0.8)
    assert _stages(partition, *(f"l{i}" for i in range(6))) == [0, 0, 1, 1, 2, 2]


def test_what_has_no_parameters_weighs_where_it_runs() -> None:
    trace = _Trace()
    children = [trace.leaf("conv1", 1.0), trace.bare("relu", 6.0), trace.leaf("conv2", 3.0)]
    children += [trace.leaf("conv3", 4.0), trace.bare("dropout", 0.0)]
    partition = solve_partition(_root(*children), 2, memory_weight=0.0)
    assert _stages(partition, "conv1", "conv2", "conv3") == [0, 1, 1]
    assert _stages(partition, "relu", "dropout") == [0, 0]


def test_the_cheapest_cut_among_the_balanced() -> None:
    trace = _Trace()
    children = [
        trace.leaf("a", 4.0, output_bytes=100),
        trace.leaf("b", 0.0, output_bytes=100),
        trace.bare("pool", 0.0, output_bytes=10),
        trace.leaf("c", 0.0, output_bytes=100),
        trace.leaf("d", 4.0, output_bytes=100),
    ]
    partition = solve_partition(_root(*children), 2, memory_weight=0.0)
    assert _stages(partition, "a", "b", "c", "d") == [0, 0, 1, 1]


def test_contiguous_false_is_used_where_it_balances_better() -> None:
    root = _Trace().sequence("", [3.0, 5.0, 5.0, 3.0, 2.0, 2.0])
    contiguous = solve_partition(root, 2, memory_weight=0.0)
    scattered = solve_partition(root, 2, memory_weight=0.0, contiguous=False)
    assert _largest_share(root, contiguous, 0.0) == pytest.approx(12 / 20)
    assert _largest_share(root, scattered, 0.0) == pytest.approx(10 / 20)
    balanced = _Trace().sequence("", [1.0] * 6)
    assert solve_partition(balanced, 3, memory_weight=0.0, contiguous=False) == solve_partition(
        balanced, 3, memory_weight=0.0
    )


def test_a_model_without_parameters_is_all_on_stage_0() -> None:
    root = _root(_Trace().bare("relu", 3.0))
    assert solve_partition(root, 2, memory_weight=0.2).stage_of == {"": 0, "relu": 0}


@pytest.mark.parametrize(
    ("num_stages", "memory_weight", "message"),
    [
        (0, 0.5, "partitions is 0"),
        (True, 0.5, "partitions is True"),
        (2, 1.5, "is 1.5"),
        (2, float("nan"), "nan"),
    ],
)
def test_bad_options_are_refused(num_stages: int, memory_weight: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve_partition(_root(), num_stages, memory_weight=memory_weight)
