"""Keys that are misspelt, of later work, or of the other product: none is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from smp_lite.config import Config, ConfigError


def failure(parameters: dict[str, Any]) -> str:
    """Returns the text of the error that ``parameters`` cause."""
    with pytest.raises(ConfigError) as error:
        Config.from_parameters(parameters)
    return str(error.value)


def test_a_misspelt_key_gets_a_suggestion() -> None:
    text = failure({"partitions": 2, "microbatchs": 4})
    assert text == "unknown parameter 'microbatchs': did you mean 'microbatches'?"

    assert "did you mean 'ddp'?" in failure({"partitions": 2, "DDP": True})
    assert "did you mean 'tensor_parallel_degree'?" in failure({"partitions": 2, "tensor_paralel_degree": 2})


def test_a_misspelt_required_key_gets_both_texts() -> None:
    text = failure({"partition": 2})

    assert text.startswith("'partitions' is a required parameter.")
    assert "unknown parameter 'partition': did you mean 'partitions'?" in text


def test_a_key_like_no_other_gets_the_list() -> None:
    text = failure({"partitions": 2, "zzz": 1})

    assert text.startswith("unknown parameter 'zzz': the parameters are ")
    assert all(name in text for name in Config.model_fields)


def test_every_unknown_key_is_named() -> None:
    text = failure({"partitions": 2, "zzz": 1, "pipline": "simple"})

    assert "'zzz'" in text
    assert "did you mean 'pipeline'?" in text


@pytest.mark.parametrize("parameters", [None, 3, [("partitions", 2)], "partitions=2"])
def test_parameters_are_a_dictionary(parameters: object) -> None:
    assert failure(parameters).startswith("The parameters must be a dictionary.")


def test_a_name_is_a_str() -> None:
    assert failure({"partitions": 2, 3: 4}).startswith("unknown parameter 3: a name must be a str")


LATER_KEYS = {
    "tensor_parallel_degree": (1, 2),
    "sharded_data_parallel_degree": (1, 2),
    "sdp_reduce_bucket_size": (500_000_000, 1),
    "sdp_param_persistence_threshold": (1_000_000, 1),
    "sdp_max_live_parameters": (1_000_000_000, 1),
    "sdp_hierarchical_allgather": (True, False),
    "sdp_gradient_clipping": (1.0, 0.5),
    "fp16": (False, True),
    "bf16": (False, True),
    "fp16_params": (False, True),
    "shard_optimizer_state": (False, True),
    "prescaled_batch": (False, True),
    "offload_activations": (False, True),
    "activation_loading_horizon": (4, 2),
    "delayed_parameter_initialization": (False, True),
    "fast_mode": (False, True),
    "checkpoint_attentions": (False, True),
    "_match_weights": (False, True),
    "_fp32_grad_accumulation": (False, True),
}


@pytest.mark.parametrize("key", LATER_KEYS)
def test_a_key_of_later_work_is_refused_unless_it_asks_for_nothing(key: str) -> None:
    off, on = LATER_KEYS[key]

    assert Config.from_parameters({"partitions": 2, key: off}) == Config(partitions=2)
    assert failure({"partitions": 2, key: on}).startswith(f"{key!r} is not supported yet.")
    assert failure({"partitions": 2, key: None}).startswith(f"{key!r} is not supported yet.")


@pytest.mark.parametrize(("key", "value"), [("fp16", 0), ("tensor_parallel_degree", True), ("bf16", "False")])
def test_the_off_value_of_another_type_is_refused(key: str, value: object) -> None:
    assert "not supported yet" in failure({"partitions": 2, key: value})


@pytest.mark.parametrize(
    "key",
    [
        "hybrid_shard_degree",
        "sm_activation_offloading",
        "context_parallel_degree",
        "expert_parallel_degree",
        "fsdp_cache_flush_warnings",
        "allow_empty_shards",
        "random_seed",
    ],
)
def test_keys_of_version_two_are_refused_by_name(key: str) -> None:
    text = failure({"partitions": 2, key: 1})

    assert text.startswith(f"{key!r} is not supported yet.")
    assert "SMP v2" in text


def test_trace_device_is_sent_to_the_model() -> None:
    text = failure({"partitions": 2, "trace_device": "cpu"})

    assert text.startswith("'trace_device' is not supported yet")
    assert "smp.DistributedModel" in text
