"""Partial checkpoints of sharded parameters: the files of SMP 1.11, which public scripts merge.

::

    model_0.pt            {"module": state dict in which sharded parameters are empty, "buffer_names",
                           "param_shapes", "sharded": names of the empty ones}
    optimizer_{i}.pt      of the i-th of the d ranks that share one copy: {"partition_count": d,
                           "fp32_flat_groups": for each group one flat tensor, "optimizer": this rank's
                           part of the optimizer's state, and what else resuming needs}
    user_content.pt       the user's dict, with "buffer_names" and "param_shapes" beside

``param_shapes`` has for each group of the optimizer, in the order of the flat tensors, the parameters' names
(prefixed with ``module.``) and shapes. A parameter of n elements is padded to a multiple of d; each rank's
slice is ceil(n / d) of them, and a flat tensor is a rank's slices one after another, in float32. Small
parameters that are whole on every rank are cut likewise. What no group of the optimizer has stands in one
more group at the end: parameters outside of it, and the second names of tied ones, so that whoever reads by
these rules finds every entry of a plain model's state dict. (So a tied parameter is twice on the disk.)

Several ranks in an mp group, which SMP refused, have ``model_{mp_rank}.pt`` and ``optimizer_{mp_rank}_{i}.
pt`` each, and their tables in the former: there the user's file has none. Shapes are then of the rank's part;
where tensor parallelism has split a parameter, ``boxes`` says where the slice's elements lie in the whole.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..devices import home
from ..errors import SMPError
from ..nn.layout import layout_of
from ..optim.state.dicts import MASTERS
from ..optim.state.own_parameters import PARTIAL_KEY, partial_mark
from ..runtime.sharded.parameters import over
from ..runtime.sharded.slices import slice_of
from ..session import Session
from ..storage.finding import Found, Reader
from ..storage.layout import MODEL, OPTIMIZER, USER_CONTENT
from ..wrapper.state.state_versions import with_versions_of
from .portable.pieces import boxes_of

__all__ = [
    "BUFFER_NAMES",
    "OWN_STATE",
    "PARAM_SHAPES",
    "check_user_content",
    "load_sharded",
    "num_pieces",
    "reader_of",
    "sharded_parts",
    "user_content_of",
    "without_moments",
]

BUFFER_NAMES, PARAM_SHAPES, OWN_STATE = "buffer_names", "param_shapes", "optimizer"
_RESUME = "resume_from_checkpoint"
_PREFIX = "module."
_IN_FP32 = (torch.float32, torch.float16, torch.bfloat16)
"""Types whose values float32 holds."""

Group = list[tuple[str, torch.Tensor]]


def num_pieces(session: Session) -> int:
    """How many ranks hold one copy of the parameters together."""
    return session.axis("+".join(session.shard_axes)).size if session.shard_axes else 1


def reader_of(session: Session) -> Reader:
    """This rank, as one that reads and writes parts."""
    mp = session.group_rank("MP"), len(session.group("MP"))
    if not session.shard_axes:
        return Reader(*mp, session.num_stages)
    axis = session.axis("+".join(session.shard_axes))
    return Reader(*mp, session.num_stages, axis.index, axis.size)


def check_user_content(content: Any) -> None:
    """Raises TypeError or ValueError where the tables of parameters cannot stand beside it."""
    if content is None:
        return
    if not isinstance(content, dict):
        raise TypeError(
            f"save_checkpoint: user_content is a {type(content).__name__}; with sharded parameters a partial "
            "checkpoint has tables of them beside it, so it must be a dict: wrap it in one"
        )
    if taken := content.keys() & {BUFFER_NAMES, PARAM_SHAPES}:
        raise ValueError(
            f"save_checkpoint: user_content has the key {min(taken)!r}, which the tables of sharded "
            "parameters have in that file: rename it"
        )


# Writing ----------------------------------------------------------------------------------------------------


def sharded_parts(session: Session, objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What this rank writes: (part, content). Not collective."""
    model, optimizer = objects[MODEL], objects[OPTIMIZER]
    is_first_copy = session.group_rank(session.copies) == 0
    if model is None:
        raise SMPError(
            "save_checkpoint: a partial checkpoint of sharded parameters needs the model: its parameters "
            "are in the optimizer's files"
        )
    groups = _groups(model, optimizer)
    shapes = _param_shapes(groups)
    reader = reader_of(session)
    if is_first_copy and reader.piece == 0:
        module, sharded = _module(model, groups)
        tables = {BUFFER_NAMES: _buffer_names(module, groups), PARAM_SHAPES: shapes}
        yield MODEL, {"module": module, "sharded": sharded, **tables}
        if session.rank == 0:
            beside = tables if reader.mp_size == 1 else {}
            yield USER_CONTENT, {**(objects[USER_CONTENT] or {}), **beside}
    if is_first_copy:
        yield OPTIMIZER, _pieces(session, groups, shapes, optimizer)


def _groups(model: Any, optimizer: Any) -> list[Group]:
    """This rank's parameters as the flat tensors have them."""
    local = dict(model.local_named_parameters())
    names = {id(parameter): name for name, parameter in local.items()}
    found: list[Group] = []
    if optimizer is not None:
        members = optimizer.fp16_groups
        found = [[(names[id(p)], p) for p in group if _is_cut(p) and id(p) in names] for group in members]
    there = {name for group in found for name, _ in group}
    everything = model.module.named_parameters(remove_duplicate=False)
    rest = [(n, p) for n, p in everything if n not in there and id(p) in names and _is_cut(p)]
    return [*found, rest] if rest or not found else found


def _is_cut(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point()


def _param_shapes(groups: list[Group]) -> list[OrderedDict[str, torch.Size]]:
    return [OrderedDict((_PREFIX + name, p.ds_shape) for name, p in group) for group in groups]  # type: ignore[attr-defined]


def _module(model: Any, groups: list[Group]) -> tuple[dict[str, Any], list[str]]:
    """The rank's state dict without what lies in pieces, and the names of that."""
    local = model.local_state_dict()
    local.pop(PARTIAL_KEY)
    sharded = [name for group in groups for name, p in group if _is_sharded(p)]
    for name in sharded:
        if name not in local:
            raise SMPError(
                f"save_checkpoint(..., partial=True): the model's state dict leaves out the parameter "
                f"{name!r}, which is sharded (a _save_to_state_dict or a hook of its own): save a full "
                "checkpoint, with partial=False, or keep the parameter in the state dict"
            )
        local[name] = local[name].new_empty(0)
    return local, sharded


def _is_sharded(parameter: torch.Tensor) -> bool:
    layout = layout_of(parameter)
    return layout is not None and layout.flat is not None


def _buffer_names(module: Mapping[str, Any], groups: list[Group]) -> list[str]:
    """What a reader takes from the module: all that no flat tensor has."""
    cut = {name for group in groups for name, _ in group}
    return [name for name in module if name not in cut]


def _pieces(
    session: Session, groups: list[Group], shapes: list[OrderedDict[str, torch.Size]], optimizer: Any
) -> dict[str, Any]:
    axis = session.axis("+".join(session.shard_axes))

    def stepped(parameter: torch.Tensor) -> torch.Tensor:
        return parameter if optimizer is None else optimizer.stand_in_of(parameter)

    own_state = None if optimizer is None else optimizer.local_state_dict()  # its masters follow by this
    flat, exact, boxes = [], {}, {}
    for group in groups:
        mine = {name: slice_of(stepped(parameter), axis) for name, parameter in group}
        flat.append(
            torch.cat([piece.to(torch.float32) for piece in mine.values()] or [torch.empty(0, device=home())])
        )
        for name, parameter in group:
            layout = over(layout_of(parameter), tuple(parameter.shape), axis)
            if parameter.dtype not in _IN_FP32:
                exact[name] = mine[name].clone()
            if any(layout.dims):
                found = boxes_of(layout, layout.shape)
                boxes[name] = (layout.shape, [(b.offsets, b.local[0], b.sizes, b.strides) for b in found])
    return {
        "partition_count": axis.size,
        "fp32_flat_groups": flat,
        PARAM_SHAPES: shapes,
        "persistence_threshold": _threshold(session),
        "exact": exact,
        "boxes": boxes,
        OWN_STATE: own_state,
    }


def _threshold(session: Session) -> int:
    return session.cfg.sdp_param_persistence_threshold if session.plan is None else 0


# Reading ----------------------------------------------------------------------------------------------------


def load_sharded(session: Session, found: Found, contents: Mapping[str, Any], *, strict: bool) -> None:
    """Puts the parameters and buffers of this rank in place.

    Raises:
        SMPError: the files do not go together, or are of another layout.
    """
    model, pieces = contents[MODEL], contents[OPTIMIZER]
    file = str(found.files[OPTIMIZER])
    for name, content, keys in (
        (str(found.files[MODEL]), model, ("module", "sharded")),
        (file, pieces, ("partition_count", "fp32_flat_groups", PARAM_SHAPES, OWN_STATE)),
    ):
        if lacking := [key for key in keys if key not in content]:
            raise SMPError(f"{_RESUME}: {name!r} has no {lacking[0]!r}: it is no part of sharded parameters")
    ranks = num_pieces(session)
    if pieces["partition_count"] != ranks:
        raise SMPError(
            f"{_RESUME}: {file!r} says partition_count={pieces['partition_count']}, and here "
            f"sharded_data_parallel_degree is {ranks}: resume with the degree it was saved with, or from a "
            "full or portable checkpoint"
        )
    if pieces.get("persistence_threshold", 0) != _threshold(session):
        raise SMPError(
            f"{_RESUME}: {file!r} was saved with sdp_param_persistence_threshold="
            f"{pieces['persistence_threshold']}, and here it is {_threshold(session)}, so other parameters "
            "lie in pieces: set it to that, or resume from a full or portable checkpoint"
        )
    mine = _slices(file, pieces, ranks)
    state = dict(model["module"])
    for name in model["sharded"]:
        if name not in mine:
            raise SMPError(f"{_RESUME}: {file!r} has no slice of {name!r}")
        state[name] = mine[name]
    own = with_versions_of(model["module"], {**state, PARTIAL_KEY: partial_mark(session)})
    session.model.load_state_dict(own, strict, same_partition_load=True)


def without_moments(session: Session, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of an optimizer's state the master weights and the loss scale alone; None: it has none."""
    if state is None or session.optimizer is None or MASTERS not in state:
        return None
    settings = [
        {**group, "params": saved["params"]}
        for group, saved in zip(session.optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return {**state, "state": {}, "param_groups": settings}


def _slices(file: str, pieces: Mapping[str, Any], ranks: int) -> dict[str, torch.Tensor]:
    """By name, in float32 or a wider type."""
    found: dict[str, torch.Tensor] = {}
    flats, tables = pieces["fp32_flat_groups"], pieces[PARAM_SHAPES]
    if len(flats) != len(tables):
        raise SMPError(f"{_RESUME}: {file!r} has {len(flats)} flat tensors for {len(tables)} groups")
    for number, (flat, shapes) in enumerate(zip(flats, tables, strict=True)):
        lengths = [-(-math.prod(shape) // ranks) for shape in shapes.values()]
        if sum(lengths) != flat.numel():
            raise SMPError(
                f"{_RESUME}: {file!r}: the slices of group {number} have {sum(lengths)} elements in all, and "
                f"its flat tensor {flat.numel()}: it was changed, or not written whole"
            )
        for name, piece in zip(shapes, flat.split(lengths), strict=True):
            found[name.removeprefix(_PREFIX)] = piece
    return {**found, **pieces.get("exact", {})}


def user_content_of(found: Found, content: Any) -> Any:
    """What the user gave, or None."""
    if not isinstance(content, dict):
        raise SMPError(
            f"{_RESUME}: {str(found.files[USER_CONTENT])!r} holds a {type(content).__name__}, where sharded "
            "parameters have a dict: it was changed; resume from another checkpoint"
        )
    if found.identity is None or USER_CONTENT not in found.identity.parts:
        return None
    return {key: value for key, value in content.items() if key not in (BUFFER_NAMES, PARAM_SHAPES)}
