"""Configurations of five systems, compiled to one plan: :func:`load_plan`. No torch, no processes.

``check_model(plan, describe_model(module))`` is the second half of the validation: names, shapes and layers
of a model. ``convert(plan, dialect)`` says a plan in another system's words.
"""

from __future__ import annotations

from .load.detect import DIALECTS
from .load.loading import load_plan
from .plan.model_placement import check_model
from .plan.model_shape import ModelShape, describe_model
from .plan.parallel_plan import ParallelPlan
from .showing.conversion import convert

__all__ = ["DIALECTS", "ModelShape", "ParallelPlan", "check_model", "convert", "describe_model", "load_plan"]
