"""What scripts for Colossal-AI use of its API, on this runtime.

A script changes its import line and runs on :class:`smp_lite.DistributedModel`;
:mod:`smp_lite.systems.colossal` has the same names::

    from smp_lite.systems.colossal import PipelineSchedule, build_pipeline_model, initialize, launch

Every rank builds the whole model. Where Colossal-AI gives a rank its layers, here each layer is given its
pipeline rank, and the model is cut in the first step.
"""

from __future__ import annotations

from .building import ModelFromConfig, build_pipeline_model, build_pipeline_model_from_cfg
from .context import (
    GlobalContext,
    ParallelMode,
    global_context,
    gpc,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from .engine import Engine, initialize
from .layers import (
    GatherOutput,
    Linear1D_Col,
    Linear1D_Row,
    Linear2D,
    Linear2p5D,
    Linear3D,
    SplitInput,
    tensor_mesh,
)
from .registry import LAYERS, MODELS, Registry, build_layer, build_model
from .schedules import InterleavedPipelineSchedule, PipelineSchedule

__all__ = [
    "LAYERS",
    "MODELS",
    "Engine",
    "GatherOutput",
    "GlobalContext",
    "InterleavedPipelineSchedule",
    "Linear1D_Col",
    "Linear1D_Row",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "ModelFromConfig",
    "ParallelMode",
    "PipelineSchedule",
    "Registry",
    "SplitInput",
    "build_layer",
    "build_model",
    "build_pipeline_model",
    "build_pipeline_model_from_cfg",
    "global_context",
    "gpc",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "tensor_mesh",
]
