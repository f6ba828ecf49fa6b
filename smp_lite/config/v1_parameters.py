"""The keys of SMP v1 that this library takes without their feature.

AWS's scripts send more than twenty keys to ``smp.init``, used or not. So what asks for nothing passes, and
what is asked decides: a key is a *hint* where it can change speed or memory but no result, *inert* as long as
the feature that it belongs to is off, and *refused* where leaving it out would train something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from smp_lite.config.parameters import Count, Parameters, Switch

__all__ = ["HINTS", "INERT", "PRIVATE_HINTS", "REFUSED", "SINCE_1_6", "Later", "LaterParameters"]


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
        description="Whether all tensor-parallel ranks bring the same batch; else each brings its own.",
    )
    fp16: Switch = Field(False, description="True is refused: not supported yet.")
    bf16: Switch = Field(False, description="True is refused: not supported yet.")
    fp16_params: Switch = Field(False, description="Inert: half-precision parameters of distributed modules.")
    shard_optimizer_state: Switch = Field(False, description="True is refused: not supported yet.")
    sharded_data_parallel_degree: _NotNegative = Field(
        1, description="Above 1 it is refused: not supported yet. 0 and 1 are off."
    )
    sdp_reduce_bucket_size: _Elements = Field(
        500_000_000, description="Inert: elements of a reduction of sharded data parallelism."
    )
    sdp_param_persistence_threshold: _ElementsOrZero = Field(
        1_000_000, description="Inert: smaller parameters are not sharded."
    )
    sdp_max_live_parameters: _Elements = Field(
        1_000_000_000, description="Inert: the most elements that are gathered at once."
    )
    sdp_hierarchical_allgather: Switch = Field(True, description="Inert: gather within hosts first.")
    sdp_gradient_clipping: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Inert: clipping inside the step of a sharded optimizer."
    )
    offload_activations: Switch = Field(
        False, description="Hint: on processors, activations are in the host's memory as it is."
    )
    activation_loading_horizon: Count = Field(
        4, description="Hint: how early offloaded activations come back."
    )
    delayed_parameter_initialization: Switch = Field(
        False,
        description="Hint: every process still makes the whole model and keeps its part; parameters are the "
        "same, the memory is not saved yet.",
    )
    fast_mode: Switch = Field(False, description="Hint: values go from stage to stage directly anyway.")
    checkpoint_attentions: Switch = Field(False, description="Hint: saves memory only.")


@dataclass(frozen=True)
class Later:
    """Why a key is refused.

    Attributes:
        off: values up to this one (switches: this one) ask for nothing.
        way_out: what to do instead.
    """

    off: int | bool
    way_out: str


REFUSED: Mapping[str, Later] = {
    "sharded_data_parallel_degree": Later(1, "write 1: parameters and gradients are whole on each replica"),
    "shard_optimizer_state": Later(False, "write False: each replica keeps the whole state of its part"),
    "fp16": Later(False, "write False, or use torch.autocast in the step function"),
    "bf16": Later(False, "write False, or use torch.autocast in the step function"),
}

HINTS: Mapping[str, Any] = {
    "offload_activations": False,
    "delayed_parameter_initialization": False,
    "fast_mode": False,
    "checkpoint_attentions": False,
}
"""Key -> the value that asks for nothing; with another one a line says what becomes of it."""

INERT: Mapping[str, str] = {
    "fp16_params": "tensor_parallel_degree",
    **dict.fromkeys(
        (
            "sdp_reduce_bucket_size",
            "sdp_param_persistence_threshold",
            "sdp_max_live_parameters",
            "sdp_hierarchical_allgather",
            "sdp_gradient_clipping",
        ),
        "sharded_data_parallel_degree",
    ),
    "activation_loading_horizon": "offload_activations",
}
"""Key -> the one that it belongs to."""

SINCE_1_6 = frozenset(LaterParameters.model_fields.keys() - Parameters.model_fields.keys()) - {
    "trace_device",
    "overlapping_allreduce",
}
"""Keys of tensor parallelism and what came with it; a job that sends one has files by pp and tp rank."""

PRIVATE_HINTS = ("_match_weights", "_fp32_grad_accumulation", "_prescaled_batch")
"""Switches that AWS's scripts send and no document names; they mean nothing without the features above."""
