"""The type of a half-precision job's parameters."""

from __future__ import annotations

import torch

from ...config import Config

__all__ = ["half_type"]


def half_type(config: Config) -> torch.dtype | None:
    """float16, bfloat16, or None: parameters keep the type that they have."""
    if config.fp16:
        return torch.float16
    return torch.bfloat16 if config.bf16 else None
