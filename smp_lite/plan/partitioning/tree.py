"""The module tree as the partitioner and its report see it: order, sharing, and who bears a cost.

Three facts are settled here, once and from the tree alone, so that the solver's figures and the
table shown to the user cannot differ:

* **Execution order.** A module stands where its first call started; one that was never called
  (a ModuleList, a weight used functionally) stands with its first called part, else behind the
  sibling registered before it. The order is global: two ModuleLists called in turn interleave.
* **A shared parameter counts once**, at its first holder. The holders are on one stage anyway.
* **Every cost has a home: a module that holds parameters.** Only parameters are placed; a module
  without any runs where its input is. So its cost goes to the last parameter-holding module of the
  sibling that ran before it (else to its parent, or to what follows); a container's own ops go to
  its first part.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from .partition import ModuleCost

__all__ = ["Load", "ModuleTree", "joined", "stage_visits"]

_Item = TypeVar("_Item", bound=Hashable)


@dataclass(frozen=True)
class Load:
    """What a set of modules weighs."""

    parameter_count: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    compute: float = 0.0

    @property
    def memory_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes

    def __add__(self, other: Load) -> Load:
        return Load(
            self.parameter_count + other.parameter_count,
            self.parameter_bytes + other.parameter_bytes,
            self.state_bytes + other.state_bytes,
            self.activation_bytes + other.activation_bytes,
            self.compute + other.compute,
        )


class ModuleTree:
    """An index over a tree of `ModuleCost`. Read only; module names are the keys throughout.

    Raises ValueError where two modules have the same name.
    """

    def __init__(self, root: ModuleCost) -> None:
        self.root = root
        self.modules: dict[str, ModuleCost] = {}
        """All modules, parents first."""
        self.parents: dict[str, str] = {}
        for module in root.walk():
            if module.name in self.modules:
                raise ValueError(f"two modules are named {module.name!r}; names have to be unique.")
            self.modules[module.name] = module
            self.parents.update({child.name: module.name for child in module.children})
        self.position: dict[str, tuple[int, int]] = {}
        """Sort key of execution order."""
        self._set_positions()
        self.holders: dict[str, tuple[str, ...]] = {
            name: self._in_order(m.name for m in module.walk() if m.parameter_ids)
            for name, module in self.modules.items()
        }
        """Of each module: the modules in it, itself included, that hold parameters directly."""
        self.children: dict[str, tuple[str, ...]] = {
            name: self._in_order(c.name for c in module.children if self.holders[c.name])
            for name, module in self.modules.items()
        }
        """Of each module: its children that have parameters somewhere, in execution order."""
        self.sharing = self._sharing()
        """Groups of two or more modules that have to be on one stage."""
        self.home: dict[str, str] = {}
        """The parameter-holding module beside which a module's own cost arises."""
        for name in self.modules:
            self.home[name] = self._home(name)
        self._called = sorted((m.order, m.name) for m in self.modules.values() if m.order >= 0)

    def loads(self) -> dict[str, Load]:
        """Each home's load: its own and that of the modules that run beside it."""
        loads = {name: Load() for name in self.holders[self.root.name] or (self.root.name,)}
        for name, load in self._own_loads().items():
            loads[self.home[name]] += load
        return loads

    def entry_bytes(self, name: str) -> int:
        """What is sent when the pipeline is cut just before `name`: the output of the outermost
        call that ended last before it. 0 where nothing was traced.
        """
        start = bisect_right(self._called, (self.position[name][0], chr(0x10FFFF)))
        for place in reversed(range(start)):
            before = self._called[place][1]
            if _inside(name, before) or _inside(before, name):
                continue
            ended = self.parents[before]
            while not _inside(name, ended):
                before = ended if self.modules[ended].order >= 0 else before
                ended = self.parents[ended]
            return self.modules[before].output_bytes
        return 0

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self.position.__getitem__))

    def _set_positions(self) -> None:
        spans: dict[str, tuple[int, int] | None] = {}
        for module in reversed(self.modules.values()):
            ends = [end for child in module.children for end in spans[child.name] or ()]
            ends += [module.order] if module.order >= 0 else []
            spans[module.name] = (min(ends), max(ends)) if ends else None

        def place(module: ModuleCost, first: int) -> None:
            self.position[module.name] = (first, len(self.position))
            called = (span for child in module.children if (span := spans[child.name]))
            neighbour = next(called, (first, first))[0]
            for child in module.children:
                span = spans[child.name]
                place(child, span[0] if span else neighbour)
                neighbour = span[1] if span else neighbour

        root_span = spans[self.root.name]
        place(self.root, root_span[0] if root_span else -1)

    def _sharing(self) -> tuple[tuple[str, ...], ...]:
        pairs: list[tuple[str, str]] = []
        first_holder: dict[str, str] = {}
        for module in self.modules.values():
            for parameter in module.parameter_ids:
                one = first_holder.setdefault(parameter, module.name)
                if one != module.name:
                    pairs.append((one, module.name))
        return tuple(self._in_order(group) for group in joined(pairs))

    def _home(self, name: str) -> str:
        if self.holders[name]:
            return self.holders[name][0]
        if name == self.root.name:
            return name
        parent = self.parents[name]
        if not self.holders[parent]:
            return self.home[parent]
        siblings = self.children[parent]
        place = bisect_left(siblings, self.position[name], key=self.position.__getitem__)
        return self.holders[siblings[place - 1]][-1] if place else self.holders[parent][0]

    def _own_loads(self) -> dict[str, Load]:
        elements = self._parameter_elements()
        seen: set[str] = set()
        loads: dict[str, Load] = {}
        for name, module in self.modules.items():
            count = module.parameter_count
            again = [parameter for parameter in module.parameter_ids if parameter in seen]
            if again and len(again) == len(module.parameter_ids):
                repeated = count
            else:
                repeated = min(count, sum(elements[parameter] for parameter in again))
            new = count - repeated
            loads[name] = Load(
                parameter_count=new,
                parameter_bytes=_scaled(module.parameter_bytes, new, count),
                state_bytes=_scaled(module.state_bytes, new, count),
                activation_bytes=module.activation_bytes,
                compute=module.compute,
            )
            seen.update(module.parameter_ids)
        return loads

    def _parameter_elements(self) -> dict[str, int]:
        """Elements of each parameter: as given, else an even share of the holder with the fewest
        parameters (exact where some holder has nothing but the shared one).
        """
        known: dict[str, tuple[int, int]] = {}
        for module in self.modules.values():
            num_parameters = len(module.parameter_ids)
            for index, parameter in enumerate(module.parameter_ids):
                if module.parameter_elements:
                    candidate = (0, module.parameter_elements[index])
                else:
                    candidate = (num_parameters, module.parameter_count // num_parameters)
                known[parameter] = min(known.get(parameter, candidate), candidate)
        return {parameter: size for parameter, (_, size) in known.items()}


def stage_visits(root: ModuleCost, stage_of: Mapping[str, int]) -> tuple[int, ...]:
    """The stages in the order in which the line of modules comes to them; neighbours differ."""
    tree = ModuleTree(root)
    return tuple(stage for stage, _ in groupby(stage_of[name] for name in tree.holders[root.name]))


def joined(sets: Iterable[Sequence[_Item]]) -> list[list[_Item]]:
    """Joins sets that have something in common, in the order of the first of each."""
    group_of: dict[_Item, list[_Item]] = {}
    for items in sets:
        group: list[_Item] = []
        for item in items:
            other = group_of.get(item, [item])
            if other is not group:
                # The smaller one goes into the larger, so each item moves only now and then.
                small, group = sorted((group, other), key=len)
                group += small
                group_of.update(dict.fromkeys(small, group))
                group_of[item] = group
    return list({id(group): group for group in group_of.values()}.values())


def _scaled(num_bytes: int, part: int, whole: int) -> int:
    return num_bytes if part == whole else num_bytes * part // whole


def _inside(name: str, container: str) -> bool:
    return not container or name == container or name.startswith(container + ".")
