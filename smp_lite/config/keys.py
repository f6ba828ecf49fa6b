"""Which keys exist, and which of them are refused.

A key that is silently ignored costs its owner a training run, so none is. Keys of features that are not built
are refused by name where they ask for something (:mod:`.v1_parameters`). A key nobody knows is taken for a
misspelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from smp_lite.config.errors import ConfigError, complaint
from smp_lite.config.v1_parameters import PRIVATE_HINTS

__all__ = ["is_private_hint", "refuse_v2_keys", "unique_keys", "unknown_keys_text"]

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


def is_private_hint(key: str, value: object) -> bool:
    """Whether a key is one of those that mean nothing here.

    Raises:
        ConfigError: it is, and its value is no switch.
    """
    if key not in PRIVATE_HINTS:
        return False
    if not isinstance(value, bool) and value not in (0, 1):
        text = f"{key} must be a value in: [True, False]."
        raise ConfigError(complaint(text, key, value, "leave it out: it means nothing here"))
    return True


def refuse_v2_keys(parameters: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first key of the other product."""
    for key, value in parameters.items():
        if key in _V2_KEYS:
            way_out = "leave it out; it belongs to SMP v2, which has no pipeline parallelism"
            raise ConfigError(complaint(f"{key!r} is not supported yet.", key, value, way_out))


def unknown_keys_text(parameters: Mapping[str, Any], supported: Iterable[str]) -> str:
    """Returns one sentence per key that is not known, or ''."""
    supported = sorted(supported)
    known = [*supported, *PRIVATE_HINTS, *_V2_KEYS]
    sentences = []
    for key in parameters:
        if key in known:
            continue
        close = difflib.get_close_matches(key.lower(), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the parameters are {', '.join(supported)}"
        sentences.append(f"unknown parameter {key!r}: {hint}")
    return "; ".join(sentences)


def unique_keys(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The pairs as a dictionary, for readers of texts, which would let the last of equal keys win.

    Raises:
        ConfigError: a key stands twice.
    """
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key {key!r} stands twice: remove one, since only one of them could count")
        found[key] = value
    return found
