"""Colossal-AI's functions and layers under its own names; those of :mod:`smp_lite.colossal`.

They load when they are first used, since they need torch and configurations are read without.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("smp_lite.colossal"), name)
