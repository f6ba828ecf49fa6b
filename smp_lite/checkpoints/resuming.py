"""Resuming from whole checkpoints: ``smp.resume_from_checkpoint``.

Everything is found, then read, then put in place, and all ranks meet between: of a checkpoint that one rank
cannot read nothing goes into the model on another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import SMPError, SMPMismatch
from ..record.code.source_line import warn_once_at_user_line
from ..session import Session, current
from ..storage.finding import Found, find_full, find_partial
from ..storage.layout import MODEL, OPTIMIZER, USER_CONTENT, check_tag, find_newest, partial_name
from ..storage.torch_files import read_torch
from .half_parts import joined
from .portable.names import Portable, find_portable, look_at
from .portable.together import together
from .sharded_parts import OWN_STATE, load_sharded, reader_of, user_content_of, without_moments
from .whole_files import read_whole

_RESUME = "resume_from_checkpoint"


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    *,
    weights_only: bool | None = None,
) -> Any:
    """Loads what :func:`save_checkpoint` saved into the model and the optimizer; call it on all ranks.

    Call it after both wrappers exist; before the first step, the weights are put in place by it. Of a
    portable checkpoint each rank reads its own pieces; before the first step it is checked, and read by it.

    Args:
        path: as given to :func:`save_checkpoint`; or a folder that ``torch.distributed.checkpoint.save``
            has written, of ``{"model": model.state_dict(), "optimizer": get_optimizer_state_dict(...)}`` or
            of the model's state dict alone.
        tag: which checkpoint; None: the newest of that kind. With ``partial=False`` also a ``.safetensors``
            file, an index of several (``model.safetensors.index.json``), or a folder with one of them.
        partial: False: a full one, which may also come from another program. A portable one is both kinds:
            it is told by itself, and where there are two checkpoints of one tag the later counts.
        strict: keys must match. Of a portable checkpoint, those of the model; the optimizer's always must.
        load_optimizer: also load the optimizer's state, where it was saved.
        load_sharded_optimizer_state: False: of a partial checkpoint of sharded parameters only these are
            loaded (in half precision their masters), and nothing of what the optimizer has learned. Means
            nothing for others.
        translate_function: applied to a full state dict before it is loaded; not for portable ones, of which
            no rank has the whole state dict.
        weights_only: as in :func:`smp_lite.checkpoints.saving.load`, for all files.

    Returns:
        The user content, or None.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        SMPError: parts are missing or of different saves, a partial one is for other partitions, or a file
            holds what is not read without asking. On a rank that has nothing to complain of: names another
            one that has.
    """
    session = current()
    if session.model is None:
        raise SMPError(f"{_RESUME}: wrap the model with smp.DistributedModel first")
    root = Path(path)
    found = _find(session, root, tag, partial, load_optimizer)
    if isinstance(found, Portable):
        if translate_function is not None:
            raise SMPError(
                f"{_RESUME}: translate_function needs a whole state dict, but {os.fspath(found.folder)!r} is "
                "a portable checkpoint, which each rank reads in pieces: save a full one, with partial=False"
            )
        from .portable.loading import resume_portable  # a second for torch's part of it

        return resume_portable(
            session, found, strict=strict, load_optimizer=load_optimizer, weights_only=weights_only
        )
    contents: dict[str, Any] = {}

    def read() -> None:
        if load_optimizer and OPTIMIZER in found.files:
            session.check_one_optimizer(_RESUME)
        for part, file in found.files.items():
            if part == MODEL and found.partition_file is None:
                root = session.model.module
                contents[part] = read_whole(file, root, caller=_RESUME, weights_only=weights_only)
            else:
                contents[part] = read_torch(file, caller=_RESUME, weights_only=weights_only)
        for part in {MODEL, OPTIMIZER} & contents.keys():
            if not isinstance(contents[part], dict):
                kind = type(contents[part]).__name__
                raise SMPError(
                    f"{_RESUME}: {os.fspath(found.files[part])!r} holds no state dict, but a {kind}"
                )

    def put_in_place() -> None:
        if session.shard_axes and found.partition_file is not None:
            session.model.use_stored_partition(found.partition_file)
            load_sharded(session, found, contents, strict=strict)
            state = contents[OPTIMIZER][OWN_STATE]
            if load_optimizer and load_sharded_optimizer_state:
                _load_optimizer(session, found, state, wanted=True)
            elif load_optimizer and (state := without_moments(session, state)) is not None:
                session.optimizer.load_state_dict(state)
            return
        if found.partition_file is not None:
            session.model.use_stored_partition(found.partition_file)
            session.model.load_state_dict(contents[MODEL], strict, same_partition_load=True)
        else:
            translate = translate_function or (lambda state: state)
            session.model.load_state_dict(translate(contents[MODEL]), strict)
        _load_optimizer(session, found, joined(contents), load_optimizer)

    together(session, _RESUME, read)
    together(session, _RESUME, put_in_place)
    if session.shard_axes and found.partition_file is not None:
        return user_content_of(found, contents[USER_CONTENT])
    return contents.get(USER_CONTENT)


def _find(
    session: Session, root: Path, tag: str | None, partial: bool, load_optimizer: bool
) -> Found | Portable:
    """The files of a save that every rank has; the best one where a kill has left several."""

    def which() -> tuple[str | None, bool, str | None, str | None]:
        name = portable = None
        if session.rank == 0:
            if tag is not None:
                check_tag(tag, _RESUME, partial=True)
            found = find_portable(root, tag, partial=partial)
            if found is not None:
                portable = os.path.relpath(found.folder, root)
            elif tag is None:
                name = find_newest(root, partial=partial)
            else:
                check_tag(tag, _RESUME, partial=partial)
                name = partial_name(tag) if partial else tag
        return tag, partial, name, portable

    answers = together(session, _RESUME, which)
    for rank, answer in enumerate(answers):
        if answer[:2] != answers[0][:2]:
            raise SMPMismatch(
                f"{_RESUME}: all ranks must resume from the same checkpoint, but (tag, partial) is "
                f"{answer[:2]} on rank {rank} and {answers[0][:2]} on rank 0"
            )
    name, portable = answers[0][2:]
    if portable is not None:
        return _look_at_portable(session, root / portable)
    assert name is not None
    found: list[Found] = []

    def look() -> list[tuple[str | None, str]]:
        if partial:
            found[:] = find_partial(root, name, reader_of(session), with_optimizer=load_optimizer)
        else:
            found[:] = [find_full(root, name, with_optimizer=load_optimizer)]
        return [(each.save, str(each)) for each in found]

    seen = together(session, _RESUME, look)
    for save, _ in seen[0]:
        if all(save in dict(theirs) for theirs in seen):
            return next(each for each in found if each.save == save)
    said = "; ".join(f"rank {rank}: {theirs[0][1]}" for rank, theirs in enumerate(seen))
    raise SMPError(
        f"{_RESUME}: the ranks found different saves of {name!r}, which are not mixed ({said}). Resume from "
        "another checkpoint"
    )


def _look_at_portable(session: Session, folder: Path) -> Portable:
    found: list[Portable] = []

    def look() -> tuple[str | None, str]:
        found.append(look_at(folder))
        return found[0].save, str(found[0])

    seen = together(session, _RESUME, look)
    if len({save for save, _ in seen}) > 1:
        said = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(seen))
        raise SMPError(f"{_RESUME}: the ranks found different saves at {os.fspath(folder)!r} ({said})")
    return found[0]


def _load_optimizer(session: Session, found: Found, state: dict[str, Any] | None, wanted: bool) -> None:
    if session.optimizer is None:
        session.unread_optimizer = os.fspath(found.files[OPTIMIZER]) if state is not None else None
    elif state is not None:
        if not {"state", "param_groups"} <= state.keys():
            raise SMPError(
                f"{_RESUME}: {os.fspath(found.files[OPTIMIZER])!r} holds no optimizer's state dict"
            )
        session.optimizer.load_state_dict(state)
    elif wanted and session.rank == 0:
        warn_once_at_user_line(
            f"{_RESUME}: {os.fspath(found.files[MODEL])!r} was saved without an optimizer, so this one "
            "starts afresh; load_optimizer=False says that this is meant"
        )
