"""Arguments of transformers' forwards that distributed modules have no use for, or cannot do."""

from __future__ import annotations

from typing import Any

__all__ = ["refuse_given"]

_WITHOUT_EFFECT = frozenset(
    ["position_ids", "return_dict", "num_items_in_batch", "is_causal", "cache_position", "token_type_ids"]
)
"""Inside a layer or an encoder: transformers hands them down, and what they do was done above."""


def refuse_given(what: str, given: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: an argument asks for something.
    """
    for name, value in given.items():
        if value is not None and value is not False and name not in _WITHOUT_EFFECT:
            raise ValueError(
                f"{what} that tensor parallelism has distributed does not support {name}: call the model "
                "without it, or take this module out with smp.set_tensor_parallelism(module, False)"
            )
