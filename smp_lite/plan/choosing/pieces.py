"""A partition as the chain of pieces that it makes, before a step has been recorded: what can be simulated.

Each piece of the line of modules is one command, so a stage that the line comes to again has a segment for
each visit. A backward takes twice its forward; a ``W`` takes the forward of the modules that hold trained
parameters themselves, but for shared ones, whose gradients stay whole. What a step function does around the
model (the loss), and what is recorded between modules, is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from ..partitioning.partition import ModuleCost, Partition
from ..partitioning.tree import Load, ModuleTree
from ..step.actions import Action, ActionKind
from ..step.lowering import Schedule
from ..step.segments import CommandNode, SegmentGraph, build_graph

__all__ = ["MemoryEstimate", "ModelCosts", "estimate_memory", "pieces_graph", "trained_modules"]

_LEAST_COST = 1e-12


@dataclass(frozen=True)
class ModelCosts:
    """One model, its activations counted in three ways.

    Args:
        balanced: of all microbatches in flight; what the partitioner balances.
        once: of one microbatch, without losses.
        losses: of one microbatch, only what a loss outside of the model keeps.
    """

    balanced: ModuleCost
    once: ModuleCost
    losses: ModuleCost


@dataclass(frozen=True)
class MemoryEstimate:
    """What stages hold, in bytes, as far as a trace of the modules tells.

    Args:
        state: of each stage: parameters, gradients, optimizer state, buffers.
        activations: of one microbatch by (stage, visit), from its forward to the end of its backward, or of
            its ``W``.
        losses: the same, to the end of its backward.
    """

    state: tuple[int, ...]
    activations: Mapping[tuple[int, int], int]
    losses: Mapping[tuple[int, int], int]

    def peaks(self, schedule: Schedule) -> tuple[float, ...]:
        """Of each stage. Where a schedule has other visits than there are pieces, all are alike."""
        return tuple(self.state[stage] + self._most(stage, actions) for stage, actions in enumerate(schedule))

    def _most(self, stage: int, actions: Sequence[Action]) -> float:
        last = {(m, visit): kind for _, kind, m, visit, value, _ in actions if value is None}
        visits = {visit for _, visit in last}
        kept, lost = (
            self._by_visit(stage, visits, of_pieces) for of_pieces in (self.activations, self.losses)
        )
        held = most = 0.0
        for _, kind, m, visit, value, _ in actions:
            # What ends with its forward keeps nothing.
            if value is not None or last[m, visit] is ActionKind.FORWARD:
                continue
            if kind is ActionKind.FORWARD:
                held += kept[visit] + lost[visit]
                most = max(most, held)
            else:
                held -= lost[visit] if kind is ActionKind.BACKWARD else 0
                held -= kept[visit] if kind is last[m, visit] else 0
        return most

    @staticmethod
    def _by_visit(stage: int, visits: set[int], of_pieces: Mapping[tuple[int, int], int]) -> dict[int, float]:
        own = {visit: size for (other, visit), size in of_pieces.items() if other == stage}
        if own.keys() == visits:
            return dict(own)
        return dict.fromkeys(visits, sum(own.values()) / max(1, len(visits)))


def pieces_graph(root: ModuleCost, partition: Partition) -> SegmentGraph:
    """The chain of one microbatch, with the sizes of what is sent."""
    tree = ModuleTree(root)
    loads = tree.loads()
    shared = {name for group in tree.sharing for name in group}
    commands, sizes = [], {}
    for number, (stage, names) in enumerate(_pieces(tree, partition)):
        inputs = (number - 1,) if number else ()
        if number:
            sizes[number - 1] = tree.entry_bytes(names[0])
        later = sum(tree.modules[name].compute for name in names if _is_split(tree, name, shared))
        cost = sum(loads[name].compute for name in names)
        commands.append(
            CommandNode(
                stage, inputs, (number,), (inputs,), cost=max(cost, _LEAST_COST), weight_cost=min(later, cost)
            )
        )
    return build_graph(commands, roots=[len(commands) - 1] if commands else [], value_bytes=sizes)


def trained_modules(root: ModuleCost, partition: Partition) -> dict[tuple[int, int], int]:
    """How many modules of each piece hold parameters of which the gradients can be made later, by (stage,
    visit)."""
    tree = ModuleTree(root)
    shared = {name for group in tree.sharing for name in group}
    found: dict[tuple[int, int], int] = {}
    visits = [0] * partition.num_stages
    for stage, names in _pieces(tree, partition):
        found[stage, visits[stage]] = sum(_is_split(tree, name, shared) for name in names)
        visits[stage] += 1
    return found


def _is_split(tree: ModuleTree, name: str, shared: set[str]) -> bool:
    module = tree.modules[name]
    return name not in shared and module.state_bytes > module.parameter_bytes


def estimate_memory(costs: ModelCosts, partition: Partition) -> MemoryEstimate:
    """Of these pieces."""
    tree = ModuleTree(costs.once)
    once, losses = tree.loads(), ModuleTree(costs.losses).loads()
    state = [0] * partition.num_stages
    kept: dict[tuple[int, int], int] = {}
    lost: dict[tuple[int, int], int] = {}
    visits = [0] * partition.num_stages
    for stage, names in _pieces(tree, partition):
        of_piece = sum((once[name] for name in names), Load())
        place = stage, visits[stage]
        visits[stage] += 1
        state[stage] += of_piece.state_bytes
        kept[place] = of_piece.activation_bytes
        lost[place] = sum(losses[name].activation_bytes for name in names)
    return MemoryEstimate(tuple(state), kept, lost)


def _pieces(tree: ModuleTree, partition: Partition) -> list[tuple[int, list[str]]]:
    line = [(partition.stage_of[name], name) for name in tree.holders[tree.root.name]]
    return [(stage, [name for _, name in piece]) for stage, piece in groupby(line, key=itemgetter(0))]
