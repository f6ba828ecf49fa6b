"""Saving whole checkpoints: ``smp.save_checkpoint``; :mod:`smp_lite.checkpoints.resuming` reads them.

A *partial* checkpoint holds each mp rank's own part and resumes on the same partition, which is stored with
it. A *full* one is the state of the whole model and of the whole optimizer, each a file that any plain
PyTorch program reads, and resumes on any number of partitions. A *portable* one is a folder of
``torch.distributed.checkpoint``: each rank writes what it holds under the names of the whole model, and it
resumes on any layout, each rank reading its pieces (:mod:`.portable.saving`). (SMP API reference, "Saving and
Loading"; the names follow SMP 1.10, whose full checkpoints have no optimizer state.)

Every state that a kill can leave resumes, and from one save: each part names its save
(:mod:`smp_lite.storage.identity`), and a save takes the place of the one before at once
(:mod:`smp_lite.storage.switch`). That is so for each file system: where hosts write to disks of their own,
each switches by itself, after all have written. A kill between these switches leaves hosts with different
saves; what they still have in common is resumed from, else it is an error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import SMPError, SMPMismatch
from ..optim.optimizer import DistributedOptimizer
from ..session import Session, current
from ..storage.durable import write_text
from ..storage.identity import Identity, read_identity
from ..storage.layout import (
    FP16_STATES,
    MODEL,
    OF_OPTIMIZER,
    OPTIMIZER,
    PARTITION_FILE,
    PARTS,
    USER_CONTENT,
    check_tag,
    full_file,
    partial_name,
    remove_old,
)
from ..storage.switch import Switch, new_name, write_newest
from ..storage.torch_files import write_torch
from ..wrapper.distributed_model import DistributedModel
from ..wrapper.state.state_versions import with_versions_of
from .half_parts import parts_of_state
from .portable.names import portable_name, remove_old_portable
from .portable.together import together
from .sharded_parts import check_user_content, num_pieces, reader_of, sharded_parts

_SAVE = "save_checkpoint"


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    portable: bool = False,
) -> None:
    """Saves model, optimizer and user content under ``path``. Collective: call it on all ranks.

    Partial: ``path/{tag}_partial/model_{mp_rank}.pt``, ``optimizer_{mp_rank}.pt``, ``user_content.pt`` and
    the partition; of sharded parameters SMP's other files (:mod:`.sharded_parts`), which ``python -m
    smp_lite.checkpoints.merge_sharded`` puts together. Full: ``path/{tag}`` with the whole state dict,
    ``path/optimizer_{tag}`` with the state dict of a plain optimizer over the same parameters,
    ``path/user_content_{tag}``. Portable:
    ``path/{tag}_portable``, which plain PyTorch reads with ``torch.distributed.checkpoint.load({"model":
    ..., "optimizer": ...}, checkpoint_id=...)`` or turns into one file with ``format_utils.
    dcp_to_torch_save``; the optimizer's state is that of ``get_optimizer_state_dict``, by parameter name. In
    all cases ``path/newest`` names the newest. An older save of the same tag is replaced as a whole.

    Args:
        path: a folder; one job at a time saves into it.
        tag: a file name.
        model: the ``DistributedModel``; None: the one there is.
        optimizer: the ``DistributedOptimizer``; None: its state is not saved.
        user_content: rank 0's is saved; tensors, numbers, strings and plain containers are read back without
            asking.
        translate_if_full: a full model has the names, and shapes, that it had before tensor parallelism
            replaced modules in it, such as a Hugging Face model's. The optimizer's state goes on counting the
            parameters of the new modules, and resumes on them alone.
        num_kept_partial_checkpoints: older partial checkpoints than the last n are removed; with
            ``portable``, portable ones.
        portable: save a portable checkpoint, whatever ``partial`` says: for changes of the layout between
            runs (numbers of stages, tensor-parallel ranks and replicas). All hosts must have the same file
            system at ``path``.

    Raises:
        SMPError: a rank could not write its part. The older save of the same tag is as it was.
        SMPMismatch: ranks save different things.
        ValueError, TypeError: an argument is wrong; nothing was written.
    """
    keep = num_kept_partial_checkpoints
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"num_kept_partial_checkpoints must be a positive integer, got {keep!r}")
    partial = partial and not portable
    check_tag(tag, _SAVE, partial=partial or portable)
    session = current()
    model = model if model is not None else session.model
    _check_wrappers(model, optimizer)
    if partial and model is not None and not model.partitioned:
        raise SMPError(f"{_SAVE}: the model is not partitioned yet, run a step first")
    if partial and session.shard_axes:
        check_user_content(user_content)
    if optimizer is not None and not portable and (optimizer.has_masters or optimizer.is_sharded):
        optimizer.check_state_readable()  # on all ranks: not all of them read it
    objects = {MODEL: model, OPTIMIZER: optimizer, USER_CONTENT: user_content, FP16_STATES: None}
    if optimizer is not None and portable and optimizer.has_masters:
        raise SMPError(
            f"{_SAVE}(portable=True) with fp16 or bf16: master weights and the loss scale have no portable "
            "form: save a full checkpoint (partial=False), which resumes on any number of partitions, or "
            "give no optimizer"
        )
    if optimizer is not None and optimizer.has_masters and not (partial and session.shard_axes):
        objects[FP16_STATES] = optimizer
    identity = _agree(session, tag, partial, objects, portable=portable)
    root = Path(path)
    name = portable_name(tag) if portable else partial_name(tag) if partial else tag
    switch = Switch(root, name, identity.save)

    def commit() -> None:
        if switch.leads:
            with _writing(root / name):
                switch.commit()

    def finish() -> None:
        if switch.leads:
            switch.finish()
            write_newest(root, name)
            if partial and keep is not None:
                remove_old(root, name, keep)
            if portable and keep is not None:
                remove_old_portable(root, name, keep)

    try:
        is_folder = partial or portable
        together(session, _SAVE, lambda: _begin(switch, identity, is_folder) if session.rank == 0 else None)
        if portable:
            from .portable.saving import write_portable  # a second for torch's part of it

            write_portable(session, _SAVE, switch, identity, objects, _writing)
        elif partial:
            # Collective where it is sharded, so before what may fail on one rank.
            state = optimizer.local_state_dict() if optimizer is not None and optimizer.is_sharded else None
            together(session, _SAVE, lambda: _write_own_parts(session, switch, identity, objects, state))
        else:
            _write_whole(session, switch, identity, objects, translate=translate_if_full)
        together(session, _SAVE, commit)
    except Exception:
        switch.discard()
        raise

    together(session, _SAVE, finish)  # whoever returns from here can resume from it


def _check_wrappers(model: Any, optimizer: Any) -> None:
    for found, kind in ((model, DistributedModel), (optimizer, DistributedOptimizer)):
        if found is not None and not isinstance(found, kind):
            raise TypeError(f"{_SAVE}: it saves an smp.{kind.__name__}, got {type(found).__name__}")


def _agree(session: Session, tag: str, partial: bool, objects: dict[str, Any], *, portable: bool) -> Identity:
    """The save's identity, from rank 0; the ranks that write must be about to write the same."""
    model = objects[MODEL]
    asked: dict[str, Any] = {"tag": tag, "portable": portable, "partial": partial}
    if session.group_rank(session.copies) == 0 or portable:
        asked["model and optimizer"] = [part for part in (MODEL, OPTIMIZER) if objects[part] is not None]
        asked["step"] = session.steps_run
        if model is not None and model.partitioned:
            asked["partition"] = model.partition.digest()
    mine = Identity(
        save=new_name(),
        tag=tag,
        partial=partial,
        step=session.steps_run,
        saved_at_ns=time.time_ns(),
        partitions=session.num_stages,
        mp_size=len(session.group("MP")),
        partition=asked.get("partition"),
        parts=tuple(part for part in PARTS if objects[part] is not None),
        pieces=num_pieces(session) if partial else 1,
    )
    if session.world is None:
        answers = [(asked, mine)]
    else:
        answers = session.world.exchange((asked, mine), "WORLD", _SAVE)
    of_rank_0, identity = answers[0]
    for rank, (theirs, _) in enumerate(answers):
        for key, value in theirs.items():
            if value != of_rank_0.get(key):
                raise SMPMismatch(
                    f"{_SAVE}: all ranks must save the same, but {key} is {value!r} on rank {rank} and "
                    f"{of_rank_0.get(key)!r} on rank 0"
                )
    if not identity.parts:
        raise SMPError(f"{_SAVE}: there is no model, no optimizer and no user content to save")
    return identity


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Within: what goes wrong names the file as the user knows it."""
    try:
        yield
    except Exception as error:
        raise SMPError(
            f"{_SAVE}: {os.fspath(path)!r} could not be written ({type(error).__name__}: {error}). What was "
            "saved before is still there"
        ) from error


def _begin(switch: Switch, identity: Identity, is_folder: bool) -> None:
    """The folder to write in; nothing that is no checkpoint may be in the way of the names to come."""
    root, tag = switch.root, identity.tag
    names = {part: full_file(part, tag) for part in PARTS}
    final = [root / switch.name] if is_folder else [root / name for name in names.values()]
    wrong = [path for path in final if (path.is_file() if is_folder else path.is_dir())]
    if wrong:
        kind = "file" if is_folder else "folder"
        raise SMPError(f"{_SAVE}: {os.fspath(wrong[0])!r} is a {kind}: choose another tag, or remove it")
    with _writing(root / switch.name):
        switch.begin()
        if not is_folder:
            saved = [names[part] for part in identity.parts]
            gone = [name for name in names.values() if name not in saved and _is_ours(root / name)]
            switch.list_files(saved, gone)


def _is_ours(path: Path) -> bool:
    return path.is_file() and read_identity(path) is not None


def _write_own_parts(
    session: Session,
    switch: Switch,
    identity: Identity,
    objects: dict[str, Any],
    state: dict[str, Any] | None,
) -> None:
    """``state``: of the optimizer, where it is known already."""
    final = switch.root / switch.name
    if not switch.folder.exists():
        with _writing(final):
            switch.begin()  # a host with a disk of its own
    reader = reader_of(session)

    def write(part: str, content: Any) -> None:
        file = reader.file(part)
        piece = reader.piece if part == OPTIMIZER else 0
        note = identity.of(part, 0 if part == USER_CONTENT else reader.mp_rank, piece).to_json()
        with _writing(final / file):
            write_torch(switch.folder / file, content, note)

    if session.shard_axes:
        for part, content in sharded_parts(session, objects):
            write(part, content)
    else:
        leads = session.group_rank("RDP") == 0
        if objects[MODEL] is not None and leads:
            write(MODEL, objects[MODEL].local_state_dict())
        if objects[OPTIMIZER] is not None and leads:
            state = state if state is not None else objects[OPTIMIZER].local_state_dict()
            for part, content in parts_of_state(state).items():
                write(part, content)
        if objects[USER_CONTENT] is not None and session.rank == 0:
            write(USER_CONTENT, objects[USER_CONTENT])
    if objects[MODEL] is not None and switch.leads:
        with _writing(final / PARTITION_FILE):
            write_text(switch.folder / PARTITION_FILE, objects[MODEL].partition.to_json())


def _write_whole(
    session: Session, switch: Switch, identity: Identity, objects: dict[str, Any], *, translate: bool
) -> None:
    """One part after the other, so that rank 0 never holds more than the largest; the optimizer's are one."""
    states: dict[str, Any] = {}
    for part in identity.parts:
        content = objects[part]
        takes_part = session.group_rank(session.copies) == 0
        if part == MODEL and takes_part:
            content = content.state_dict(gather_to_rank0=True)
        elif part == OPTIMIZER and (takes_part or content.is_sharded):
            states = parts_of_state(content.state_dict(gather_to_rank0=True))
        if part in OF_OPTIMIZER:
            content = states.pop(part, {})
        if part == MODEL and translate and session.rank == 0:
            for to_original, _ in session.module_manager.translate_functions:
                content = with_versions_of(content, to_original(content))

        def write(part: str = part, content: Any = content) -> None:
            if session.rank == 0:
                file = full_file(part, identity.tag)
                with _writing(switch.root / file):
                    write_torch(switch.folder / file, content, identity.of(part).to_json())

        together(session, _SAVE, write)
        del content, write  # before the next one is gathered
