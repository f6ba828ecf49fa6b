"""Layers under the names that SMP v1 scripts import from ``smp.nn``."""

from __future__ import annotations

from typing import Any

from ..smp_v1.missing import Submodule, missing_in
from .layer_norm import FusedLayerNorm

__all__ = ["FusedLayerNorm"]

_missing = missing_in("nn", __name__)


def __getattr__(name: str) -> Any:
    return Submodule("nn.huggingface") if name == "huggingface" else _missing(name)
