"""Configurations of five systems, compiled to one plan: :func:`load_plan`. No torch, no processes.

``check_model(plan, describe_model(module))`` is the second half of the validation: names, shapes and layers
of a model. ``convert(plan, dialect)`` says a plan in another system's words.
"""

from __future__ import annotations

from .conversion import convert
from .detect import DIALECTS
from .loading import load_plan
from .model_placement import check_model
from .model_shape import ModelShape, describe_model
from .parallel_plan import ParallelPlan

__all__ = ["DIALECTS", "ModelShape", "ParallelPlan", "check_model", "convert", "describe_model", "load_plan"]
