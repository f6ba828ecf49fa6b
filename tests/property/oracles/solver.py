"""Automatic placement: choose what may be cut, then balance it.

The behaviour is SMP's (developer guide; Karakus et al. 2021, arXiv 2111.05972): a module costs
`memory_weight * memory + (1 - memory_weight) * computation`, each as a share of the whole model;
the tree is walked from the root, shared parameters stay together, a split container's stage is the
first of its span and modules without parameters follow their parent. The method differs: instead of
dividing devices among children level by level, all atoms stand in one line, in execution order, and
the line is cut with the smallest possible largest stage (`partition_balance`).

The one atom at the start is the root. Atoms are opened, i.e. replaced by their children with the
container's own parameters in front,

* always, where a cut between the children costs nothing that the line does not show: the module
  holds no parameters itself and either has numbered children (Sequential, ModuleList), or is
  never called though its parts are (ModuleDict), or has a single part;
* level by level, while a stage is empty or the largest is above 1.1 x the mean, if that fills a
  stage or lowers the largest one by more than 10 %. A cut inside a block sends values that
  `output_bytes` does not know of (a residual stream beside the branch), so it has to be worth it;
  blocks that the answer does not need to cut are closed again afterwards.

`keep_whole` modules are never opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from smp_lite.plan.partitioning.balance import Group, Line, Score
from smp_lite.plan.partitioning.partition import ModuleCost, Partition
from tests.property.oracles.balance import balance, score
from tests.property.oracles.tree import ModuleTree

__all__ = ["solve_partition"]

_GOOD_ENOUGH = Fraction(11, 10)
_WORTH_OPENING = Fraction(9, 10)
_TOO_SMALL_TO_MATTER = Fraction(1, 10)


def solve_partition(
    root: ModuleCost, num_stages: int, *, memory_weight: float, contiguous: bool = True
) -> Partition:
    """Places every module of `root` on one of `num_stages` stages.

    Contiguous in execution order, modules that share a parameter apart, unless
    `contiguous=False` allows a smaller largest stage. With fewer parameter-holding modules than
    stages the last stages stay empty. Deterministic: equal input, equal partition. Raises
    ValueError for a bad `num_stages` or `memory_weight`.
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"the number of partitions is {num_stages!r}; it has to be an int >= 1.")
    if not 0 <= memory_weight <= 1:
        raise ValueError(
            f"memory_weight is {memory_weight!r}; it has to be from 0 (balance computation only) "
            "to 1 (balance memory only)."
        )
    tree = ModuleTree(root)
    costs = _integer_costs(tree, memory_weight)

    def solve(atoms: Sequence[_Atom]) -> _Solution:
        return _solve(tree, costs, atoms, num_stages, contiguous)

    stages: dict[str, int] = {}
    if costs:
        for atom, stage_index in _refined(tree, costs, num_stages, solve).placed():
            stages.update(dict.fromkeys(atom.holders(tree), stage_index))
    stage_of: dict[str, int] = {}
    for name, holders in tree.holders.items():
        if name in stages:
            stage_of[name] = stages[name]
        elif holders:
            stage_of[name] = min(stages[holder] for holder in holders)
        else:
            stage_of[name] = stage_of[tree.parents[name]] if name in tree.parents else 0
    return Partition(num_stages=num_stages, stage_of=stage_of)


@dataclass(frozen=True)
class _Atom:
    """A whole module, or what an opened container holds itself."""

    name: str
    whole: bool = True

    def holders(self, tree: ModuleTree) -> tuple[str, ...]:
        return tree.holders[self.name] if self.whole else (self.name,)


@dataclass(frozen=True)
class _Solution:
    atoms: tuple[_Atom, ...]
    stages: tuple[int, ...]
    score: Score

    @property
    def num_empty(self) -> int:
        return self.score[0]

    @property
    def largest(self) -> int:
        return self.score[1]

    def placed(self) -> list[tuple[_Atom, int]]:
        return list(zip(self.atoms, self.stages))


_Solve = Callable[[Sequence[_Atom]], _Solution]


def _integer_costs(tree: ModuleTree, memory_weight: float) -> dict[str, int]:
    """The cost of each module that holds parameters, what runs beside it included, on a common
    integer scale. Exact, hence the same on every rank; equal for all where nothing is known.
    """
    if not tree.holders[tree.root.name]:
        return {}
    loads = tree.loads()
    memory_bytes = sum(load.memory_bytes for load in loads.values())
    compute = sum((Fraction(load.compute) for load in loads.values()), Fraction())
    weight = Fraction(memory_weight)
    scaled = {
        name: weight * load.memory_bytes * (compute or 1)
        + (1 - weight) * Fraction(load.compute) * (memory_bytes or 1)
        for name, load in loads.items()
    }
    if not any(scaled.values()):
        return dict.fromkeys(loads, 1)
    denominator = math.lcm(*(cost.denominator for cost in scaled.values()))
    return {name: int(cost * denominator) for name, cost in scaled.items()}


def _solve(
    tree: ModuleTree,
    costs: dict[str, int],
    atoms: Sequence[_Atom],
    num_stages: int,
    contiguous: bool,
) -> _Solution:
    atoms = tuple(sorted(atoms, key=lambda atom: tree.position[atom.name]))
    line = Line(
        costs=tuple(sum(costs[holder] for holder in atom.holders(tree)) for atom in atoms),
        entry_bytes=tuple(tree.entry_bytes(atom.name) for atom in atoms),
        groups=_groups(tree, atoms),
    )
    stages = balance(line, num_stages, contiguous=contiguous)
    return _Solution(atoms, stages, score(line, stages, num_stages))


def _groups(tree: ModuleTree, atoms: Sequence[_Atom]) -> tuple[Group, ...]:
    """Atoms that hold the same parameter. What the root itself holds stays on stage 0."""
    atom_of = {holder: i for i, atom in enumerate(atoms) for holder in atom.holders(tree)}
    merged: list[set[int]] = []
    for sharing in tree.sharing:
        group = {atom_of[holder] for holder in sharing}
        for other in [other for other in merged if other & group]:
            merged.remove(other)
            group |= other
        merged.append(group)
    root_itself = {i for i, atom in enumerate(atoms) if atom == _Atom(tree.root.name, whole=False)}
    return tuple(
        Group(atoms=tuple(sorted(group)), seats=tuple(sorted(root_itself & group or group)))
        for group in merged
        if len(group) > 1
    )


def _refined(tree: ModuleTree, costs: dict[str, int], num_stages: int, solve: _Solve) -> _Solution:
    """Opens atoms level by level as far as the balance gains by it."""
    atoms = _freely_opened(tree, [_Atom(tree.root.name)])
    accepted = solve(atoms)
    mean = Fraction(sum(costs.values()), num_stages)
    opened: list[str] = []
    while accepted.num_empty or accepted.largest > _GOOD_ENOUGH * mean:
        threshold = 0 if accepted.num_empty else _TOO_SMALL_TO_MATTER * mean
        finer: list[_Atom] = []
        for atom in atoms:
            parts = [atom]
            if sum(costs[holder] for holder in atom.holders(tree)) >= threshold:
                parts = _opened(tree, atom)
            opened += [atom.name] if parts != [atom] else []
            finer += parts
        if finer == atoms:
            break
        atoms = finer
        solution = solve(atoms)
        fills = solution.num_empty < accepted.num_empty
        if fills or solution.largest < _WORTH_OPENING * accepted.largest:
            accepted = solution
    return _closed(tree, accepted, opened, solve)


def _closed(tree: ModuleTree, solution: _Solution, opened: Sequence[str], solve: _Solve) -> _Solution:
    """Closes opened containers, outermost first, where the largest stage is no worse for it: all
    that lie on one stage at once, the others one by one.
    """

    def close(name: str, atoms: Sequence[_Atom]) -> Sequence[_Atom]:
        inside = set(tree.holders[name])
        kept = [atom for atom in atoms if not inside.issuperset(atom.holders(tree))]
        return [*kept, _Atom(name)] if len(kept) < len(atoms) else atoms

    def attempt(names: Sequence[str], present: _Solution) -> _Solution:
        atoms: Sequence[_Atom] = present.atoms
        for name in names:
            atoms = close(name, atoms)
        candidate = solve(atoms)
        return candidate if candidate.score[:2] <= present.score[:2] else present

    stage_of = {h: stage for atom, stage in solution.placed() for h in atom.holders(tree)}
    on_one_stage = [name for name in opened if len({stage_of[holder] for holder in tree.holders[name]}) == 1]
    solution = attempt(on_one_stage, solution)
    for name in opened:
        if name not in on_one_stage:
            solution = attempt([name], solution)
    return solution


def _opened(tree: ModuleTree, atom: _Atom) -> list[_Atom]:
    """The parts of an atom, or the atom itself where it has none or has to stay whole."""
    module = tree.modules[atom.name]
    if not atom.whole or module.keep_whole or not tree.children[atom.name]:
        return [atom]
    itself = [_Atom(atom.name, whole=False)] if module.parameter_ids else []
    return itself + _freely_opened(tree, [_Atom(child) for child in tree.children[atom.name]])


def _freely_opened(tree: ModuleTree, atoms: Sequence[_Atom]) -> list[_Atom]:
    opened: list[_Atom] = []
    for atom in atoms:
        opened += _opened(tree, atom) if _opens_freely(tree, atom.name) else [atom]
    return opened


def _opens_freely(tree: ModuleTree, name: str) -> bool:
    module, children = tree.modules[name], tree.children[name]
    if module.parameter_ids or not children:
        return False
    numbered = all(child.rpartition(".")[2].isdecimal() for child in children)
    only_holds = module.order < 0 and any(tree.modules[child].order >= 0 for child in children)
    return numbered or only_holds or len(children) == 1
