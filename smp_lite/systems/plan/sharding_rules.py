"""Names against sharding rules, and what a spec makes of a tensor.

``*`` in a pattern stands for one integer component of a name (``layers.*.weight`` and ``layers.3.weight``),
never for a word. A literal index matches too, and wins over ``*``. A rule that matches nothing is an error,
as it is usually a misspelling: the model would train unsharded.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence

from ...config.errors import ConfigError
from ...plan.topology import Topology
from .parallel_plan import ParallelPlan, ShardingRule

__all__ = [
    "chunk_of_rank",
    "chunk_range",
    "holders",
    "local_shape",
    "match_modules",
    "match_tensors",
    "matches",
]

Dims = tuple[tuple[str, ...], ...]


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern."""
    wanted, found = pattern.split("."), name.split(".")
    return len(wanted) == len(found) and all(
        w == f or (w == "*" and f.isdecimal()) for w, f in zip(wanted, found)
    )


def match_tensors(
    rules: Sequence[ShardingRule],
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, str] | None = None,
    problems: dict[str, str] | None = None,
) -> dict[str, ShardingRule]:
    """Returns the rule of each tensor that has one.

    Args:
        rules: of the plan.
        shapes: of the tensors, by their names in the state dict.
        ties: a name -> the first name of the same tensor.
        problems: gets a text for each tensor whose rule cannot be told; None: the first is raised.

    Raises:
        ConfigError: two rules fit one tensor equally well, a spec has another number of dimensions than its
            tensor, an index is put on a tensor, or two names of one tensor have different specs.
    """
    found: dict[str, ShardingRule] = {}
    told: dict[str, str] = {}
    for name, shape in shapes.items():
        fitting = [rule for rule in rules if matches(rule.pattern, name)]
        try:
            if fitting:
                found[name] = _rule_of_tensor(fitting, name, shape)
        except ConfigError as error:
            told[name] = str(error)
    for name, first in (ties or {}).items():
        if name in told or first in told:
            continue
        specs = {n: found[n] for n in (name, first) if n in found}
        if len({rule.dims for rule in specs.values()}) > 1:
            told[name] = (
                f"{name!r} and {first!r} are one tensor with two specs, of {found[name].name!r} and "
                f"{found[first].name!r}: give both the same"
            )
        elif specs:
            found[name] = found[first] = next(iter(specs.values()))
    _tell(told, problems)
    return found


def match_modules(
    rules: Sequence[ShardingRule], modules: Iterable[str], problems: dict[str, str] | None = None
) -> dict[str, ShardingRule]:
    """Returns the rule of each module whose output has one; the whole model is ``""``.

    Args:
        rules: of the plan.
        modules: names.
        problems: as for :func:`match_tensors`.

    Raises:
        ConfigError: two rules fit one module and disagree on the index of its output, or equally well.
    """
    found: dict[str, ShardingRule] = {}
    told: dict[str, str] = {}
    for name in modules:
        fitting = [rule for rule in rules if matches(rule.pattern, name)]
        odd = next((rule for rule in fitting if rule.output_index != fitting[0].output_index), None)
        try:
            if odd is not None:
                told[name] = (
                    f"sharding {odd.name!r} conflicts with {fitting[0].name!r} on the output of {name!r}: "
                    "give one "
                    "index of an output"
                )
            elif fitting:
                found[name] = _most_specific(fitting, name)
        except ConfigError as error:
            told[name] = str(error)
    _tell(told, problems)
    return found


def _tell(told: Mapping[str, str], problems: dict[str, str] | None) -> None:
    if problems is not None:
        problems.update(told)
    elif told:
        raise ConfigError(next(iter(told.values())))


def _rule_of_tensor(fitting: Sequence[ShardingRule], name: str, shape: tuple[int, ...]) -> ShardingRule:
    indexed = next((rule for rule in fitting if rule.output_index is not None), None)
    if indexed is not None:
        raise ConfigError(
            f"sharding {indexed.name!r} puts an index on {name!r}, which is a tensor and not the output of a "
            "module: leave the index out"
        )
    rule = _most_specific(fitting, name)
    if len(rule.dims) != len(shape):
        raise ConfigError(
            f"the spec of {rule.name!r} has {len(rule.dims)} entries and {name} has {len(shape)} dimensions, "
            f"{list(shape)}: give one entry for each"
        )
    return rule


def check_all_match(
    rules: Sequence[ShardingRule], tensors: Iterable[str], modules: Iterable[str]
) -> tuple[str, ...]:
    """Returns a text for each rule that fits nothing, with the nearest names of the model."""
    names = [*tensors, *modules]
    # Layers have the same names again and again, and what is near one of them is near all.
    generic = {
        ".".join("*" if part.isdecimal() else part for part in name.split(".")): name for name in names
    }
    texts = []
    for rule in rules:
        if any(matches(rule.pattern, name) for name in names):
            continue
        close = difflib.get_close_matches(rule.pattern, generic, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "the model has no such name"
        texts.append(f"sharding {rule.name!r} matches nothing in the model: {hint}")
    return tuple(texts)


def chunk_of_rank(topology: Topology, dims: Dims, rank: int) -> tuple[int, ...]:
    """Returns the index, on each dimension, of the chunk that a rank holds; the first axis is major."""
    at = topology.coordinate(rank)
    chunk = []
    for axes in dims:
        index = 0
        for axis in axes:
            index = index * topology.axis_size(axis) + at[axis]
        chunk.append(index)
    return tuple(chunk)


def chunk_range(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Returns start and end of one chunk of a dimension; late ones may be smaller."""
    length = -(-size // num_chunks)
    return min(index * length, size), min((index + 1) * length, size)


def local_shape(plan: ParallelPlan, shape: Sequence[int], dims: Dims, rank: int = 0) -> tuple[int, ...]:
    """Returns the shape of what a rank holds of a tensor."""
    chunk = chunk_of_rank(plan.topology, dims, rank)
    ranges = [chunk_range(n, num_chunks(plan.topology, axes), i) for n, axes, i in zip(shape, dims, chunk)]
    return tuple(end - start for start, end in ranges)


def holders(plan: ParallelPlan, dims: Dims) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Returns the ranks that hold each chunk of a tensor; those of one chunk are replicas."""
    counts = [num_chunks(plan.topology, axes) for axes in dims]
    found: dict[tuple[int, ...], tuple[int, ...]] = dict.fromkeys(
        itertools.product(*(range(count) for count in counts)), ()
    )
    for rank in range(plan.world_size):
        found[chunk_of_rank(plan.topology, dims, rank)] += (rank,)
    return found


def num_chunks(topology: Topology, axes: Sequence[str]) -> int:
    """Returns the number of chunks that some axes make of a dimension."""
    count = 1
    for axis in axes:
        count *= topology.axis_size(axis)
    return count


def _most_specific(fitting: Sequence[ShardingRule], name: str) -> ShardingRule:
    stars = [rule.pattern.split(".").count("*") for rule in fitting]
    best = [rule for rule, count in zip(fitting, stars) if count == min(stars)]
    if len({rule.dims for rule in best}) > 1:
        raise ConfigError(
            f"sharding {best[0].name!r} and {best[1].name!r} both fit {name!r} and differ: make one of "
            "them exact"
        )
    return best[0]
