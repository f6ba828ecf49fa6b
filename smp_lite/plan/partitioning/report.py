"""What a person is told about a partition: figures per stage, warnings and the table.

The figures come from the same tree index as the solver's costs (`partition_tree`), so they agree
with what was balanced. Costs are shares of the whole model: they sum to 1 over the stages. Activations are
an estimate, as if every stage held as many microbatches as there are stages; what a schedule really keeps
is told by `smp-lite plan` (`memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter

from ..text_table import text_table
from ..units import human_bytes
from .partition import ModuleCost, Partition
from .tree import Load, ModuleTree

__all__ = ["StageSummary", "format_partition_table", "partition_warnings", "stage_summaries"]

_LARGEST_OVER_MEAN = 1.2
_MAX_MODULES_SHOWN = 4


@dataclass(frozen=True)
class StageSummary:
    """One stage of a partition. Its modules are the largest subtrees wholly on the stage, in
    execution order, numbered siblings as a range (`blocks.0-3`); a split container's own parameters
    appear as `name (own)`. They are one piece of the model, or several with other stages between them.
    """

    stage_index: int
    pieces: tuple[tuple[str, ...], ...]
    parameter_count: int
    parameter_bytes: int
    state_bytes: int
    activation_bytes: int
    memory_share: float
    compute_share: float

    @property
    def modules(self) -> tuple[str, ...]:
        """Of all pieces."""
        return tuple(chain.from_iterable(self.pieces))

    def cost(self, memory_weight: float) -> float:
        """What the partitioner balances: the stage's share of the model, 0 to 1."""
        return memory_weight * self.memory_share + (1 - memory_weight) * self.compute_share


def stage_summaries(root: ModuleCost, partition: Partition) -> tuple[StageSummary, ...]:
    """One summary per stage, empty ones included. A parameter shared by several modules counts
    once. Raises ValueError where the partition is not one of `root`.
    """
    partition.check(root)
    tree = ModuleTree(root)
    loads = [Load()] * partition.num_stages
    for home, load in tree.loads().items():
        loads[partition.stage_of[home]] += load
    total = sum(loads, Load())
    pieces: list[list[tuple[str, ...]]] = [[] for _ in loads]
    if tree.holders[root.name]:
        for stage_index, piece in groupby(_top_names(tree, partition, root.name), key=itemgetter(0)):
            pieces[stage_index].append(tuple(name for _, name in piece))
    return tuple(
        StageSummary(
            stage_index=stage_index,
            pieces=tuple(pieces[stage_index]),
            parameter_count=load.parameter_count,
            parameter_bytes=load.parameter_bytes,
            state_bytes=load.state_bytes,
            activation_bytes=load.activation_bytes,
            memory_share=load.memory_bytes / (total.memory_bytes or 1),
            compute_share=load.compute / (total.compute or 1),
        )
        for stage_index, load in enumerate(loads)
    )


def partition_warnings(summaries: Sequence[StageSummary], memory_weight: float) -> tuple[str, ...]:
    """One text for each empty stage, and one where the largest stage is over 1.2 x the mean."""
    texts = [
        f"Stage {summary.stage_index} of {len(summaries)} is empty: no parameter was placed on it, "
        "so its processes only wait. Use fewer partitions, or give it modules with "
        "smp.partition."
        for summary in summaries
        if not summary.modules
    ]
    costs = [summary.cost(memory_weight) for summary in summaries]
    mean = sum(costs) / len(costs)
    if max(costs) > _LARGEST_OVER_MEAN * mean:
        largest = summaries[costs.index(max(costs))]
        texts.append(
            f"Stage {largest.stage_index} ({_module_text(largest)}) is the largest with "
            f"{max(costs):.1%} of the cost, {max(costs) / mean:.2f} x the mean of {mean:.1%} "
            f"(memory_weight {memory_weight:g}: {largest.memory_share:.1%} of the memory, "
            f"{largest.compute_share:.1%} of the computation), so the other stages wait for it. "
            "Use fewer partitions, split its largest module into submodules, or place modules "
            "with smp.partition and auto_partition False."
        )
    return tuple(texts)


def format_partition_table(summaries: Sequence[StageSummary]) -> str:
    """A plain text table, one row a stage and a row of totals; no newline at the end. Pieces of a stage
    are parted by `|`.
    """
    header = ("stage", "modules", "parameters", "bytes", "state", "activations", "flops")
    rows = [
        (
            str(summary.stage_index),
            _module_text(summary),
            f"{summary.parameter_count:,}",
            human_bytes(summary.parameter_bytes),
            human_bytes(summary.state_bytes),
            human_bytes(summary.activation_bytes),
            f"{summary.compute_share:.1%}",
        )
        for summary in summaries
    ]
    total = (
        "total",
        "",
        f"{sum(summary.parameter_count for summary in summaries):,}",
        human_bytes(sum(summary.parameter_bytes for summary in summaries)),
        human_bytes(sum(summary.state_bytes for summary in summaries)),
        human_bytes(sum(summary.activation_bytes for summary in summaries)),
        f"{sum(summary.compute_share for summary in summaries):.1%}",
    )
    return text_table(header, rows, total=total, left={"modules"})


def _top_names(tree: ModuleTree, partition: Partition, name: str) -> list[tuple[int, str]]:
    """(stage, text) for the largest subtrees of `name` that lie on one stage."""
    stages = {partition.stage_of[holder] for holder in tree.holders[name]}
    if len(stages) == 1:
        return [(stages.pop(), _label(name))]
    found: list[tuple[int, str]] = []
    if tree.modules[name].parameter_ids:
        found.append((partition.stage_of[name], f"{_label(name)} (own)"))
    first = ""
    previous = None
    for child in tree.children[name]:
        entries = _top_names(tree, partition, child)
        whole = len(entries) == 1 and entries[0][1] == child
        run = (entries[0][0], child.rpartition(".")[0])
        number = child.rpartition(".")[2]
        if whole and number.isdecimal() and run == previous:
            found[-1] = (run[0], f"{first}-{number}")
            continue
        found += entries
        first = child
        previous = run if whole and number.isdecimal() else None
    return found


def _label(name: str) -> str:
    return name or "(root)"


def _module_text(summary: StageSummary) -> str:
    return " | ".join(_piece_text(piece) for piece in summary.pieces) or "-"


def _piece_text(modules: tuple[str, ...]) -> str:
    shown = ", ".join(modules[:_MAX_MODULES_SHOWN])
    rest = len(modules) - _MAX_MODULES_SHOWN
    return f"{shown}, {rest} more" if rest > 0 else shown
