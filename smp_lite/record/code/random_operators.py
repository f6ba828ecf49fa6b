"""Which operators take numbers from a generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["draws_numbers", "is_attention_without_dropout"]


def draws_numbers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operator takes numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags and not is_attention_without_dropout(
        func, args, kwargs
    )


def is_attention_without_dropout(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Kernels of attention carry the tag, and return a seed and an offset, but draw only with dropout."""
    if "attention" not in func.__name__:
        return False
    names = [argument.name for argument in func._schema.arguments]
    return not {**dict(zip(names, args)), **kwargs}.get("dropout_p", 0.0)
