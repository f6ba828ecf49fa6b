"""The fields of the configuration: every parameter with its type, default and description.

One pydantic field is one parameter. Fields are declared in the order in which the SageMaker SDK checks
them (pipeline, placement_strategy, optimize, counts, switches ...), because the first failure is the one
that is told. A count of one does not take ``True`` (pydantic's strict mode); a switch takes 1 and 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from smp_lite.plan.units import num_bytes

__all__ = ["Count", "Parameters", "Switch"]


def _switch(value: object) -> object:
    """Scripts write ``"ddp": 1``, and the SageMaker SDK lets it pass."""
    return bool(value) if type(value) is int and value in (0, 1) else value


Switch = Annotated[bool, BeforeValidator(_switch)]
Count = Annotated[int, Field(ge=1)]
Pieces = Annotated[int, Field(ge=1)] | Literal["v"]
Bytes = Annotated[int, Field(ge=1), BeforeValidator(num_bytes)]
Placement = Literal["spread", "cluster", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]


class Parameters(BaseModel):
    """The parameters, each checked by its type; :class:`~smp_lite.config.Config` checks the whole."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    pipeline: Literal[
        "simple",
        "interleaved",
        "zero_bubble",
        "interleaved_virtual",
        "zero_bubble_v",
        "auto",
        "_only_forward",
    ] = Field(
        "interleaved",
        description="Pipeline schedule. interleaved: a backward runs as soon as one is ready (1F1B); "
        "simple: all forwards, then all backwards; zero_bubble: gradients of parameters are left for when "
        "a stage would wait, within the activations of 1F1B (ZB-H1, Qi et al. 2023); interleaved_virtual: "
        "for stages that are visited several times in the same order, that of Megatron-LM (Narayanan et "
        "al. 2021); zero_bubble_v: zero_bubble for stages that are visited twice, there and back (ZB-V, Qi "
        "et al. 2023); auto: what is fastest by simulation, within memory_limit: the pieces of each "
        "partition (if virtual_stages is not given) by the times of modules before the first step, then the "
        "schedule by what actions have taken in the first steps; _only_forward: forwards alone. Where stages "
        "have another shape or costs, the fastest order within the bound of activations, by simulation, "
        "never one slower than 1F1B where that is within the bound too.",
    )
    placement_strategy: Placement = Field(
        "cluster",
        description="Layout of the ranks: an order of D (data), P (pipeline) and T (tensor), the "
        "right-most varying fastest over the world ranks. cluster = DPT: a model replica on "
        "neighbouring ranks; spread = TPD: as far apart as possible.",
    )
    optimize: Literal["speed", "memory"] = Field(
        "memory",
        description="speed: balance computation, and let a microbatch start before the previous "
        "one has left; memory: balance memory, and bound the microbatches in flight.",
    )
    microbatches: Count = Field(
        1,
        description="Number of microbatches a step's batch is split into; it must divide the batch "
        "size. 1 means no pipelining.",
    )
    partitions: Count = Field(
        description="Number of pipeline partitions (stages) the model is split into.",
    )
    pipeline_parallel_degree: Count = Field(
        description="Another name of partitions; either one suffices.",
    )
    active_microbatches: Count = Field(
        description="Largest number of microbatches in flight at once; on a stage that is visited v times, "
        "one visit's activations count 1/v.",
    )
    auto_partition: Switch = Field(
        True,
        description="Let the library assign modules to partitions, ignoring smp.partition "
        "contexts. False: the contexts decide, and default_partition must be given.",
    )
    contiguous: Switch = Field(
        True,
        description="Each partition holds modules that are adjacent in execution order. False: "
        "its pieces may be apart where that balances better.",
    )
    virtual_stages: Pieces = Field(
        1,
        description="Pieces of the model on each partition, in turn: with 2, the line of modules is cut into "
        '2 * partitions pieces, for partitions 0, 1, ..., 0, 1, ... "v": two pieces, there and back: 0, 1, '
        "..., 1, 0. Only with auto_partition and contiguous; a stored partition is used as it is.",
    )
    load_partition: Switch = Field(
        False,
        description="Reuse the partition decision stored in partition_file.",
    )
    horovod: Switch = Field(
        False,
        description="Average gradients over the data-parallel group as a Horovod script expects. "
        "Never with ddp.",
    )
    ddp: Switch = Field(
        False,
        description="Average gradients over the data-parallel group. Needed when there are more "
        "processes than partitions.",
    )
    deterministic_server: Switch = Field(
        False,
        description="Execute in the same order on all data-parallel ranks. Always so here; "
        "accepted for SMP scripts.",
    )
    skip_tracing: Switch = Field(
        False,
        description="Partition by parameter counts in order of registration, without tracing the "
        "model first.",
    )
    static_mode: Switch = Field(
        False,
        description="Record the step once for each kind of input, and replay that: the step "
        "function itself does not run again, unless what it or the model reads is set anew between steps.",
    )
    partition_file: str | None = Field(
        None,
        description="Path of the file that holds a stored partition decision.",
    )
    default_partition: int = Field(
        0,
        description="Partition of the modules outside any smp.partition context, "
        "0 <= x < partitions. Required if auto_partition is False.",
    )
    memory_weight: float = Field(
        description="Weight of memory against computation when partitions are balanced: from 0.0 "
        "(only computation) to 1.0 (only memory).",
    )
    memory_limit: Bytes | None = Field(
        None,
        description="Most bytes of a rank for parameters, gradients, optimizer state and activations, by "
        "estimate: a number, or a text such as '3 GiB'. Pipeline auto takes nothing that needs more; where "
        "nothing fits, or the pipeline that is set does not, it is an error before the first step. none: "
        "auto stays within what 1F1B needs on the rank that needs most; nothing else is checked.",
    )
    ddp_port: int | None = Field(
        None,
        description="Port of the data-parallel rendezvous; by default the platform's MASTER_PORT. Needs ddp.",
    )
    ddp_dist_backend: Literal["auto", "gloo", "nccl", "mpi"] = Field(
        "auto",
        description="What carries gradients between data-parallel ranks, and all else that ranks do with "
        "tensors together: auto takes NCCL (for other devices than CUDA's their own) in groups of ranks that "
        "have a device each, lets ranks of one host that share one read each other's memory, and takes gloo "
        "for what is in the host's memory; gloo and mpi carry what is on devices through the host's memory; "
        "nccl is auto, or an error where ranks share a device. Needs ddp.",
    )
