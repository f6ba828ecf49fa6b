"""Which keys exist: the supported ones, those of later work, and everything else.

A key that is silently ignored costs its owner a training run, so none is. Keys of features that
are not built are refused by name, with one exception: the value that switches the feature off asks
for nothing and passes, because many scripts spell out ``tensor_parallel_degree: 1`` or
``fp16: False``. A key nobody knows is taken for a misspelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from smp_lite.config.errors import ConfigError, complaint

__all__ = ["OFF_VALUES", "is_off", "refuse_later_keys", "unknown_keys_text"]

#: Keys of SMP v1 that are not supported yet -> the value that asks for nothing.
OFF_VALUES: Mapping[str, bool | int | float] = {
    "tensor_parallel_degree": 1,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "fp16_params": False,
    "fp16": False,
    "bf16": False,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "delayed_parameter_initialization": False,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 500_000_000,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "fast_mode": False,
    "checkpoint_attentions": False,
    "_match_weights": False,
    "_fp32_grad_accumulation": False,
}

#: Keys of the other product called SMP v2, which has no pipelines.
_V2_KEYS = frozenset(
    {
        "hybrid_shard_degree",
        "sm_activation_offloading",
        "context_parallel_degree",
        "expert_parallel_degree",
        "fsdp_cache_flush_warnings",
        "allow_empty_shards",
        "random_seed",
    }
)


def is_off(key: str, value: object) -> bool:
    """Says whether ``key`` belongs to later work and ``value`` asks for nothing.

    ``1`` does not stand for ``True`` here, nor ``0`` for ``False``; ``1`` may stand for ``1.0``.
    """
    if key not in OFF_VALUES:
        return False
    off = OFF_VALUES[key]
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)


def refuse_later_keys(parameters: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first key whose feature is not built."""
    for key, value in parameters.items():
        text = f"{key!r} is not supported yet."
        if key in OFF_VALUES and not is_off(key, value):
            way_out = f"leave it out, or write {OFF_VALUES[key]!r}, which asks for nothing"
            raise ConfigError(complaint(text, key, value, way_out))
        if key in _V2_KEYS:
            way_out = "leave it out; it belongs to SMP v2, which has no pipeline parallelism"
            raise ConfigError(complaint(text, key, value, way_out))
        if key == "trace_device":
            text = f"{key!r} is not supported yet as a configuration parameter."
            raise ConfigError(complaint(text, key, value, "pass it to smp.DistributedModel"))


def unknown_keys_text(parameters: Mapping[str, Any], supported: Iterable[str]) -> str:
    """Returns one sentence per key that is neither supported nor of later work, or ''."""
    supported = sorted(supported)
    known = [*supported, *OFF_VALUES, *_V2_KEYS, "trace_device"]
    sentences = []
    for key in parameters:
        if key in known:
            continue
        close = difflib.get_close_matches(key.lower(), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the parameters are {', '.join(supported)}"
        sentences.append(f"unknown parameter {key!r}: {hint}")
    return "; ".join(sentences)
