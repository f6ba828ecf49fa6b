"""Arguments of transformers' forwards that distributed modules have no use for, or cannot do."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["refuse_given"]

_WITHOUT_EFFECT = frozenset(
    ["position_ids", "return_dict", "num_items_in_batch", "is_causal", "cache_position", "token_type_ids"]
)
"""Inside a layer or an encoder: transformers hands them down, and what they do was done above."""


def refuse_given(what: str, given: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: an argument asks for something, or the model around was asked for what its parts compute.
    """
    for key in _collected():
        raise ValueError(
            f"{what} that tensor parallelism has distributed does not give the model its {key}: call it "
            f"without output_{key}, or take this module out with smp.set_tensor_parallelism(module, False)"
        )
    for name, value in given.items():
        if value is not None and value is not False and name not in _WITHOUT_EFFECT:
            raise ValueError(
                f"{what} that tensor parallelism has distributed does not support {name}: call the model "
                "without it, or take this module out with smp.set_tensor_parallelism(module, False)"
            )


def _collected() -> list[str]:
    """What a model of transformers 5 around takes from its parts, by hooks on the classes that they had."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector: Any = getattr(capturing, "_active_collector", None)
    found = collector.get() if collector is not None else None
    return [key for key in found or {} if not key.startswith("_")]
