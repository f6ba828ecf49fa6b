"""Colossal-AI's ``parallel = dict(pipeline=..., tensor=dict(size=..., mode=...))``.

The data-parallel size is inferred. Ranks are ordered data, pipeline, tensor, and a tensor block by its mode::

    2d    t = col + q * row                   ROW groups share a row, so their members differ in the column
    2.5d  t = col + q * (row + q * dep)       XZ: the ranks of one column over all rows and depths
    3d    t = i + d * (j + d * k)             WEIGHT varies i, INPUT j, OUTPUT k

Beside ``parallel`` the file may name what Colossal-AI's own functions take as arguments:
``num_microbatches`` and ``num_model_chunks`` of its schedules, ``partition_method`` of its pipeline builder.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isqrt
from typing import Any, Literal

from ...config.errors import ConfigError
from ...plan.topology import Topology
from ..plan.parallel_plan import (
    DataParallel,
    Microbatches,
    ParallelPlan,
    Said,
    Schedule,
    TensorMode,
    group_kinds,
)
from ..plan.stage_assignment import StageRule
from ..reading.flat_values import flatten_values
from ..reading.python_tree import Unknown
from ..reading.written import MOST, Written, unknown_key

__all__ = ["KEYS", "MODES", "compile_plan", "path_of"]

DIALECT = "colossal"
MODES = ("1d", "2d", "2.5d", "3d", "sequence")
KEYS = (
    "parallel",
    "num_microbatches",
    "num_model_chunks",
    "partition_method",
    "allow_empty_stages",
    "gradient_handler",
    "zero",
    "fp16",
    "gradient_accumulation",
    "clip_grad_norm",
)
_ALIASES = {"NUM_MICRO_BATCHES": "num_microbatches", "num_chunks": "num_model_chunks"}
_FP16_MODES = ("torch", "apex", "naive")
_CARRIED = ("fp16", "gradient_accumulation", "clip_grad_norm")
_Axes = tuple[tuple[str, int], ...]


def path_of(key: str) -> tuple[str, ...]:
    """The path of a command-line key, such as ``parallel.tensor.size``."""
    path = tuple(key.split("."))
    if _ALIASES.get(path[0], path[0]) not in KEYS:
        raise ConfigError(unknown_key(key, path[0], KEYS))
    return (_ALIASES.get(path[0], path[0]), *path[1:])


def settle_aliases(written: Written) -> None:
    """Renames keys that are written in two ways."""
    for alias, key in _ALIASES.items():
        if alias in written.tree:
            if key in written.tree:
                raise ConfigError(f"{alias} and {key} are two names of one thing: leave one of them out")
            written.tree[key] = written.tree.pop(alias)


def compile_plan(written: Written, world_size: int | None) -> ParallelPlan:
    """Returns the plan of a configuration.

    Args:
        written: its keys.
        world_size: number of ranks; None: ``parallel.data`` must say how many replicas there are.

    Raises:
        ConfigError: a key is unknown or wrong, or the sizes are not those of the ranks.
    """
    settle_aliases(written)
    written.check_keys(KEYS)
    written.check_keys(("pipeline", "tensor", "data"), "parallel")
    pp = _size(written, "pipeline")
    tensor = _tensor_mode(written)
    tp = 1 if tensor.mode is None else _size(written, "tensor")
    dp, said_dp = _data_size(written, world_size, pp, tp)
    written.limit(pp * dp * tp, "ranks", "parallel")
    tensor_axes, own = _tensor_axes(tensor, tp, pp * dp * tp)
    axes = (("dp", dp), ("pp", pp), *tensor_axes)
    names = tuple(name for name, _ in tensor_axes)
    groups = (("DATA", ("dp",)), ("PIPELINE", ("pp",)), ("TENSOR", names), ("MODEL", ("pp", *names)), *own)

    chunks = written.integer("num_model_chunks", default=1)
    written.limit(pp * chunks, "stages", "num_model_chunks")
    count = written.integer("num_microbatches", default=1)
    if chunks > 1 and count % pp:
        text = f"num_microbatches must be a multiple of the pipeline size ({pp}) with model chunks."
        written.fail(text, "num_microbatches", way_out=f"use {max(pp, count // pp * pp)}, for example")
    _check_clip(written)
    _check_carried(written)
    data_parallel, said_data = _data_parallel(written, pp)
    others = [pair for key in _CARRIED if written.has(key) for pair in flatten_values(key, written.get(key))]
    how_stages = "" if written.has("partition_method") else "balanced by parameters"
    tensor_path = ("parallel", "tensor", "size") if _is_dict(written, "tensor") else ("parallel", "tensor")
    return ParallelPlan(
        dialect=DIALECT,
        topology=Topology(axes, group_kinds(axes, groups)),
        stages=_stages(written, pp, chunks),
        microbatches=Microbatches(count, "slice"),
        schedule=Schedule("sequential" if pp == 1 else "virtual" if chunks > 1 else "1f1b"),
        tensor=tensor,
        data_parallel=data_parallel,
        others=tuple(others),
        provenance=(
            ("axes", written.said("axes", how="data, pipeline, tensor")),
            ("axis.dp", said_dp),
            ("axis.pp", written.said("parallel", "pipeline")),
            *((f"axis.{name}", written.said(*tensor_path)) for name in names),
            ("placement", written.said("placement", how="rank by rank")),
            ("stages", written.said("partition_method", how=how_stages)),
            ("microbatches", written.said("num_microbatches")),
            ("schedule", written.said("parallel", "pipeline", how="one forward, one backward")),
            ("tensor", written.said("parallel", "tensor", "mode")),
            ("rules", written.said("rules", how="none")),
            ("data_parallel", said_data),
            *((f"others.{key}", written.said(key.partition(".")[0])) for key, _ in others),
        ),
        warnings=tuple(written.warnings),
    )


def _check_clip(written: Written) -> None:
    """Only a number above 0 clips; 0 and None are off, and all else would be taken for one of the two."""
    value = written.get("clip_grad_norm")
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value >= 0):
        text = "clip_grad_norm must be the largest norm of the whole gradient, a number above 0."
        way_out = "write clip_grad_norm=1.0, for example, or leave it out (as 0 and None, it does not clip)"
        written.fail(text, "clip_grad_norm", way_out=way_out)


def _check_carried(written: Written) -> None:
    """``fp16=dict(mode=AMP_TYPE.NAIVE, ...)``; an enum's member may come as its name."""
    if written.get("gradient_accumulation") is not None:
        written.integer("gradient_accumulation", default=1)
    fp16 = written.tree.get("fp16")
    if isinstance(fp16, Mapping) and fp16:
        mode = fp16.get("mode")  # AMP_TYPE.NAIVE, where colossalai need not be there
        name = repr(mode) if isinstance(mode, Unknown) else str(getattr(mode, "value", mode))
        if name.rpartition(".")[2].lower() not in _FP16_MODES:
            text = f"fp16.mode must be one of {', '.join(map(repr, _FP16_MODES))}."
            written.fail(text, "fp16", "mode", way_out="write one of these")


def _is_dict(written: Written, name: str) -> bool:
    return isinstance(written.get("parallel", name), Mapping)


def _size(written: Written, name: str) -> int:
    """The size of one kind of parallelism: an int, or a dict with "size"."""
    path = ("parallel", name)
    value = written.get(*path)
    if value is None:
        return 1
    if isinstance(value, Mapping):
        if "size" not in value:
            written.fail(f"{'.'.join(path)} has no size.", *path, way_out=f"write {name}=dict(size=2)")
        if name != "tensor":
            written.check_keys(("size",), *path)
        return written.integer(*path, "size", default=1)
    if isinstance(value, bool) or not isinstance(value, int):
        written.fail(f"{'.'.join(path)} must be an int or a dict.", *path, way_out=f"write {name}=2")
    return written.integer(*path, default=1)


def _tensor_mode(written: Written) -> TensorMode:
    path = ("parallel", "tensor")
    size = _size(written, "tensor")
    if not _is_dict(written, "tensor"):
        if size > 1:
            text = "you need to specify the mode for tensor parallelism."
            written.fail(
                text, *path, way_out=f"write tensor=dict(size={size}, mode='1d'), or another of {MODES}"
            )
        return TensorMode()
    mode = written.get(*path, "mode")
    if mode is not None and mode not in MODES:
        text = f"The mode of tensor parallelism must be one of None, {', '.join(map(repr, MODES))}."
        hint = f"did you mean {str(mode).lower()!r}?" if str(mode).lower() in MODES else "write one of these"
        written.fail(text, *path, "mode", way_out=hint)
    written.check_keys(("size", "mode", "depth") if mode == "2.5d" else ("size", "mode"), *path)
    if mode is None:
        if size > 1:
            text = "you need to specify the mode for tensor parallelism."
            written.fail(text, *path, way_out=f"add mode='1d', or another of {', '.join(map(repr, MODES))}")
        return TensorMode()
    depth = _depth(written, size) if mode == "2.5d" else None
    if mode in ("2d", "3d"):
        legal = _powers(2 if mode == "2d" else 3, size)
        if size not in legal:
            shape = "square: q x q ranks" if mode == "2d" else "cube: d x d x d ranks"
            way_out = f"use {', '.join(map(str, legal))}"
            written.fail(f"The size of mode {mode!r} must be a {shape}.", *path, "size", way_out=way_out)
    return TensorMode(mode, depth=depth)


def _powers(exponent: int, size: int) -> list[int]:
    """The powers that a person who wrote `size` may mean: those up to it, and the next two."""
    root = _root(exponent, size)
    return [base**exponent for base in range(max(root - 1, 1), root + 3)]


def _root(exponent: int, size: int) -> int:
    """The largest whole number of which this power is `size` or less."""
    low, high = 0, 1 << (size.bit_length() // exponent + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**exponent <= size else (low, middle)
    return low


def _depth(written: Written, size: int) -> int:
    path = ("parallel", "tensor", "depth")
    # Those with the smallest squares, deepest last: enough for a size that ranks can have.
    sides = range(1, min(isqrt(size), isqrt(MOST)) + 1)
    legal = [size // side**2 for side in reversed(sides) if size % side**2 == 0][-8:]
    choices = ", ".join(f"depth={depth}" for depth in legal)
    if written.get(*path) is None:
        text = f"mode '2.5d' needs depth: size {size} = q x q x depth."
        written.fail(text, "parallel", "tensor", way_out=f"add {choices.replace(', ', ' or ')}")
    depth = written.integer(*path, default=1)
    if size % depth or isqrt(size // depth) ** 2 * depth != size:
        text = f"size {size} is not q x q x depth."
        side = isqrt(size // depth)
        sizes = [q * q * depth for q in range(max(side - 1, 1), side + 3)]
        near = sorted(sizes, key=lambda n: abs(n - size))[:2]
        written.fail(text, *path, way_out=f"use {choices}, or with this depth the sizes {sorted(near)}")
    return depth


def _data_size(written: Written, world_size: int | None, pp: int, tp: int) -> tuple[int, Said]:
    model = pp * tp
    said = written.get("parallel", "data")
    given = _size(written, "data") if said is not None else None
    if world_size is None:
        if given is None:
            raise ConfigError(
                f"the number of ranks is not known: a replica has {model} (pipeline {pp} x tensor {tp}), "
                "and the "
                f"data size is inferred from them; add --world-size (world_size=), for example {2 * model}"
            )
        return given, written.said("parallel", "data")
    if world_size % model:
        near = max(model, world_size // model * model)
        raise ConfigError(
            f"{world_size} ranks are not a multiple of pipeline {pp} x tensor {tp} = {model}: start {near} "
            "or "
            f"{near + model} ranks, or change parallel"
        )
    inferred = world_size // model
    if given is not None and given != inferred:
        text = f"parallel.data must be {inferred}: {world_size} ranks / (pipeline {pp} x tensor {tp})."
        way_out = f"leave it out, since it is inferred, or start {given * model} ranks"
        written.fail(text, "parallel", "data", way_out=way_out)
    how = "" if given is not None else f"{world_size} ranks / (pipeline {pp} x tensor {tp})"
    return inferred, written.said("parallel", "data", how=how, is_inferred=True)


def _tensor_axes(
    tensor: TensorMode, tp: int, num_ranks: int
) -> tuple[_Axes, tuple[tuple[str, tuple[str, ...]], ...]]:
    """The axes of a tensor block, outermost first, and its groups."""
    if tensor.mode == "2d":
        q = isqrt(tp)
        return (("tp_row", q), ("tp_col", q)), (("ROW", ("tp_col",)), ("COL", ("tp_row",)))
    if tensor.mode == "2.5d":
        depth = tensor.depth or 1
        q = isqrt(tp // depth)
        return (("tp_dep", depth), ("tp_row", q), ("tp_col", q)), (
            ("ROW", ("tp_col",)),
            ("COL", ("tp_row",)),
            ("DEP", ("tp_dep",)),
            ("XZ", ("tp_dep", "tp_row")),
        )
    if tensor.mode == "3d":
        d = _root(3, tp)
        return (("tp_out", d), ("tp_in", d), ("tp_w", d)), (
            ("INPUT", ("tp_in",)),
            ("WEIGHT", ("tp_w",)),
            ("OUTPUT", ("tp_out",)),
            ("INPUT_X_WEIGHT", ("tp_in", "tp_w")),
            ("OUTPUT_X_WEIGHT", ("tp_out", "tp_w")),
        )
    if tensor.mode == "sequence":
        return (("tp", tp),), (("SEQUENCE", ("tp",)), ("SEQUENCE_DP", ("dp", "tp")))
    return (("tp", tp),), ()


def _stages(written: Written, pp: int, chunks: int) -> StageRule:
    method = written.choice("partition_method", options=("parameter", "layer"), default="parameter")
    kind: Literal["balanced", "uniform"] = "balanced" if method == "parameter" else "uniform"
    empty = written.switch("allow_empty_stages", default=False)
    owners = tuple(stage % pp for stage in range(pp * chunks))
    return StageRule(kind, owners, chunks, allow_empty=empty, key="parallel.pipeline")


def _data_parallel(written: Written, pp: int) -> tuple[DataParallel, Said]:
    handlers = written.get("gradient_handler")
    if written.get("zero") is not None:
        level = written.integer("zero", "level", default=0) if isinstance(written.get("zero"), Mapping) else 0
        if level > 3 or handlers is not None:
            written.fail(
                "zero must be dict(level=1, 2 or 3), without gradient_handler.", "zero", way_out="change it"
            )
        written.check_keys(("level",), "zero")
        if level > 1 and pp > 1:
            text = f"A pipeline does not go with zero level {level}."
            written.fail(text, "zero", way_out="use level 1, or parallel.pipeline=1")
        return DataParallel(f"zero{level}"), written.said("zero", "level")
    if handlers is None:
        return DataParallel("ddp"), written.said("gradient_handler", how="DistributedDataParallel")
    if not isinstance(handlers, list | tuple):
        text = "gradient_handler must be a list."
        written.fail(text, "gradient_handler", way_out="write [dict(type='DataParallelGradientHandler')]")
    names: list[str] = []
    for handler in handlers:
        name: Any = handler.get("type") if isinstance(handler, Mapping) else handler
        if not isinstance(name, str):
            written.fail(
                "A gradient handler is a dict with a type.", "gradient_handler", way_out="add type='...'"
            )
        names.append(str(name))
    return DataParallel("handlers", tuple(names)), written.said("gradient_handler")
