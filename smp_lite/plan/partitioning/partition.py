"""What the partitioner reads (`ModuleCost`), what it decides (`Partition`), and manual placement.

Both are plain data without torch: a partition can be solved, compared and stored as text on a
machine that has no model at all. `ModuleCost` mirrors the module tree, every cost being the
module's *own*, so that a container can be split and its children counted separately without
undoing sums. `Partition` names a stage for every module, not for every parameter: that is the
unit in which the SMP API speaks (`smp.partition`, `smp.set_partition`) and which a person can edit
in a partition file.

Placement follows SageMaker SMP: in manual mode the innermost `smp.partition` context around a
module's construction decides and everything else goes to `default_partition`; modules that share a
parameter have to be together, which SMP leaves to the user ("wrong otherwise") and we check.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["ModuleCost", "Partition", "manual_partition"]

_MAX_NAMES_SHOWN = 5


@dataclass(frozen=True)
class ModuleCost:
    """One module of the tree with the costs of its own, without those of its children.

    `parameter_elements` is only needed where a module shares some but not all of its parameters
    (a tied weight beside an own bias): it lets the shared part be counted once, exactly.
    Ops that a container's forward does itself belong to it (`compute`, `activation_bytes`) unless
    the caller knows better which module's output they continue.
    """

    name: str
    """Qualified as in `named_modules()`; the root is the empty string."""
    parameter_ids: tuple[str, ...] = ()
    """Canonical names of the directly held parameters; one id in two modules is one parameter."""
    parameter_count: int = 0
    """Elements held directly, a shared parameter counted at each holder."""
    parameter_bytes: int = 0
    state_bytes: int = 0
    """Parameters, their gradients and optimizer state."""
    activation_bytes: int = 0
    """Kept for the backwards of all microbatches in flight by this module's own ops."""
    compute: float = 0.0
    """Flops or seconds of this module's own ops, all calls together."""
    output_bytes: int = 0
    """What one call hands on: the communication of a cut after it."""
    order: int = -1
    """Position of the start of its first call in the trace; -1: never called."""
    keep_whole: bool = False
    children: tuple[ModuleCost, ...] = ()
    parameter_elements: tuple[int, ...] = ()
    """Elements of each of `parameter_ids`; empty: not known one by one."""

    def __post_init__(self) -> None:
        for field in ("parameter_count", "parameter_bytes", "state_bytes", "activation_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"module {self.name!r}: {field} is {getattr(self, field)}, < 0.")
        if not (math.isfinite(self.compute) and self.compute >= 0):
            raise ValueError(
                f"module {self.name!r}: compute is {self.compute}; it has to be finite and >= 0."
            )
        if self.parameter_elements and len(self.parameter_elements) != len(self.parameter_ids):
            raise ValueError(
                f"module {self.name!r}: parameter_elements has {len(self.parameter_elements)} "
                f"entries for {len(self.parameter_ids)} parameter_ids; give one for each, or none."
            )

    def walk(self) -> Iterator[ModuleCost]:
        """This module and everything in it, parents first, in the order of registration."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Partition:
    """Every module's stage: where its directly held parameters live.

    For a module without parameters the stage is nominal: a container's is the first stage of its
    span, and a parameter-less leaf's is its parent's. Raises ValueError for a stage out of range.
    """

    num_stages: int
    stage_of: Mapping[str, int]

    def __post_init__(self) -> None:
        if not _is_int(self.num_stages) or self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages!r}; it has to be an integer >= 1.")
        for name, stage_index in self.stage_of.items():
            _check_stage(f"module {name!r}", stage_index, self.num_stages)
        object.__setattr__(self, "stage_of", dict(self.stage_of))

    def check(self, root: ModuleCost) -> None:
        """Raises ValueError unless this partition places exactly `root`'s modules, shared
        parameters together; the message names the modules.
        """
        names = {module.name for module in root.walk()}
        unknown = [name for name in self.stage_of if name not in names]
        missing = [module.name for module in root.walk() if module.name not in self.stage_of]
        if unknown or missing:
            found = [
                f"{text} {_list(some)}"
                for text, some in (
                    ("places modules that the model does not have:", unknown),
                    ("has no stage for", missing),
                )
                if some
            ]
            raise ValueError(
                f"the partition {' and '.join(found)}. It was made for another model: solve it "
                "again, or correct the partition file."
            )
        _check_sharing(root, self.stage_of)

    def digest(self) -> str:
        """Hex digest of the content, the same on every rank and whatever the order of names."""
        content = json.dumps([self.num_stages, sorted(self.stage_of.items())])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The text of a partition file: one module a line, ready to be edited by hand."""
        content = {"num_stages": self.num_stages, "stage_of": dict(self.stage_of)}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Reads what `to_json` wrote. Raises ValueError that says what is wrong with the text."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the partition is not JSON: {error}.") from error
        if not isinstance(content, dict) or set(content) != {"num_stages", "stage_of"}:
            keys = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise ValueError(
                "a partition is a JSON object with exactly the keys 'num_stages' and 'stage_of'; "
                f"this one has {keys}."
            )
        if not isinstance(content["stage_of"], dict):
            raise ValueError("'stage_of' has to be an object: module name to stage index.")
        return cls(num_stages=content["num_stages"], stage_of=content["stage_of"])


def manual_partition(
    root: ModuleCost, num_stages: int, *, assigned: Mapping[str, int], default: int
) -> Partition:
    """The user's own placement: a module's entry in `assigned`, else `default`.

    A module without an entry does not inherit its parent's: a context covers what is constructed
    inside it, so a child without one was built outside. Raises ValueError for a stage out of
    range, a module that does not exist, and a shared parameter whose holders are apart.
    """
    _check_stage("default_partition", default, num_stages)
    names = [module.name for module in root.walk()]
    unknown = set(assigned).difference(names)
    if unknown:
        raise ValueError(
            f"a partition was assigned to {_list(sorted(unknown))}, which the model does not have. "
            "Assign it to a module that the model passed to DistributedModel contains."
        )
    for name, stage_index in assigned.items():
        _check_stage(f"the partition assigned to module {name!r}", stage_index, num_stages)
    stage_of = {name: assigned.get(name, default) for name in names}
    _check_sharing(root, stage_of)
    return Partition(num_stages=num_stages, stage_of=stage_of)


def _check_sharing(root: ModuleCost, stage_of: Mapping[str, int]) -> None:
    holders: dict[str, str] = {}
    for module in root.walk():
        for parameter in module.parameter_ids:
            other = holders.setdefault(parameter, module.name)
            if stage_of[other] != stage_of[module.name]:
                raise ValueError(
                    f"modules {other!r} (stage {stage_of[other]}) and {module.name!r} (stage "
                    f"{stage_of[module.name]}) share the parameter {parameter!r}, so they have to "
                    "be on the same stage. Construct both under the same smp.partition, or call "
                    "smp.set_partition on one of them."
                )


def _check_stage(what: str, stage_index: object, num_stages: int) -> None:
    if not _is_int(stage_index) or not 0 <= stage_index < num_stages:
        raise ValueError(
            f"{what} is {stage_index!r}; with {num_stages} partitions it has to be an integer from "
            f"0 to {num_stages - 1}."
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES_SHOWN])
    rest = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
