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


@pytest.mark.parametrize("key", ["fp16", "bf16", "shard_optimizer_state"])
def test_a_switch_of_1_6_is_there_to_read(key: str) -> None:
    for value in (True, False, 1, 0):
        assert getattr(Config.from_parameters({"partitions": 2, key: value}), key) is bool(value)


def test_half_precision_is_of_one_kind() -> None:
    told = failure({"partitions": 2, "fp16": True, "bf16": True})
    assert told.startswith("'fp16' and 'bf16' cannot be simultaneously enabled. Got bf16=True")


def test_sharded_state_and_sharded_parameters_are_one_or_the_other() -> None:
    told = failure({"partitions": 1, "shard_optimizer_state": True, "sharded_data_parallel_degree": 2})
    assert "cannot be used together" in told and "Got shard_optimizer_state=True" in told


def test_tensor_parallelism_needs_ddp_as_it_did() -> None:
    told = failure({"partitions": 2, "tensor_parallel_degree": 2})
    assert told.startswith("tensor_parallel_degree above 1 needs `ddp` to be set as well.")
    config = Config.from_parameters({"partitions": 2, "tensor_parallel_degree": 2, "ddp": True})
    config.check_world_size(8)
    with pytest.raises(
        ConfigError, match=r"6 processes, partitions=2 x tensor_parallel_degree=2; start 4 or 8"
    ):
        config.check_world_size(6)
    with pytest.raises(ConfigError, match=r"2 < partitions=2 x tensor_parallel_degree=2; start 4"):
        config.check_world_size(2)
    told = failure({"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, "fp16_params": True})
    assert told.startswith("fp16_params with tensor parallelism needs 'fp16' to be set as well.")


INERT_KEYS = {
    "prescaled_batch": True,
    "fp16_params": True,
    "sdp_reduce_bucket_size": 5e8,
    "sdp_param_persistence_threshold": 0,
    "sdp_max_live_parameters": 1,
    "sdp_hierarchical_allgather": False,
    "sdp_gradient_clipping": 0.5,
    "activation_loading_horizon": 2,
    "trace_device": "cpu",
    "overlapping_allreduce": False,
}


@pytest.mark.parametrize("key", INERT_KEYS)
def test_a_key_without_its_feature_passes_and_is_there_to_read(key: str) -> None:
    config = Config.from_parameters({"partitions": 2, key: INERT_KEYS[key]})

    assert getattr(config, key) == INERT_KEYS[key]
    assert config.hints_text() is None


@pytest.mark.parametrize("key", ["fast_mode", "checkpoint_attentions"])
def test_a_hint_passes_and_says_what_becomes_of_it(key: str) -> None:
    assert f"{key}: " in (Config.from_parameters({"partitions": 2, key: True}).hints_text() or "")
    assert Config.from_parameters({"partitions": 2, key: False}).hints_text() is None


def test_what_needs_ddp_says_that_it_means_nothing_without() -> None:
    given = {"partitions": 2, "ddp_port": 1234, "ddp_dist_backend": "nccl"}
    said = Config.from_parameters({**given, "ddp": False}).hints_text() or ""
    assert "ddp_port: means nothing while ddp is False. ddp_dist_backend: means nothing" in said
    assert Config.from_parameters({**given, "ddp": True}).hints_text() is None


@pytest.mark.parametrize("key", ["_match_weights", "_fp32_grad_accumulation", "_prescaled_batch"])
def test_private_switches_of_scripts_mean_nothing(key: str) -> None:
    for value in (True, False, 1, 0):
        assert Config.from_parameters({"partitions": 2, key: value}) == Config(partitions=2)
    assert failure({"partitions": 2, key: 2}).startswith(f"{key} must be a value in: [True, False].")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("tensor_parallel_degree", True, "The number of tensor_parallel_degree must be a positive integer."),
        ("tensor_parallel_degree", 0, "The number of tensor_parallel_degree must be a positive integer."),
        (
            "sharded_data_parallel_degree",
            -1,
            "sharded_data_parallel_degree must be a whole number of 0 or more.",
        ),
        ("sdp_gradient_clipping", "1", "sdp_gradient_clipping must be a number of 0 or more."),
        ("sdp_gradient_clipping", -1.0, "sdp_gradient_clipping must be a number of 0 or more."),
        (
            "activation_loading_horizon",
            0,
            "The number of activation_loading_horizon must be a positive integer.",
        ),
        ("fp16", None, "fp16 must be a value in: [True, False]."),
        ("bf16", "False", "bf16 must be a value in: [True, False]."),
        ("trace_device", "tpu", "trace_device must be a value in: ['cpu', 'gpu']."),
    ],
)
def test_a_key_without_its_feature_is_checked_all_the_same(key: str, value: object, text: str) -> None:
    assert failure({"partitions": 2, key: value}).startswith(f"{text} Got {key}={value!r}")


def test_what_aws_own_script_sends_passes() -> None:
    """The 22 keys of its GPT training script, at the script's defaults without sharding."""
    sent = {
        "ddp": True,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "microbatches": 1,
        "shard_optimizer_state": False,
        "prescaled_batch": True,
        "fp16": False,
        "bf16": False,
        "offload_activations": False,
        "delayed_parameter_initialization": False,
        "optimize": "speed",
        "placement_strategy": "cluster",
        "activation_loading_horizon": 4,
        "skip_tracing": False,
        "auto_partition": True,
        "default_partition": 0,
        "static_mode": False,
        "fast_mode": False,
        "sharded_data_parallel_degree": 1,
        "ddp_dist_backend": "auto",
        "sdp_hierarchical_allgather": False,
        "sdp_gradient_clipping": 1.0,
    }

    config = Config.from_parameters(sent)

    assert config.partitions == 2
    assert config.prescaled_batch is True
    assert config.hints_text() is None


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
