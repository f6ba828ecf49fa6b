"""Layers under the names that SMP v1 scripts import from ``smp.nn``."""

from __future__ import annotations

import importlib
from typing import Any

from ..smp_v1.missing import missing_in
from .layer_norm import FusedLayerNorm

_DISTRIBUTED = (
    *("DistributedAttentionLayer", "DistributedEmbedding", "DistributedLinear", "DistributedModule"),
    *("DistributedTransformer", "DistributedTransformerLMHead", "DistributedTransformerLayer"),
    *("DistributedLayerNorm", "DistributedTransformerOutputLayer", "FlashAttentionLayer"),
)

__all__ = ["FusedLayerNorm", *_DISTRIBUTED]

_missing = missing_in("nn", __name__)


def __getattr__(name: str) -> Any:
    # At their first use: these modules ask the session, which imports from here.
    if name in _DISTRIBUTED:
        return getattr(importlib.import_module(".distributed", __name__), name)
    if name == "huggingface":
        return importlib.import_module(".huggingface", __name__)
    return _missing(name)
