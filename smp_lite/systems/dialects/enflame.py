"""The JSON configuration of Enflame's model-parallel instrumentation for DTU devices.

``device_mapping`` names the device of each stage and shard; devices are labels, and their numbers need not be
contiguous (five to a card, four of them in use). Where several stages name the same devices, a rank holds all
of them. Which layers make a stage is not in the file, so this library's partitioner decides.

``sharding_dim`` counts the dimensions of a TensorFlow kernel, [in, out]: -1 splits the outputs (torch weight
dim 0, gathered), 0 the inputs (torch weight dim 1, partial sums added up).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from ...config.errors import ConfigError
from ...plan.topology import Topology
from ..plan.parallel_plan import (
    DataParallel,
    Microbatches,
    ParallelPlan,
    Placement,
    Schedule,
    TensorMode,
    group_kinds,
)
from ..plan.stage_assignment import StageRule
from ..reading.written import Written

__all__ = ["KEYS", "compile_plan", "path_of"]

DIALECT = "enflame"
MODES = ("sharding", "pipeline", "hybrid")
KEYS = (
    "mode",
    "sharding_size",
    "sharding_dim",
    "stage_cnt",
    "accum_degree",
    "device_mapping",
    "device_aliases",
    "fuse",
)
_USUAL_SIZES = (1, 2, 4, 8)


def path_of(key: str) -> tuple[str, ...]:
    """The path of a command-line key; a device of the map is ``device_mapping.stage_0.shard_1``."""
    path = tuple(key.split("."))
    nested = path[0] in ("device_mapping", "device_aliases")
    if path[0] not in KEYS or (len(path) > 1 and not nested):
        raise ConfigError(f"unknown key {key!r}: the keys are {', '.join(KEYS)}")
    return path


def compile_plan(written: Written, world_size: int | None) -> ParallelPlan:
    """Returns the plan of a configuration.

    Args:
        written: its keys.
        world_size: number of ranks; None: that of the device map.

    Raises:
        ConfigError: a key is missing, unknown or wrong, or the ranks are not those of the map.
    """
    written.check_keys(KEYS)
    mode = written.choice("mode", options=MODES, default="sharding")
    shards = written.integer("sharding_size", default=4)
    if not written.has("stage_cnt"):
        num_mapped = len(written.mapping("device_mapping"))
        raise ConfigError(f"stage_cnt is missing: write the number of stages, for example {num_mapped or 8}")
    stages = written.integer("stage_cnt", default=1)
    count = written.integer("accum_degree", default=1)
    written.limit(stages * shards, "devices", "stage_cnt" if stages > shards else "sharding_size")
    written.limit(count, "microbatches of a step", "accum_degree")
    dim = written.get("sharding_dim", default=-1)
    if type(dim) is not int or dim not in (0, -1):
        text = "sharding_dim must be 0 (split the inputs, add up) or -1 (split the outputs, gather)."
        written.fail(text, "sharding_dim", way_out="write 0 or -1")
    fuse = written.switch("fuse", default=True)

    warnings = list(written.warnings)
    if mode == "pipeline" and shards > 1 and written.has("sharding_size"):
        warnings.append(
            "mode 'pipeline' shares out no layer: of each stage only shard_0 is used (sharding_size "
            f"{shards})"
        )
    if shards not in _USUAL_SIZES:
        warnings.append(f"sharding_size {shards} is not one of 1, 2, 4, 8, which are recommended")
    live = 1 if mode == "pipeline" else shards
    devices = _devices(written, stages, shards, live)
    owners, rows = _owners(devices)
    axes = (("pp", len(rows)), ("tp", live))
    labels = [device for row in rows for device in row]
    axes, labels = _aliased(written, axes, labels)
    num_ranks = len(labels)
    if world_size is not None and world_size != num_ranks:
        source = "device_mapping names" if written.has("device_mapping") else "stage_cnt x sharding_size is"
        raise ConfigError(
            f"{world_size} ranks for {num_ranks} devices: {source} {num_ranks}; start {num_ranks} ranks "
            "(they "
            "need not be said for this configuration), or change the map"
        )
    pipelined = mode != "sharding" and len(rows) > 1
    notes = []
    if mode == "sharding" and stages > 1:
        notes.append("mode 'sharding': stages are placed as the map says, and one works at a time")
    if len(rows) < stages:
        notes.append(f"several stages name the same devices: {len(rows)} sets of ranks hold {stages} stages")
    is_mapped = written.has("device_mapping")
    placement = Placement(tuple(labels), _ordinals(labels)) if is_mapped else Placement()
    from_map = written.said("device_mapping" if is_mapped else "stage_cnt")
    return ParallelPlan(
        dialect=DIALECT,
        topology=Topology(axes, group_kinds(axes)),
        placement=placement,
        stages=StageRule("partitioner", owners, key="stage_cnt"),
        microbatches=Microbatches(count, "consume"),
        schedule=Schedule("1f1b" if pipelined else "sequential"),
        tensor=TensorMode("enflame", sharding_dim=dim, fuse=fuse) if live > 1 else TensorMode(),
        data_parallel=DataParallel("none"),
        others=(("mode", mode), ("sharding_size", shards), ("sharding_dim", dim)),
        provenance=(
            ("axes", written.said("axes", how="stages, then shards")),
            ("axis.pp", from_map),
            ("axis.tp", written.said("mode") if mode == "pipeline" else written.said("sharding_size")),
            ("placement", written.said("device_mapping", how="" if is_mapped else "any device")),
            ("stages", written.said("stage_cnt", how="which layers: the partitioner")),
            ("microbatches", written.said("accum_degree")),
            ("schedule", written.said("mode")),
            ("tensor", written.said("sharding_dim")),
            ("rules", written.said("rules", how="none")),
            ("data_parallel", written.said("data_parallel", how="this system has none")),
            ("others.mode", written.said("mode")),
            ("others.sharding_size", written.said("sharding_size")),
            ("others.sharding_dim", written.said("sharding_dim")),
        ),
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def _devices(written: Written, stages: int, shards: int, live: int) -> list[tuple[str, ...]]:
    """The devices of each stage, those of the live shards."""
    if not written.has("device_mapping"):
        return [tuple(f"rank {stage * live + shard}" for shard in range(live)) for stage in range(stages)]
    mapping = written.mapping("device_mapping")
    _check_indexes(mapping, "stage", stages, "device_mapping", "stage_cnt")
    rows = [tuple(row.values()) for row in mapping.values() if isinstance(row, Mapping)]
    distinct = set(itertools.chain(*rows))
    is_regular = len({len(row) for row in rows}) == 1 and all(len(set(row)) == len(row) for row in rows)
    if is_regular and len(distinct) % shards and live > 1:
        divisors = [d for d in range(1, len(distinct) + 1) if len(distinct) % d == 0]
        raise ConfigError(
            f"sharding_size={shards} does not divide the {len(distinct)} devices of device_mapping: use "
            "one of "
            f"{', '.join(map(str, divisors))}"
        )
    table = []
    for stage in range(stages):
        path = ("device_mapping", f"stage_{stage}")
        row = written.mapping(*path)
        # A pipeline without shards needs no more than the first device of a stage.
        least = 1 if live == 1 else shards
        _check_indexes(row, "shard", shards, ".".join(path), "sharding_size", least=least)
        devices = tuple(row[f"shard_{shard}"] for shard in range(live))
        for shard, device in enumerate(devices):
            if not isinstance(device, str) or not device:
                written.fail("A device must be a str.", *path, f"shard_{shard}", way_out="write its name")
        if len(set(devices)) < len(devices):
            text = f"{'.'.join(path)} names one device for two shards."
            written.fail(text, *path, way_out="give each shard of a stage a device of its own")
        table.append(devices)
    return table


def _check_indexes(
    mapping: Mapping[str, object], word: str, count: int, where: str, key: str, least: int | None = None
) -> None:
    """Raises ConfigError unless the keys are word_0 ... word_(count - 1)."""
    wanted = [f"{word}_{index}" for index in range(count)]
    rule = f"{key}={count} has {wanted[0]} ... {wanted[-1]}" if count > 1 else f"{key}=1 has {wanted[0]}"
    for name in wanted[: count if least is None else least]:
        if name not in mapping:
            raise ConfigError(f"{where} has no {name}: {rule}; add it, or make {key} smaller")
    for name in mapping:
        if name not in wanted:
            raise ConfigError(
                f"{where} has {name!r}: {rule}, since indexes begin at 0; remove it, or change {key}"
            )


def _owners(devices: list[tuple[str, ...]]) -> tuple[tuple[int, ...], list[tuple[str, ...]]]:
    """The pp index of each stage, and the devices of each pp index; stages share all of them or none."""
    places = {row: number for number, row in enumerate(dict.fromkeys(devices))}
    rows = list(places)
    seen: dict[str, tuple[str, ...]] = {}
    for row in rows:
        for device in row:
            if device in seen:
                first, second = devices.index(seen[device]), devices.index(row)
                raise ConfigError(
                    f"device_mapping: stage_{first} and stage_{second} share {device!r} but not all "
                    "devices in "
                    "the same order; let stages share all of them, shard by shard, or none"
                )
            seen[device] = row
    return tuple(places[row] for row in devices), rows


def _aliased(
    written: Written, axes: tuple[tuple[str, int], ...], labels: list[str]
) -> tuple[tuple[tuple[str, int], ...], list[str]]:
    """Axes and labels after ``device_aliases``: device -> rank, which must be a grid in either axis order."""
    aliases = written.mapping("device_aliases")
    if not aliases:
        return axes, labels
    for device, rank in aliases.items():
        if device not in labels:
            raise ConfigError(f"device_aliases has {device!r}, which no stage uses: remove it")
        if isinstance(rank, bool) or not isinstance(rank, int):
            written.fail(
                "device_aliases gives ranks.", "device_aliases", way_out="write a number for each device"
            )
    missing = [device for device in labels if device not in aliases]
    if missing:
        raise ConfigError(f"device_aliases has no rank for {missing[0]!r}: give one for each device, or none")
    ranks = [aliases[device] for device in labels]
    (_, pp), (_, tp) = axes
    if ranks == list(range(pp * tp)):
        return axes, labels
    if ranks == [shard * pp + stage for stage in range(pp) for shard in range(tp)]:
        return (("tp", tp), ("pp", pp)), [
            labels[stage * tp + shard] for shard in range(tp) for stage in range(pp)
        ]
    raise ConfigError(
        f"device_aliases gives the ranks {ranks}, in the order of stages and shards: they must count up "
        "from 0 "
        f"stage by stage, or shard by shard"
    )


def _ordinals(labels: list[str]) -> tuple[int, ...]:
    def number(label: str) -> tuple[int, str]:
        digits = re.search(r"(\d+)\D*$", label)
        return (int(digits[1]) if digits else -1, label)

    order = sorted(set(labels), key=number)
    return tuple(order.index(label) for label in labels)
