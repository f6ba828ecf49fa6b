"""Partition as data (text, digest, checks) and manual placement."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_lite.plan.partitioning.partition import ModuleCost, Partition, manual_partition


def _module(name: str, *children: ModuleCost, holds: tuple[str, ...] = ()) -> ModuleCost:
    return ModuleCost(name=name, parameter_ids=holds, children=children)


TIED = _module(
    "",
    _module("embedding", holds=("embedding.weight",)),
    _module("body", _module("body.0", holds=("body.0.weight",)), _module("body.1")),
    _module("head", holds=("embedding.weight",)),
)

partitions = st.integers(1, 5).flatmap(
    lambda num_stages: st.builds(
        Partition,
        num_stages=st.just(num_stages),
        stage_of=st.dictionaries(st.text(max_size=8), st.integers(0, num_stages - 1)),
    )
)


@given(partitions)
def test_json_round_trip(partition: Partition) -> None:
    again = Partition.from_json(partition.to_json())
    assert again == partition
    assert again.digest() == partition.digest()


def test_digest_ignores_the_order_of_names_and_sees_everything_else() -> None:
    one = Partition(2, {"a": 0, "b": 1})
    assert one.digest() == Partition(2, {"b": 1, "a": 0}).digest()
    others = [
        Partition(2, {"a": 0, "b": 0}),
        Partition(3, {"a": 0, "b": 1}),
        Partition(2, {"a": 0}),
    ]
    assert len({other.digest() for other in [one, *others]}) == 4


def test_partition_keeps_its_own_copy() -> None:
    stage_of = {"a": 0}
    partition = Partition(2, stage_of)
    stage_of["a"] = 1
    assert partition.stage_of == {"a": 0}


@pytest.mark.parametrize("stage_index", [2, -1, "1", 1.0, True])
def test_a_stage_out_of_range_names_module_and_range(stage_index: object) -> None:
    text = json.dumps({"num_stages": 2, "stage_of": {"body.0": stage_index}})
    with pytest.raises(ValueError, match=r"module 'body\.0' is .* from 0 to 1"):
        Partition.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "this one has list"),
        ('{"num_stages": 2}', r"this one has \['num_stages'\]"),
        ('{"num_stages": 2, "stage_of": {}, "x": 1}', "exactly the keys"),
        ('{"num_stages": 2, "stage_of": [0]}', "'stage_of' has to be an object"),
        ('{"num_stages": 0, "stage_of": {}}', "num_stages is 0"),
        ('{"num_stages": "2", "stage_of": {}}', "num_stages is '2'"),
    ],
)
def test_bad_text_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition.from_json(text)


def test_check_names_unknown_and_missing_modules() -> None:
    stage_of = {"": 0, "embedding": 0, "body": 0, "body.0": 0, "head": 0, "tail": 1}
    with pytest.raises(ValueError, match=r"not have: 'tail' and has no stage for 'body\.1'\."):
        Partition(2, stage_of).check(TIED)


def test_check_shows_a_few_of_many_names() -> None:
    with pytest.raises(ValueError, match=r"'x4' and 3 more\."):
        Partition(1, {f"x{i}": 0 for i in range(8)} | dict.fromkeys(_names(TIED), 0)).check(TIED)


def test_check_accepts_the_model_and_refuses_a_torn_parameter() -> None:
    together = dict.fromkeys(_names(TIED), 1)
    Partition(2, together).check(TIED)
    with pytest.raises(ValueError, match=r"'embedding' \(stage 1\) and 'head' \(stage 0\)"):
        Partition(2, together | {"head": 0}).check(TIED)


def test_manual_uses_the_own_assignment_else_the_default_never_the_parents() -> None:
    partition = manual_partition(TIED, 3, assigned={"body": 2}, default=1)
    assert partition.stage_of == {
        "": 1,
        "embedding": 1,
        "body": 2,
        "body.0": 1,
        "body.1": 1,
        "head": 1,
    }


def test_manual_refuses_shared_parameters_apart() -> None:
    with pytest.raises(ValueError, match="share the parameter") as error:
        manual_partition(TIED, 2, assigned={"head": 1}, default=0)
    for part in (
        "'embedding' (stage 0)",
        "'head' (stage 1)",
        "'embedding.weight'",
        "set_partition",
    ):
        assert part in str(error.value)


def test_manual_sharing_concerns_the_holders_only() -> None:
    assigned = {"": 1, "body": 1, "body.0": 1}
    partition = manual_partition(TIED, 2, assigned=assigned, default=0)
    assert partition.stage_of["head"] == partition.stage_of["embedding"] == 0


@pytest.mark.parametrize(
    ("assigned", "default", "message"),
    [
        ({"head": 2}, 0, r"module 'head' is 2; with 2 partitions .* from 0 to 1"),
        ({}, 2, r"default_partition is 2"),
        ({"nose": 1}, 0, r"assigned to 'nose', which the model does not have"),
    ],
)
def test_manual_refuses_bad_stages_and_names(assigned: dict[str, int], default: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manual_partition(TIED, 2, assigned=assigned, default=default)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"compute": float("nan")}, "compute is nan"),
        ({"compute": -1.0}, "compute is -1.0"),
        ({"state_bytes": -4}, "state_bytes is -4"),
        ({"parameter_ids": ("a", "b"), "parameter_elements": (1,)}, "1 entries for 2"),
    ],
)
def test_impossible_costs_are_refused(costs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"module 'layer': .*{message}"):
        ModuleCost(name="layer", **costs)


def _names(root: ModuleCost) -> list[str]:
    return [module.name for module in root.walk()]
