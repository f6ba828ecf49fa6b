"""Execution order, homes of costs, shared parameters and cut costs, from the tree alone."""

from __future__ import annotations

import pytest

from smp_lite.plan.partitioning.partition import ModuleCost
from smp_lite.plan.partitioning.tree import Load, ModuleTree


def _leaf(name: str, order: int = -1, **costs: object) -> ModuleCost:
    return ModuleCost(name=name, parameter_ids=(f"{name}.weight",), order=order, **costs)


def _bare(name: str, order: int = -1, *children: ModuleCost, **costs: object) -> ModuleCost:
    return ModuleCost(name=name, order=order, children=children, **costs)


def test_two_module_lists_called_in_turn_interleave() -> None:
    root = _bare(
        "",
        0,
        _bare("attention", -1, _leaf("attention.0", 1), _leaf("attention.1", 3)),
        _bare("mlp", -1, _leaf("mlp.0", 2), _leaf("mlp.1", 4)),
    )
    holders = ModuleTree(root).holders[""]
    assert holders == ("attention.0", "mlp.0", "attention.1", "mlp.1")


def test_execution_order_wins_over_registration_and_the_uncalled_stay_by_their_sibling() -> None:
    root = _bare(
        "",
        0,
        _leaf("first_registered_never_called"),
        _leaf("late", 9),
        _leaf("beside_late"),
        _bare("early", 1, _leaf("early.a", 2), _leaf("early.b", 3)),
        _leaf("beside_early"),
    )
    assert ModuleTree(root).holders[""] == (
        "early.a",
        "early.b",
        "beside_early",
        "first_registered_never_called",
        "late",
        "beside_late",
    )


def test_without_a_trace_registration_order_holds() -> None:
    root = _bare("", -1, _leaf("b"), _bare("a", -1, _leaf("a.1"), _leaf("a.0")), _leaf("c"))
    assert ModuleTree(root).holders[""] == ("b", "a.1", "a.0", "c")


def test_a_containers_own_parameters_come_before_its_parts() -> None:
    block = ModuleCost("block", ("block.scale",), order=1, children=(_leaf("block.x", 2),))
    assert ModuleTree(_bare("", 0, block)).holders[""] == ("block", "block.x")


def test_costs_without_parameters_go_where_their_input_is() -> None:
    root = _bare(
        "",
        0,
        _bare("input_dropout", 0),
        _leaf("stem", 1),
        _bare("block", 2, _bare("block.dropout", 3), _leaf("block.a", 4), _leaf("block.b", 5)),
        _bare("activation", 6, _bare("activation.inner", 7)),
        _leaf("last", 8),
    )
    home = ModuleTree(root).home
    assert home["input_dropout"] == home[""] == "stem"
    assert home["block.dropout"] == home["block"] == "block.a"
    assert home["activation"] == home["activation.inner"] == "block.b"
    assert home["last"] == "last"


def test_a_shared_parameter_counts_once() -> None:
    sizes = {"parameter_bytes": 40, "state_bytes": 160}
    root = _bare(
        "",
        0,
        ModuleCost("a", ("shared",), parameter_count=10, compute=1.0, **sizes),
        ModuleCost("b", ("shared",), parameter_count=10, compute=2.0, **sizes),
    )
    loads = ModuleTree(root).loads()
    assert loads == {"a": Load(10, 40, 160, 0, 1.0), "b": Load(0, 0, 0, 0, 2.0)}


@pytest.mark.parametrize("elements", [(), (10, 2)])
def test_the_own_part_of_a_module_that_shares_is_kept(elements: tuple[int, ...]) -> None:
    tied = ModuleCost(
        "tied",
        ("weight", "tied.bias"),
        parameter_count=12,
        parameter_bytes=48,
        parameter_elements=elements,
    )
    source = ModuleCost("source", ("weight",), parameter_count=10, parameter_bytes=40)
    loads = ModuleTree(_bare("", 0, source, tied)).loads()
    assert (loads["tied"].parameter_count, loads["tied"].parameter_bytes) == (2, 8)


def test_given_elements_settle_what_counts_alone_cannot() -> None:
    first = ModuleCost("a", ("w", "a.b"), parameter_count=12, parameter_elements=(9, 3))
    second = ModuleCost("b", ("w", "b.b"), parameter_count=14, parameter_elements=(9, 5))
    loads = ModuleTree(_bare("", 0, first, second)).loads()
    assert loads["b"].parameter_count == 5


def test_sharing_is_transitive() -> None:
    root = _bare(
        "",
        0,
        ModuleCost("a", ("x",)),
        ModuleCost("b", ("y",)),
        ModuleCost("c", ("z",)),
        ModuleCost("d", ("x", "y")),
        ModuleCost("e", ("x",)),
    )
    assert ModuleTree(root).sharing == (("a", "b", "d", "e"),)


def test_a_cut_sends_what_the_outermost_finished_call_returned() -> None:
    block = _bare(
        "blocks.0",
        3,
        _leaf("blocks.0.up", 4, output_bytes=400),
        _leaf("blocks.0.gate", 5, output_bytes=1),
        output_bytes=100,
    )
    root = _bare(
        "",
        0,
        _leaf("conv", 1, output_bytes=64),
        _bare("pool", 2, output_bytes=16),
        _bare("blocks", -1, block),
        _leaf("head", 6, output_bytes=7),
        output_bytes=8,
    )
    tree = ModuleTree(root)
    before = {name: tree.entry_bytes(name) for name in ("conv", "blocks", "blocks.0", "head")}
    assert before == {"conv": 0, "blocks": 16, "blocks.0": 16, "head": 100}
    assert tree.entry_bytes("blocks.0.gate") == 400


def test_equal_names_are_refused() -> None:
    with pytest.raises(ValueError, match="two modules are named 'a'"):
        ModuleTree(_bare("", 0, _leaf("a"), _leaf("a")))
