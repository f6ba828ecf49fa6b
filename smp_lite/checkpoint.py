"""Saving and loading: ``smp.save``, ``smp.load``, and whole checkpoints.

A *partial* checkpoint holds each mp rank's own part and resumes with the same partition, which is stored
with it. A *full* one is one file that any plain PyTorch program reads; it never holds optimizer state.
Files appear under their final names only when they are complete. (SMP API reference, "Saving and Loading";
the layout of ``save_checkpoint`` follows SMP 1.10.)
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .errors import SMPError
from .session import Session, current

_PARTITION_FILE = "partition.json"


def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """``torch.save``, to a file of this mp rank's own if ``partial``.

    Args:
        obj: what to save.
        f: path; a partial one gets ``_{mp_rank}`` appended.
        partial: whether each mp rank saves its part; call it on ranks with ``smp.dp_rank() == 0`` then.
        pickle_module, pickle_protocol: as in ``torch.save``.
        v3: the naming of sharded optimizer state, which is not supported yet.
    """
    if not isinstance(f, str | os.PathLike):
        raise TypeError(f"smp.save: f must be a path, got {type(f).__name__}")
    if v3:
        raise SMPError("smp.save(v3=True) belongs to sharded optimizer state, which is not supported yet")
    path = _partial_name(f) if partial else os.fspath(f)
    _write(
        path,
        lambda name: torch.save(obj, name, pickle_module=pickle_module, pickle_protocol=pickle_protocol),
    )


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    back_compat: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """``torch.load`` of what :func:`save` wrote; call it on all ranks.

    Args:
        f: path as given to :func:`save`.
        map_location: as in ``torch.load``; None: CPU.
        partial: read this mp rank's own file.
        back_compat: accepted for SMP scripts; there is one naming only.
    """
    path = _partial_name(f) if partial else os.fspath(f)
    if not os.path.exists(path):
        other = "a full one is there: pass partial=False" if os.path.exists(f) else "was it saved?"
        raise FileNotFoundError(f"smp.load: {path!r} does not exist ({other})")
    pickle_load_args.setdefault("weights_only", False)
    return torch.load(
        path,
        map_location="cpu" if map_location is None else map_location,
        pickle_module=pickle_module,
        **pickle_load_args,
    )


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Saves model, optimizer and user content under ``path``. Collective: call it on all ranks.

    Partial: ``path/{tag}_partial/model_{mp_rank}.pt``, ``optimizer_{mp_rank}.pt``, ``user_content.pt`` and
    the partition. Full: ``path/{tag}`` with the whole state dict, ``path/user_content_{tag}``. In both cases
    ``path/newest`` names the newest.

    Args:
        translate_if_full: accepted; there is nothing to translate without tensor parallelism.
        num_kept_partial_checkpoints: older partial checkpoints than the last n are removed.
    """
    keep = num_kept_partial_checkpoints
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"num_kept_partial_checkpoints must be a positive integer, got {keep!r}")
    session = current()
    model = model if model is not None else session.model
    if partial and model is not None and not model.partitioned:
        raise SMPError("save_checkpoint: the model is not partitioned yet, run a step first")
    root = Path(path)
    first = session.rank == 0
    root.mkdir(parents=True, exist_ok=True)
    writes = session.group_rank("DP") == 0
    if partial:
        folder = root / f"{tag}_partial"
        folder.mkdir(exist_ok=True)
        if writes:
            part = f"{session.group_rank('MP')}.pt"
            if model is not None:
                save(model.local_state_dict(), folder / f"model_{part}", partial=False)
            if optimizer is not None:
                save(optimizer.local_state_dict(), folder / f"optimizer_{part}", partial=False)
        if first:
            if model is not None:
                text = model.partition.to_json()
                _write(os.fspath(folder / _PARTITION_FILE), lambda name: Path(name).write_text(text))
            if user_content is not None:
                save(user_content, folder / "user_content.pt", partial=False)
    else:
        state = model.state_dict(gather_to_rank0=True) if model is not None and writes else None
        if first:
            if state is not None:
                save(state, root / tag, partial=False)
            if user_content is not None:
                save(user_content, root / f"user_content_{tag}", partial=False)
    _barrier(session, "save_checkpoint")
    if first:
        newest = f"{tag}_partial" if partial else tag
        _write(os.fspath(root / "newest"), lambda name: Path(name).write_text(newest))
        if partial and keep is not None:
            _remove_old(root, newest, keep)
    _barrier(session, "save_checkpoint")  # whoever returns from here can resume from it


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """Loads what :func:`save_checkpoint` saved into the model and the optimizer; call it on all ranks.

    Call it after both wrappers exist; before the first step, the weights are put in place by it.

    Args:
        tag: which checkpoint; None: the newest of that kind.
        strict: keys must match.
        load_optimizer: also load the optimizer's state, where it was saved.
        load_sharded_optimizer_state: accepted; there is no sharded state.
        translate_function: applied to a full state dict before it is loaded.

    Returns:
        The user content, or None.
    """
    session = current()
    root = Path(path)
    if session.model is None:
        raise SMPError("resume_from_checkpoint: wrap the model with smp.DistributedModel first")
    if not partial:
        file = root / (tag if tag is not None else _newest(root, partial=False))
        state = load(file, partial=False)
        session.model.load_state_dict(translate_function(state) if translate_function else state, strict)
        content = root / f"user_content_{file.name}"
        return load(content, partial=False) if content.exists() else None
    folder = root / (f"{tag}_partial" if tag is not None else _newest(root, partial=True))
    if not folder.is_dir():
        raise FileNotFoundError(f"resume_from_checkpoint: {os.fspath(folder)!r} does not exist")
    session.model.use_stored_partition(folder / _PARTITION_FILE)
    part = f"{session.group_rank('MP')}.pt"
    state = load(folder / f"model_{part}", partial=False)
    session.model.load_state_dict(state, strict, same_partition_load=True)
    file = folder / f"optimizer_{part}"
    if load_optimizer and session.optimizer is not None and file.exists():
        session.optimizer.load_state_dict(load(file, partial=False))
    content = folder / "user_content.pt"
    return load(content, partial=False) if content.exists() else None


def _partial_name(f: str | os.PathLike[str]) -> str:
    return f"{os.fspath(f)}_{current().group_rank('MP')}"


def _write(path: str, write: Callable[[str], Any]) -> None:
    """Writes beside the final name, then renames: a reader never sees half a file."""
    temporary = f"{path}.{os.getpid()}.part"
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _barrier(session: Session, what: str) -> None:
    if session.world is not None:
        session.world.exchange(None, "WORLD", what)


def _newest(root: Path, *, partial: bool) -> str:
    file = root / "newest"
    name = file.read_text().strip() if file.exists() else ""
    if not name or name.endswith("_partial") != partial:
        found = sorted((p for p in root.glob("*_partial") if p.is_dir()), key=lambda p: p.stat().st_mtime)
        if partial and found:
            return found[-1].name
        kind = "partial" if partial else "full"
        raise FileNotFoundError(f"resume_from_checkpoint: no {kind} checkpoint in {os.fspath(root)!r}")
    return name


def _remove_old(root: Path, newest: str, keep: int) -> None:
    folders = sorted(
        (p for p in root.iterdir() if p.is_dir() and re.search(r"_partial$", p.name)),
        key=lambda p: (p.name == newest, p.stat().st_mtime),
    )
    for folder in folders[:-keep]:
        shutil.rmtree(folder)
