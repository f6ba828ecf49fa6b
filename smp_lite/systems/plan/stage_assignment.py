"""Which layer belongs to which stage: the rules of the five systems, on layer counts and costs.

========== =====================================================================================
table      the configuration lists the stage of each layer
libai      LiBai's automatic rule: by count, lighter at the end where the counts divide
uniform    Colossal-AI: equal counts, the rest on the last stages
balanced   Colossal-AI: the contiguous split with the smallest largest stage, by parameter counts
partitioner  the partitioner of this library, on the model itself
contexts   the script places modules with ``smp.partition``
file       a stored decision is read
========== =====================================================================================

With c chunks, pp ranks hold pp * c stages, and stage s is on pp index s mod pp. The partitioner also deals
two chunks out there and back (``virtual_stages``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ...config.errors import ConfigError
from ...plan.partitioning.balance import Line, balance
from ...plan.partitioning.virtual_stages import VirtualStages, piece_stages

__all__ = ["StageRule", "balanced_intervals", "libai_counts", "uniform_intervals"]

Interval = tuple[int, int]


@dataclass(frozen=True)
class StageRule:
    """How layers become stages.

    Attributes:
        kind: see the module.
        owners: the pp index of each stage.
        num_chunks: stages of a rank that an interleaved schedule visits in turn.
        num_layers: the number of layers that the configuration is made for; None: any.
        table: of ``table``, the stage of each layer.
        allow_empty: stages without a layer are no error.
        default_stage: of ``contexts``, the home of modules outside any context.
        file: of ``file``, its path.
        memory_weight: of ``partitioner``, the weight of memory against computation.
        key: what the configuration calls the number of stages, for errors.
    """

    kind: Literal["table", "libai", "uniform", "balanced", "partitioner", "contexts", "file"]
    owners: tuple[int, ...]
    num_chunks: int = 1
    num_layers: int | None = None
    table: tuple[int, ...] | None = None
    allow_empty: bool = False
    default_stage: int | None = None
    file: str | None = None
    memory_weight: float | None = None
    key: str = "the number of stages"

    @property
    def num_stages(self) -> int:
        """Number of stages, chunks counted one by one."""
        return len(self.owners)

    @property
    def virtual_stages(self) -> VirtualStages:
        """The chunks in the words of SMP's parameters here."""
        num_ranks = self.num_stages // self.num_chunks
        in_turn = self.owners == piece_stages(num_ranks, self.num_chunks)
        return self.num_chunks if in_turn else "v"

    def assign(self, num_layers: int, costs: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the stage of each layer.

        Args:
            num_layers: of the model, in execution order.
            costs: of each layer, integers of 0 or more; needed by ``balanced``.

        Raises:
            ConfigError: the rule is for another number of layers, leaves a stage empty, or is decided by
                something else than layers.
        """
        self._check(num_layers, costs)
        if self.num_stages == 1:
            return (0,) * num_layers
        if self.table is not None:
            return self.table
        if self.kind == "partitioner":
            line = Line(tuple(costs or (1,) * num_layers), (0,) * num_layers)
            return balance(line, self.num_stages)
        if self.kind == "libai":
            counts = libai_counts(num_layers, self.num_stages)
            return tuple(stage for stage, count in enumerate(counts) for _ in range(count))
        num_ranks = self.num_stages // self.num_chunks
        if self.kind == "balanced":
            assert costs is not None
            intervals = balanced_intervals(costs, num_ranks, self.num_chunks)
        else:
            intervals = uniform_intervals(num_layers, num_ranks, self.num_chunks)
        by_stage = [intervals[stage % num_ranks][stage // num_ranks] for stage in range(self.num_stages)]
        empty = [stage for stage, (start, end) in enumerate(by_stage) if start == end]
        if empty and not self.allow_empty:
            raise ConfigError(
                f"stage {empty[0]} would be empty: {num_layers} layers over {self.num_stages} stages "
                f"({self.key}); use fewer stages, or set allow_empty_stages=True"
            )
        return tuple(stage for stage, (start, end) in enumerate(by_stage) for _ in range(start, end))

    def _check(self, num_layers: int, costs: Sequence[int] | None) -> None:
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            raise ConfigError(f"the number of layers must be an integer of 1 or more, got {num_layers!r}")
        if self.num_layers is not None and num_layers != self.num_layers:
            raise ConfigError(
                f"the configuration is for {self.num_layers} layers and the model has {num_layers}: make "
                f"pipeline_num_layers (and the table, if there is one) agree with the model"
            )
        if costs is not None and len(costs) != num_layers:
            raise ConfigError(f"{len(costs)} costs for {num_layers} layers: give one for each")
        if any(isinstance(cost, bool) or not isinstance(cost, int) or cost < 0 for cost in costs or ()):
            raise ConfigError(f"costs must be integers of 0 or more, got {list(costs or ())}")
        if self.num_stages == 1:
            return
        if self.kind == "contexts":
            raise ConfigError(
                "the script places modules with smp.partition (auto_partition is False), so their stages are "
                "not known before it runs"
            )
        if self.kind == "file":
            raise ConfigError(f"the stages are stored in {self.file!r}: they go by module, not by layer")
        if self.kind == "balanced" and costs is None:
            raise ConfigError(
                "partition_method='parameter' balances the parameters of layers: give their counts, or use "
                "partition_method='layer'"
            )
        if num_layers < self.num_stages and self.kind in ("partitioner", "libai"):
            raise ConfigError(
                f"{num_layers} layers cannot fill {self.num_stages} stages ({self.key}): use {num_layers} "
                "stages or fewer"
            )


def libai_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage by LiBai's automatic rule.

    Where at least 8 layers divide over at least 4 stages, the last stage, which also has the head and the
    loss, gets fewer; otherwise the late stages get the rest. ``(24, 4)`` gives 6, 7, 7, 4.
    """
    pretended = num_layers
    if num_stages >= 4 and num_layers >= 8 and num_layers % num_stages == 0:
        pretended += min(num_stages - 1, num_layers // num_stages)
    base, rest = divmod(pretended, num_stages)
    counts = [base] * (num_stages - rest) + [base + 1] * rest
    # What was pretended is taken away again at the end.
    for stage in reversed(range(num_stages)):
        surplus = min(counts[stage], sum(counts) - num_layers)
        counts[stage] -= surplus
    return tuple(counts)


def uniform_intervals(
    num_layers: int, num_ranks: int, num_chunks: int = 1
) -> tuple[tuple[Interval, ...], ...]:
    """Returns the layers of each pp rank as (start, end) of its chunks: Colossal-AI's uniform split.

    Raises:
        ConfigError: the chunks do not divide the layers.
    """
    if num_layers % num_chunks:
        raise ConfigError(
            f"{num_layers} layers are not a multiple of num_model_chunks={num_chunks}: use a number of "
            "chunks "
            f"that divides them, such as {_nearest_divisor(num_layers, num_chunks)}"
        )
    a_chunk = num_layers // num_chunks
    base, rest = divmod(a_chunk, num_ranks)
    counts = [base] * (num_ranks - rest) + [base + 1] * rest
    ends = [0, *accumulate(counts)]
    return tuple(
        tuple((chunk * a_chunk + ends[p], chunk * a_chunk + ends[p + 1]) for chunk in range(num_chunks))
        for p in range(num_ranks)
    )


def balanced_intervals(
    costs: Sequence[int], num_ranks: int, num_chunks: int = 1
) -> tuple[tuple[Interval, ...], ...]:
    """Returns the layers of each pp rank as (start, end) of its chunks: Colossal-AI's split by parameters.

    The smallest largest stage by bisection, filled from the front; where that needs fewer stages than there
    are, the heaviest ones are halved. A layer without parameters weighs 1. Stages are dealt out in turn. As
    many layers as stages, or fewer, are split uniformly.
    """
    num_stages = num_ranks * num_chunks
    if len(costs) <= num_stages:
        return uniform_intervals(len(costs), num_ranks, num_chunks)
    ends = [0, *accumulate(cost or 1 for cost in costs)]
    low, high = max(cost or 1 for cost in costs), ends[-1]
    while low < high:
        bound = (low + high) // 2
        low, high = (low, bound) if len(_fill(ends, bound)) <= num_stages else (bound + 1, high)
    intervals = _fill(ends, high)
    while len(intervals) < num_stages:
        heaviest = max(
            (i for i in intervals if i[1] - i[0] > 1), key=lambda i: (ends[i[1]] - ends[i[0]], -i[0])
        )
        start, end = heaviest
        middle = min(range(start + 1, end), key=lambda cut: abs(ends[start] + ends[end] - 2 * ends[cut]))
        intervals.remove(heaviest)
        intervals += [(start, middle), (middle, end)]
    intervals.sort()
    return tuple(tuple(intervals[p::num_ranks]) for p in range(num_ranks))


def _fill(ends: Sequence[int], bound: int) -> list[Interval]:
    """Intervals of at most ``bound`` each, filled from the front; ``ends`` are running totals, 0 first."""
    intervals = []
    start = 0
    while start < len(ends) - 1:
        end = bisect_right(ends, ends[start] + bound) - 1
        intervals.append((start, end))
        start = end
    return intervals


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
