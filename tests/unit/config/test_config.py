"""Config: every default, every text of the SageMaker SDK's checks, and what those let through."""

from __future__ import annotations

import pickle
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_lite.config import Config, ConfigError

DEFAULTS_OF_TWO_PARTITIONS = {
    "pipeline": "interleaved",
    "placement_strategy": "cluster",
    "optimize": "memory",
    "microbatches": 1,
    "partitions": 2,
    "pipeline_parallel_degree": 2,
    "active_microbatches": 4,
    "auto_partition": True,
    "contiguous": True,
    "virtual_stages": 1,
    "load_partition": False,
    "horovod": False,
    "ddp": False,
    "deterministic_server": False,
    "skip_tracing": False,
    "static_mode": False,
    "partition_file": None,
    "default_partition": 0,
    "memory_weight": 0.8,
    "memory_limit": None,
    "ddp_port": None,
    "ddp_dist_backend": "auto",
}


def failure(parameters: Any) -> str:
    """Returns the text of the error that ``parameters`` cause."""
    with pytest.raises(ConfigError) as error:
        Config.from_parameters(parameters)
    return str(error.value)


def test_defaults() -> None:
    config = Config.from_parameters({"partitions": 2})

    found = config.model_dump()
    assert {key: found[key] for key in DEFAULTS_OF_TWO_PARTITIONS} == DEFAULTS_OF_TWO_PARTITIONS


def test_every_parameter_can_be_set() -> None:
    parameters = {
        "pipeline": "simple",
        "placement_strategy": "spread",
        "optimize": "speed",
        "microbatches": 8,
        "partitions": 4,
        "pipeline_parallel_degree": 4,
        "active_microbatches": 3,
        "auto_partition": False,
        "contiguous": False,
        "load_partition": True,
        "horovod": False,
        "ddp": True,
        "deterministic_server": True,
        "skip_tracing": True,
        "static_mode": True,
        "partition_file": "cut.json",
        "default_partition": 3,
        "memory_weight": 0.5,
        "ddp_port": 29500,
        "ddp_dist_backend": "gloo",
    }

    assert Config.from_parameters(parameters).model_dump(include=set(parameters)) == parameters


@pytest.mark.parametrize("key", ["partitions", "pipeline_parallel_degree"])
def test_either_name_of_the_number_of_partitions_suffices(key: str) -> None:
    config = Config.from_parameters({key: 3})

    assert (config.partitions, config.pipeline_parallel_degree) == (3, 3)
    assert config.active_microbatches == 5


@pytest.mark.parametrize(
    ("pipeline", "pieces"),
    [("interleaved", 1), ("zero_bubble", 1), ("interleaved_virtual", 2), ("zero_bubble_v", "v")],
)
def test_default_virtual_stages_follow_the_pipeline_where_the_library_cuts(
    pipeline: str, pieces: object
) -> None:
    parameters = {"partitions": 4, "pipeline": pipeline}
    assert Config.from_parameters(parameters).virtual_stages == pieces
    by_hand = {**parameters, "auto_partition": False, "default_partition": 0}
    stored = {**parameters, "load_partition": True, "partition_file": "p.json"}
    for other in (by_hand, stored, {**parameters, "partitions": 1}):
        assert Config.from_parameters(other).virtual_stages == 1


def test_auto_chooses_pieces_where_none_are_given_and_the_library_cuts() -> None:
    auto = {"partitions": 4, "pipeline": "auto"}
    assert Config.from_parameters(auto).chooses_pieces
    for more in (
        {"virtual_stages": 1},
        {"virtual_stages": "v"},
        {"contiguous": False},
        {"auto_partition": False, "default_partition": 0},
        {"load_partition": True, "partition_file": "p.json"},
        {"partitions": 1},
        {"pipeline": "zero_bubble"},
    ):
        assert not Config.from_parameters({**auto, **more}).chooses_pieces, more


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        (3, 3),
        ("3 GiB", 3 << 30),
        ("1.5KiB", 1536),
        ("500 MB", 500_000_000),
        ("2tib", 2 << 40),
        ("7B", 7),
        (None, None),
    ],
)
def test_memory_limit_is_a_number_of_bytes_or_a_text(given: object, num_bytes: int | None) -> None:
    assert Config.from_parameters({"partitions": 2, "memory_limit": given}).memory_limit == num_bytes


@pytest.mark.parametrize("given", [0, -1, True, 2.5, "", "3", "GiB", "-1 GiB", "3 GiBs", "0 B"])
def test_another_memory_limit_is_told(given: object) -> None:
    said = failure({"partitions": 2, "memory_limit": given})
    assert said.startswith("memory_limit must be a positive number of bytes. Got memory_limit=")
    assert "such as '3 GiB'" in said


@pytest.mark.parametrize(("optimize", "memory_weight"), [("speed", 0.2), ("memory", 0.8), (None, 0.8)])
def test_default_memory_weight_follows_optimize(optimize: str | None, memory_weight: float) -> None:
    parameters = {"partitions": 1} | ({"optimize": optimize} if optimize else {})

    assert Config.from_parameters(parameters).memory_weight == memory_weight
    given = Config.from_parameters({**parameters, "memory_weight": 1})
    assert given.memory_weight == 1.0
    assert isinstance(given.memory_weight, float)


@pytest.mark.parametrize("strategy", ["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"])
def test_every_placement_strategy(strategy: str) -> None:
    config = Config.from_parameters({"partitions": 2, "placement_strategy": strategy})

    assert config.placement_strategy == strategy


def test_the_hidden_forward_only_pipeline() -> None:
    config = Config.from_parameters({"partitions": 2, "pipeline": "_only_forward"})

    assert config.pipeline == "_only_forward"


BOOLS = (
    "auto_partition",
    "contiguous",
    "load_partition",
    "horovod",
    "ddp",
    "deterministic_server",
    "skip_tracing",
    "static_mode",
)
COUNTS = ("microbatches", "partitions", "pipeline_parallel_degree", "active_microbatches")
CHOICES = {
    "pipeline": (
        "['simple', 'interleaved', 'zero_bubble', 'interleaved_virtual', 'zero_bubble_v', 'auto', "
        "'_only_forward']"
    ),
    "placement_strategy": "['spread', 'cluster']",
    "optimize": "['speed', 'memory']",
    "ddp_dist_backend": "['auto', 'gloo', 'nccl', 'mpi']",
}


@pytest.mark.parametrize("key", BOOLS)
@pytest.mark.parametrize(("value", "shown"), [(2, "2 (int)"), (1.0, "1.0 (float)"), ("True", "(str)")])
def test_a_switch_is_a_bool(key: str, value: object, shown: str) -> None:
    text = failure({"partitions": 2, "default_partition": 0, key: value})

    assert text.startswith(f"{key} must be a value in: [True, False]. Got {key}=")
    assert shown in text


@pytest.mark.parametrize("key", [key for key in BOOLS if key != "load_partition"])
def test_a_switch_takes_one_and_zero_as_the_sdk_does(key: str) -> None:
    for value in (1, 0):
        found = getattr(Config.from_parameters({"partitions": 2, "default_partition": 0, key: value}), key)
        assert found is bool(value)


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1, True, "2", 2.0, None, [2]])
def test_a_count_is_a_positive_integer(key: str, value: object) -> None:
    partitions = {} if key == "pipeline_parallel_degree" else {"partitions": 2}

    text = failure({**partitions, key: value})

    assert text.startswith(f"The number of {key} must be a positive integer. Got {key}={value!r}")
    assert type(value).__name__ in text


@pytest.mark.parametrize("key", CHOICES)
@pytest.mark.parametrize("value", ["foo", "", 1, True, None, ["simple"], {}])
def test_a_choice_is_one_of_its_values(key: str, value: object) -> None:
    text = failure({"partitions": 2, "ddp": True, key: value})

    assert text.startswith(f"{key} must be a value in: {CHOICES[key]}. Got {key}={value!r}")


@pytest.mark.parametrize("value", ["dpt", "DP", "DDPT", "DPP"])
def test_a_placement_uses_each_letter_once(value: str) -> None:
    assert "an order of the letters D, P and T" in failure({"partitions": 2, "placement_strategy": value})


@pytest.mark.parametrize(
    "parameters",
    [
        {"partitions": 1, "default_partition": 0},
        {"partitions": 2, "default_partition": 1, "auto_partition": False},
        {"partitions": 2, "memory_weight": 0},
        {"partitions": 2, "ddp": False, "ddp_port": 0},
        {"partitions": 2, "ddp": True, "ddp_port": 65535},
        {"partitions": 2, "ddp": False, "horovod": True},
        {"partitions": 2, "partition_file": "cut.json"},
    ],
)
def test_the_edge_of_what_is_allowed(parameters: dict[str, Any]) -> None:
    config = Config.from_parameters(parameters)

    assert {key: getattr(config, key) for key in parameters} == parameters


def test_partitions_are_required_before_anything_else() -> None:
    assert failure({}).startswith("'partitions' is a required parameter.")
    assert failure({"pipeline": "foo"}).startswith("'partitions' is a required parameter.")


#: One breach of each rule, in the order in which the rules are checked.
BREACHES = [
    ({"pipeline": "foo"}, "pipeline"),
    ({"placement_strategy": "foo"}, "placement_strategy"),
    ({"optimize": "foo"}, "optimize"),
    ({"microbatches": 0}, "The number of microbatches"),
    ({"active_microbatches": 0}, "The number of active_microbatches"),
    ({"contiguous": 2}, "contiguous"),
    ({"partition_file": 3}, "'partition_file'"),
    ({"auto_partition": False}, "default_partition must be supplied"),
    ({"memory_weight": 2.0}, "memory_weight"),
    ({"ddp_port": -1}, "`ddp_port` needs"),
]


@pytest.mark.parametrize(("first", "second"), list(combinations(BREACHES, 2)))
def test_of_two_failures_the_first_in_the_order_of_the_rules_is_told(
    first: tuple[dict[str, Any], str], second: tuple[dict[str, Any], str]
) -> None:
    assert failure({"partitions": 2, **second[0], **first[0]}).startswith(first[1])


def test_the_port_is_checked_before_the_two_kinds_of_data_parallelism() -> None:
    text = failure({"partitions": 2, "ddp": True, "horovod": True, "ddp_port": -1})

    assert text.startswith("Invalid port number -1.")


def test_scripts_can_read_what_is_not_supported_yet() -> None:
    config = Config(partitions=2)

    assert config.fp16 is False
    assert config.prescaled_batch is False
    assert config.shard_optimizer_state is False
    assert config.sharded_data_parallel_degree == 1
    assert config.tensor_parallel_degree == 1


def test_frozen_comparable_and_picklable() -> None:
    config = Config(partitions=2, ddp=True)

    with pytest.raises(ValueError, match="frozen"):
        config.ddp = False  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.fp16 = True  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert Config.from_parameters(config.model_dump(exclude_none=True)) == config
    assert config != Config(partitions=2)


def test_the_constructor_tells_failures_in_the_same_words() -> None:
    with pytest.raises(ConfigError, match=r"^The number of partitions must be a positive integer"):
        Config(partitions="2")


def test_the_given_dictionary_is_left_alone() -> None:
    parameters = {"partitions": 2, "fp16": False}

    Config.from_parameters(parameters)

    assert parameters == {"partitions": 2, "fp16": False}


ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 4),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["simple", "spread", "DPT", "speed", "auto"]),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(sorted(DEFAULTS_OF_TWO_PARTITIONS)), ANY_VALUE))
def test_whatever_is_given_is_kept_as_it_is_or_refused_in_plain_words(
    parameters: dict[str, Any],
) -> None:
    try:
        config = Config.from_parameters(parameters)
    except ConfigError as error:
        text = str(error)
    else:
        text = "accepted"
        for key, value in parameters.items():
            kept = getattr(config, key)
            assert kept == value
            is_switch = isinstance(kept, bool)
            assert is_switch == isinstance(value, bool) or (is_switch and value in (0, 1))

    assert text
    assert "validation error" not in text


def test_the_description_has_every_parameter() -> None:
    rows = {name: rest for name, *rest in Config.describe()}

    assert set(rows) == set(DEFAULTS_OF_TWO_PARTITIONS) < set(Config.model_fields)
    assert Config.describe()[0][0] == "partitions"
    assert rows["partitions"][:2] == ["int >= 1", "required"]
    assert rows["active_microbatches"][:2] == [
        "int >= 1",
        "partitions + 2; interleaved_virtual and auto: at least 2 x partitions",
    ]
    pipelines = (
        '"simple", "interleaved", "zero_bubble", "interleaved_virtual", "zero_bubble_v", "auto", '
        '"_only_forward"'
    )
    assert rows["pipeline"][:2] == [pipelines, '"interleaved"']
    assert rows["virtual_stages"][0] == 'int >= 1, "v"'
    assert rows["memory_weight"][:2] == ["float", '0.2 if optimize is "speed", else 0.8']
    assert rows["ddp_port"][:2] == ["int", "none"]
    assert rows["ddp"][:2] == ["bool", "False"]
    assert all(description.endswith(".") for _, _, description in rows.values())
