"""ParallelPlan: the one frozen form that the configurations of five systems compile to.

A plan says what a configuration asks for, before a process starts or a model exists: the axes with their
order (every system orders them differently, so the order is part of the plan), which layer belongs to which
stage, how a batch becomes microbatches, what is sharded over which axes. It holds no torch object and talks
to nobody. For each field it keeps who said it (:class:`Said`), so that an error or ``smp-lite explain`` can
quote the key that a person wrote; what nobody said is marked as a default.

Stages and positions on the pp axis are two things. A rank may hold several stages: virtual chunks of an
interleaved schedule, or a device that several stages of a device map share. ``stages.owners`` says which pp
index holds a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from ...plan.topology import SMP_GROUPS, Topology
from .stage_assignment import StageRule

__all__ = [
    "AXIS_ROLES",
    "DataParallel",
    "Microbatches",
    "ParallelPlan",
    "Placement",
    "Said",
    "Schedule",
    "ShardingRule",
    "TensorMode",
    "group_kinds",
]

#: What each axis name is for. Sub-axes of tensor parallelism and the data axes of a mesh have one role.
AXIS_ROLES = {
    "pp": "pp",
    "dp": "dp",
    "data": "dp",
    "fsdp": "dp",
    **dict.fromkeys(("tp", "tp_row", "tp_col", "tp_dep", "tp_out", "tp_in", "tp_w", "tensor"), "tp"),
    "expert": "ep",
    "context": "cp",
}

_FIELDS_SAID = ("axes", "placement", "stages", "microbatches", "schedule", "tensor", "rules", "data_parallel")


@dataclass(frozen=True)
class Said:
    """Who said a value.

    Attributes:
        dialect: the system whose configuration it was.
        file: where it stood: a path, with the line where that is known, or ``command line``. None: in a
            dictionary, or nowhere.
        key: the key as that system writes it, for example ``train.dist.tensor_parallel_size``.
        is_default: nobody said it.
        how: how an unsaid value came about, or what a said one was taken for.
        is_inferred: nobody said it, and it follows from what was said.
    """

    dialect: str
    file: str | None
    key: str
    is_default: bool = False
    how: str = ""
    is_inferred: bool = False

    def text(self) -> str:
        """For one cell of a table."""
        if self.is_default:
            word = "inferred" if self.is_inferred else "default"
            return f"{word}: {self.how}" if self.how else word
        if self.how:
            return f"{self.key} ({self.how})" if self.key else self.how
        return self.key


@dataclass(frozen=True)
class Placement:
    """The device of each rank.

    Attributes:
        labels: by rank, as the configuration names devices; empty: it names none.
        local_ordinals: by rank, the index of its device among those used, in the order of their numbers,
            for a run on one host; empty where ``labels`` is.
    """

    labels: tuple[str, ...] = ()
    local_ordinals: tuple[int, ...] = ()


@dataclass(frozen=True)
class Microbatches:
    """Microbatches of a step.

    Attributes:
        count: how many.
        source: ``slice``: one batch is cut into them; ``consume``: each is a batch from the loader.
        size: samples of one, on one data-parallel rank; None: not said.
        global_batch_size: samples of a step over all ranks; None: not said.
    """

    count: int = 1
    source: Literal["slice", "consume"] = "slice"
    size: int | None = None
    global_batch_size: int | None = None


ScheduleName = Literal[
    "sequential", "gpipe", "1f1b", "virtual", "zero_bubble", "zero_bubble_v", "auto", "forward"
]


@dataclass(frozen=True)
class Schedule:
    """Order of a step's actions.

    Attributes:
        name: ``sequential``: one stage works at a time; ``gpipe``: all forwards, then all backwards;
            ``1f1b``: backward first; ``virtual``: 1f1b over several chunks a rank; ``zero_bubble``: gradients
            of parameters fill the gaps; ``zero_bubble_v``: that over two chunks a rank, there and back;
            ``forward``: no backwards.
        max_in_flight: most microbatches between forward and backward on a stage; None: not said.
        strict: a microbatch waits until an earlier one has left; None: not said.
    """

    name: ScheduleName = "sequential"
    max_in_flight: int | None = None
    strict: bool | None = None


@dataclass(frozen=True)
class TensorMode:
    """How tensor-parallel ranks share a layer.

    Attributes:
        mode: None: they do not; ``1d`` ... ``3d``; ``sequence``: whole weights, a share of the sequence;
            ``enflame``: each dense op is split, computed and merged alone; ``rules``: as the plan's rules;
            ``smp``: the modules that the script puts under ``smp.tensor_parallelism``.
        depth: layers of the 2.5d cuboid.
        sharding_dim: of ``enflame``, of a kernel stored as [in, out]: -1 its outputs (gathered), 0 its inputs
            (summed).
        fuse: of ``enflame``: a gather followed by a split may be left out, which changes no value.
    """

    mode: Literal["1d", "2d", "2.5d", "3d", "sequence", "enflame", "rules", "smp"] | None = None
    depth: int | None = None
    sharding_dim: int | None = None
    fuse: bool | None = None


@dataclass(frozen=True)
class ShardingRule:
    """One line of sharding rules.

    Attributes:
        pattern: a name in which ``*`` stands for one integer component; ``""`` is the whole model.
        dims: for each dimension the axes that it is split over, the first being major; () is replicated.
        output_index: element of a module's output that is meant; None: the output itself.
        target: ``either`` until the names of a model decide whether it is a tensor or a module's output.
    """

    pattern: str
    dims: tuple[tuple[str, ...], ...]
    output_index: int | None = None
    target: Literal["parameter", "activation", "either"] = "either"

    @property
    def name(self) -> str:
        """The pattern as it was written, index included."""
        return self.pattern if self.output_index is None else f"{self.pattern}[{self.output_index}]"


@dataclass(frozen=True)
class DataParallel:
    """What data-parallel ranks share: ``none``, ``ddp``, ``horovod``, ``handlers`` (gradient handlers by
    name), ``zero1`` ... ``zero3`` or ``fsdp`` (by the plan's rules)."""

    policy: str = "ddp"
    handlers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """What a configuration asks for.

    Attributes:
        dialect: the system that it was written for.
        topology: ranks on axes, outermost first, in that system's order; kinds of groups.
        placement: devices of ranks.
        stages: which layers make a stage, and which pp index holds it.
        microbatches: how a step's samples are cut.
        schedule: order of a step's actions.
        tensor: how tensor-parallel ranks share a layer.
        rules: sharding by name, in the order of the file.
        strict_rules: a rule that matches nothing is an error.
        data_parallel: what data-parallel ranks share.
        others: ``(key, value)`` of everything else that was read, under the system's own keys.
        provenance: ``(field, who said it)``; fields are those above, ``axis.<name>``,
            ``others.<key>``, ``ranks``, and ``microbatches.size`` where that is known.
        warnings: what a person should look at.
        notes: what became of parts of the configuration.
    """

    dialect: str
    topology: Topology
    placement: Placement = field(default_factory=Placement)
    stages: StageRule
    microbatches: Microbatches = field(default_factory=Microbatches)
    schedule: Schedule = field(default_factory=Schedule)
    tensor: TensorMode = field(default_factory=TensorMode)
    rules: tuple[ShardingRule, ...] = ()
    strict_rules: bool = True
    data_parallel: DataParallel = field(default_factory=DataParallel)
    others: tuple[tuple[str, Any], ...] = ()
    provenance: tuple[tuple[str, Said], ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name, _ in self.topology.axes if name not in AXIS_ROLES]
        if unknown:
            raise ValueError(f"axes without a role: {unknown}")
        axes = [f"axis.{name}" for name, _ in self.topology.axes]
        needed = [*_FIELDS_SAID, *axes, *(f"others.{key}" for key, _ in self.others)]
        missing = [name for name in needed if name not in dict(self.provenance)]
        if missing:
            raise ValueError(f"nobody is named as having said {missing}")
        if any(not 0 <= owner < self.pp_size for owner in self.stages.owners):
            raise ValueError(f"stages are held by pp indexes 0 ... {self.pp_size - 1}: {self.stages.owners}")

    def said(self, name: str) -> Said:
        """Returns who said a field (see ``provenance``)."""
        return dict(self.provenance)[name]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def pp_size(self) -> int:
        """Number of ranks along the pipeline; a rank may hold several stages."""
        return self.role_size("pp")

    @property
    def dp_size(self) -> int:
        """Number of ranks that see different samples; all data axes together."""
        return self.role_size("dp")

    @property
    def tp_size(self) -> int:
        """Number of ranks that share a layer; all sub-axes together."""
        return self.role_size("tp")

    def role_size(self, role: str) -> int:
        """Returns the product of the axes of one role (:data:`AXIS_ROLES`)."""
        size = 1
        for axis in self.role_axes(role):
            size *= self.topology.axis_size(axis)
        return size

    def role_axes(self, role: str) -> tuple[str, ...]:
        """Returns the axes of one role, outermost first."""
        return _axes_of_role(self.topology.axes, role)

    def role_rank(self, role: str, rank: int) -> int:
        """Returns the index of ``rank`` over all axes of one role, row-major."""
        coordinate = self.topology.coordinate(rank)
        index = 0
        for axis in self.role_axes(role):
            index = index * self.topology.axis_size(axis) + coordinate[axis]
        return index

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Data axes along which ranks hold pieces of parameters; none where all hold them whole.

        Levels 1 and 2 of ZeRO ask for less: pieces of the optimizer's state, and of gradients. They run as
        level 3, with the same results, less memory and more messages.
        """
        policy = self.data_parallel.policy
        names = ("fsdp",) if policy == "fsdp" else self.role_axes("dp") if policy.startswith("zero") else ()
        return tuple(name for name, size in self.topology.axes if name in names and size > 1)

    @property
    def parameter_rules(self) -> tuple[ShardingRule, ...]:
        """The rules that a tensor's name may match."""
        return tuple(rule for rule in self.rules if rule.target != "activation")

    @property
    def activation_rules(self) -> tuple[ShardingRule, ...]:
        """The rules that a module's name may match."""
        return tuple(rule for rule in self.rules if rule.target != "parameter")

    @property
    def bubble(self) -> Fraction:
        """Share of a step in which a rank waits, if all stages cost the same: (p-1)/(v m + p-1). For zero
        bubble also backwards cost as much as forwards, and gradients of parameters too.
        """
        p = self.pp_size
        if self.schedule.name == "sequential":
            return Fraction(p - 1, p)
        if self.schedule.name == "zero_bubble_v":
            return Fraction(0)
        v = {"virtual": self.stages.num_chunks, "zero_bubble": 3}.get(self.schedule.name, 1)
        return Fraction(p - 1, v * self.microbatches.count + p - 1)

    def stage_of_layer(self, num_layers: int, costs: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the stage of each layer; ``stages.owners[stage]`` is the pp index that holds it.

        Args:
            num_layers: of the model, in execution order.
            costs: of each layer, such as its number of parameters, for rules that balance.

        Raises:
            ConfigError: the rule cannot place so many layers, or is not decided by layers.
        """
        return self.stages.assign(num_layers, costs)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that ``rank`` holds."""
        pp_rank = self.role_rank("pp", rank)
        return tuple(stage for stage, owner in enumerate(self.stages.owners) if owner == pp_rank)


def group_kinds(
    axes: Sequence[tuple[str, int]], own: Sequence[tuple[str, tuple[str, ...]]] = ()
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the five kinds of groups of SMP for any axes, then a system's ``own``.

    PP, TP and RDP hold ranks that differ on the axes of one role; MP everything but data axes, DP everything
    but the pipeline. A role without an axis has groups of one rank.
    """
    roles = {role: _axes_of_role(axes, role) for role in ("pp", "tp", "dp")}
    if all(found in ((), (role,)) for role, found in roles.items()) and len(axes) == 3:
        return (*SMP_GROUPS, *own)
    names = tuple(name for name, _ in axes)
    kinds = (
        ("MP", tuple(name for name in names if AXIS_ROLES[name] != "dp")),
        ("DP", tuple(name for name in names if AXIS_ROLES[name] != "pp")),
        ("PP", roles["pp"]),
        ("TP", roles["tp"]),
        ("RDP", roles["dp"]),
    )
    return (*kinds, *own)


def _axes_of_role(axes: Sequence[tuple[str, int]], role: str) -> tuple[str, ...]:
    return tuple(name for name, _ in axes if AXIS_ROLES.get(name) == role)
