"""Tensor parallelism for unmodified models: a plan names the modules to split, and how."""

from __future__ import annotations

from .check import Comparison, check_parallelized
from .derive import derive_plan
from .known import known_plan
from .replace import parallelize
from .state import load_whole_state_dict, whole_state_dict
from .styles import REFUSED, STYLES

__all__ = [
    "REFUSED",
    "STYLES",
    "Comparison",
    "check_parallelized",
    "derive_plan",
    "known_plan",
    "load_whole_state_dict",
    "parallelize",
    "whole_state_dict",
]
