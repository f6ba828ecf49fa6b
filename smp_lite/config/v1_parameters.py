"""The keys of SMP v1 since 1.6, and what becomes of those that do nothing.

AWS's scripts send more than twenty keys to ``smp.init``, used or not. So what asks for nothing passes: a key
is a *hint* where it can change speed or memory but no result, and *inert* as long as the feature that it
belongs to is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from smp_lite.config.parameters import Count, Parameters, Switch

__all__ = ["HINTS", "INERT", "PRIVATE_HINTS", "SINCE_1_6", "LaterParameters"]


def _whole(value: object) -> object:
    """JSON writes 5e8 for 500 million."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_NotNegative = Annotated[int, Field(ge=0)]
_Elements = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
_ElementsOrZero = Annotated[int, Field(ge=0), BeforeValidator(_whole)]


class LaterParameters(Parameters):
    """Checked by their types like the others, so that a script's mistake is told here as it was there."""

    trace_device: Literal["cpu", "gpu"] = Field(
        "gpu", description="Hint: tracing runs on tensors without data."
    )
    overlapping_allreduce: Switch = Field(
        True,
        description="Default of smp.DistributedModel's argument of that name.",
    )
    tensor_parallel_degree: Count = Field(
        1, description="How many ranks share the distributed modules of a stage; above 1 it needs ddp."
    )
    prescaled_batch: Switch = Field(
        False,
        description="Whether all tensor-parallel ranks bring the same batch, that of smp.rdp_rank(); else "
        "each brings its own, that of smp.dp_rank().",
    )
    fp16: Switch = Field(
        False,
        description="The model in float16, with float32 master weights in the optimizer and loss scaling: "
        "model.backward(loss), optimizer.clip_master_grads(). Never with bf16.",
    )
    bf16: Switch = Field(
        False,
        description="The model in bfloat16, with float32 master weights in the optimizer. Never with fp16.",
    )
    fp16_params: Switch = Field(
        False, description="Inert: with fp16 the whole model is in float16, distributed modules too."
    )
    shard_optimizer_state: Switch = Field(
        False,
        description="Each replica keeps one part of the optimizer's state (ZeRO stage 1). Parameters and "
        "gradients stay whole. Without other replicas it has no effect. Not with "
        "sharded_data_parallel_degree above 1.",
    )
    sharded_data_parallel_degree: _NotNegative = Field(
        1,
        description="How many consecutive dp ranks hold one copy of parameters, gradients and optimizer "
        "state together, in pieces; it divides dp_size. 0 and 1 are off. Also over several partitions.",
    )
    sdp_reduce_bucket_size: _Elements = Field(
        500_000_000,
        description="Most elements in one reduction of sharded gradients; also, one holds gradients of one "
        "block at most.",
    )
    sdp_param_persistence_threshold: _ElementsOrZero = Field(
        1_000_000,
        description="Parameters with fewer elements are not cut into pieces: every rank holds them, their "
        "gradients and their optimizer state whole.",
    )
    sdp_max_live_parameters: _Elements = Field(
        1_000_000_000,
        description="Nothing is gathered ahead beyond so many gathered elements. What one block needs is "
        "gathered all the same, even where it alone is more.",
    )
    sdp_hierarchical_allgather: Switch = Field(
        True, description="Hint: MPI and the process groups choose how they gather; the numbers are the same."
    )
    sdp_gradient_clipping: Annotated[float, Field(ge=0)] = Field(
        1.0,
        description="With sharded_data_parallel_degree above 1, optimizer.step() always clips the gradient "
        "of the whole model to this L2 norm. 0 is off.",
    )
    offload_activations: Switch = Field(
        False,
        description="Inputs of checkpointed modules leave memory between forward and backward, for a "
        "nameless file in SMP_LITE_OFFLOAD_FOLDER or the folder for temporary files; on a GPU, for pinned "
        "memory of the host. Only within @smp.step.",
    )
    activation_loading_horizon: Count = Field(
        4,
        description="How many actions (forwards and backwards of a microbatch) before its backward an "
        "offloaded input comes back; what would be back at once stays in memory.",
    )
    delayed_parameter_initialization: Switch = Field(
        False,
        description="Models built in smp.model_creation take no memory until they are partitioned; then each "
        "process makes its part, with the same numbers as without delay.",
    )
    fast_mode: Switch = Field(False, description="Hint: values go from stage to stage directly anyway.")
    checkpoint_attentions: Switch = Field(False, description="Hint: saves memory only.")


HINTS: Mapping[str, Any] = {
    "fast_mode": False,
    "checkpoint_attentions": False,
}
"""Key -> the value that asks for nothing; with another one a line says what becomes of it."""

INERT: Mapping[str, str] = {
    "fp16_params": "tensor_parallel_degree",
}
"""Key -> the one that it belongs to."""

SINCE_1_6 = frozenset(LaterParameters.model_fields.keys() - Parameters.model_fields.keys()) - {
    "trace_device",
    "overlapping_allreduce",
}
"""Keys of tensor parallelism and what came with it; a job that sends one has files by pp and tp rank."""

PRIVATE_HINTS = ("_match_weights", "_fp32_grad_accumulation", "_prescaled_batch")
"""Switches that AWS's scripts send and no document names; they mean nothing without the features above."""
