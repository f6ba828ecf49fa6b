"""Ranks and groups: the documented layouts as tables, and what holds for every layout."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.plan.topology import SMP_GROUPS, Topology

KINDS = ("WORLD", "MP", "DP", "PP", "TP", "RDP")
STRATEGIES = ("cluster", "spread", *("".join(letters) for letters in permutations("DPT")))


def digits(text: str) -> list[tuple[int, ...]]:
    """Reads ``"01 23"`` as [(0, 1), (2, 3)]; ranks above 9 are letters, a = 10."""
    return [tuple(int(rank, 16) for rank in group) for group in text.split()]


@pytest.mark.parametrize(
    ("world_size", "pp", "tp", "strategy", "mp_groups", "dp_groups"),
    [
        (8, 2, 1, "spread", "04 15 26 37", "0123 4567"),
        (8, 2, 1, "cluster", "01 23 45 67", "0246 1357"),
        (8, 4, 1, "spread", "0246 1357", "01 23 45 67"),
        (8, 4, 1, "cluster", "0123 4567", "04 15 26 37"),
        (8, 2, 2, "DPT", "0123 4567", "0145 2367"),
        (8, 2, 2, "cluster", "0123 4567", "0145 2367"),
        (8, 2, 2, "PTD", "0246 1357", "0123 4567"),
        (8, 2, 2, "TPD", "0246 1357", "0145 2367"),
        (8, 2, 2, "spread", "0246 1357", "0145 2367"),
        (8, 2, 2, "DTP", "0123 4567", "0246 1357"),
        (8, 2, 2, "PDT", "0145 2367", "0123 4567"),
        (8, 2, 2, "TDP", "0145 2367", "0246 1357"),
        (12, 3, 2, "cluster", "012345 6789ab", "0167 2389 45ab"),
        (4, 1, 4, "cluster", "0123", "0123"),
    ],
)
def test_model_and_data_parallel_groups(
    world_size: int, pp: int, tp: int, strategy: str, mp_groups: str, dp_groups: str
) -> None:
    topology = Topology.from_placement(world_size, pp, tp, strategy)

    assert list(topology.groups("MP")) == digits(mp_groups)
    assert list(topology.groups("DP")) == digits(dp_groups)


@pytest.mark.parametrize(
    ("strategy", "kind", "ranks"),
    [
        ("DPT", "RDP", "00001111"),
        ("DPT", "PP", "00110011"),
        ("DPT", "TP", "01010101"),
        ("DPT", "DP", "01012323"),
        ("PTD", "RDP", "01010101"),
        ("PTD", "PP", "00001111"),
        ("PTD", "TP", "00110011"),
        ("PTD", "MP", "00112233"),
        ("TPD", "PP", "00110011"),
        ("TPD", "TP", "00001111"),
        ("TPD", "RDP", "01010101"),
        ("DTP", "PP", "01010101"),
        ("DTP", "TP", "00110011"),
        ("DTP", "RDP", "00001111"),
        ("DTP", "DP", "00112233"),
        ("DTP", "MP", "01230123"),
    ],
)
def test_group_rank_of_eight_ranks_with_two_stages_and_two_shards(
    strategy: str, kind: str, ranks: str
) -> None:
    topology = Topology.from_placement(8, 2, 2, strategy)

    assert "".join(str(topology.group_rank(kind, rank)) for rank in range(8)) == ranks


@pytest.mark.parametrize(
    ("strategy", "kind", "groups"),
    [
        ("DTP", "TP", "02 13 46 57"),
        ("PDT", "TP", "01 23 45 67"),
        ("PDT", "RDP", "02 13 46 57"),
        ("TDP", "PP", "01 23 45 67"),
        ("TDP", "TP", "04 15 26 37"),
    ],
)
def test_pairs_of_eight_ranks_with_two_stages_and_two_shards(strategy: str, kind: str, groups: str) -> None:
    assert list(Topology.from_placement(8, 2, 2, strategy).groups(kind)) == digits(groups)


def test_documented_single_ranks() -> None:
    spread = Topology.from_placement(8, 2, 1, "spread")
    assert spread.group_rank("MP", 1) == 0
    assert spread.group_rank("MP", 6) == 1
    assert spread.group_rank("DP", 6) == 2

    assert Topology.from_placement(12, 3, 2, "cluster").group("PP", 0) == (0, 2, 4)
    assert Topology.from_placement(4, 1, 4, "cluster").groups("RDP") == ((0,), (1,), (2,), (3,))


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, int, int, str]:
    """Draws (dp, pp, tp, strategy)."""
    sizes = [draw(st.integers(1, 4)) for _ in range(3)]
    return (*sizes, draw(st.sampled_from(STRATEGIES)))


@settings(max_examples=100)
@given(placements())
def test_groups_of_every_kind_partition_the_world(placement: tuple[int, int, int, str]) -> None:
    dp, pp, tp, strategy = placement
    topology = Topology.from_placement(dp * pp * tp, pp, tp, strategy)

    for kind in KINDS:
        groups = topology.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(dp * pp * tp))
        assert groups == tuple(sorted(groups))
        for group in groups:
            assert len(group) == topology.group_size(kind)
            for index, rank in enumerate(group):
                assert topology.group(kind, rank) == group == tuple(sorted(group))
                assert topology.group_rank(kind, rank) == index


@settings(max_examples=100)
@given(placements())
def test_identities_of_sizes_and_groups(placement: tuple[int, int, int, str]) -> None:
    dp, pp, tp, strategy = placement
    topology = Topology.from_placement(dp * pp * tp, pp, tp, strategy)
    size = {kind: topology.group_size(kind) for kind in KINDS}

    assert size["WORLD"] == topology.world_size == dp * pp * tp
    assert (size["PP"], size["TP"], size["RDP"]) == (pp, tp, dp)
    assert size["MP"] * size["RDP"] == size["PP"] * size["DP"] == size["WORLD"]
    assert (size["MP"] * size["DP"] == size["WORLD"]) == (tp == 1)
    if tp == 1:
        assert topology.groups("MP") == topology.groups("PP")
        assert topology.groups("RDP") == topology.groups("DP")
    if pp == 1:
        assert topology.groups("TP") == topology.groups("MP")
    for rank in range(topology.world_size):
        group = {kind: set(topology.group(kind, rank)) for kind in KINDS}
        assert group["TP"] <= group["DP"] & group["MP"]
        assert group["PP"] & group["DP"] == {rank}


@settings(max_examples=100)
@given(placements())
def test_right_most_letter_varies_fastest(placement: tuple[int, int, int, str]) -> None:
    dp, pp, tp, strategy = placement
    letters = {"cluster": "DPT", "spread": "TPD"}.get(strategy, strategy)
    size = {"D": dp, "P": pp, "T": tp}
    topology = Topology.from_placement(dp * pp * tp, pp, tp, strategy)

    for rank in range(topology.world_size):
        expected, rest = {}, rank
        for letter in reversed(letters):
            expected[letter] = rest % size[letter]
            rest //= size[letter]
        coordinate = topology.coordinate(rank)
        assert coordinate == {"dp": expected["D"], "pp": expected["P"], "tp": expected["T"]}
        assert topology.rank(coordinate) == rank


def test_other_systems_bring_their_own_axes_and_kinds() -> None:
    topology = Topology(
        (("data", 2), ("row", 2), ("column", 3)), (("TENSOR", ("row", "column")), ("ROW", ("row",)))
    )

    assert topology.axis_size("column") == 3
    assert topology.coordinate(10) == {"data": 1, "row": 1, "column": 1}
    assert topology.groups("TENSOR") == (tuple(range(6)), tuple(range(6, 12)))
    assert topology.group("ROW", 10) == (7, 10)
    assert topology.groups("WORLD") == (tuple(range(12)),)


def test_topologies_compare_by_what_they_say() -> None:
    by_alias = Topology.from_placement(8, 2, 2, "cluster")

    assert by_alias == Topology((("dp", 2), ("pp", 2), ("tp", 2)), SMP_GROUPS)
    assert len({by_alias, Topology.from_placement(8, 2, 2, "DPT")}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3, 1, "cluster"), "world size 8 is not a multiple of pp x tp = 3 x 1"),
        ((2, 2, 2, "cluster"), "world size 2 is not a multiple of pp x tp = 2 x 2"),
        ((8, 0, 1, "cluster"), "sizes must be 1 or more"),
        ((0, 1, 1, "cluster"), "sizes must be 1 or more"),
        ((8, 2, 1, "DP"), "placement_strategy must be"),
        ((8, 2, 1, "DPP"), "placement_strategy must be"),
        ((8, 2, 1, "dpt"), "placement_strategy must be"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(arguments: tuple[int, int, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology.from_placement(*arguments)


def test_a_rank_coordinate_kind_or_axis_that_does_not_exist_is_refused() -> None:
    topology = Topology.from_placement(4, 2, 1, "cluster")

    for rank in (-1, 4):
        with pytest.raises(ValueError, match=r"rank must be in 0 \.\.\. 3"):
            topology.coordinate(rank)
    with pytest.raises(ValueError, match=r"pp must be in 0 \.\.\. 1, got 2"):
        topology.rank({"dp": 0, "pp": 2, "tp": 0})
    with pytest.raises(ValueError, match="a coordinate has the axes"):
        topology.rank({"dp": 0, "pp": 1})
    with pytest.raises(ValueError, match="unknown kind of group 'XP': choose from WORLD, MP"):
        topology.group("XP", 0)
    with pytest.raises(ValueError, match="unknown axis 'row'"):
        topology.axis_size("row")


@pytest.mark.parametrize(
    ("axes", "kinds", "message"),
    [
        ((("dp", 2), ("dp", 2)), (), "different names"),
        ((("dp", 0),), (), "integer size of 1 or more"),
        ((("dp", True),), (), "integer size of 1 or more"),
        ((("dp", 2),), (("MP", ("pp",)),), "unknown axis 'pp'"),
    ],
)
def test_axes_that_make_no_sense_are_refused(
    axes: tuple[tuple[str, int], ...], kinds: tuple[tuple[str, tuple[str, ...]], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(axes, kinds)
