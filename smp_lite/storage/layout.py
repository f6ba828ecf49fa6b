"""Names of the files of checkpoints (SMP 1.10), and which checkpoints a folder holds.

::

    path/newest                          the name of the newest: "{tag}_partial" or "{tag}"
    path/{tag}_partial/model_{mp_rank}.pt, optimizer_{mp_rank}.pt, user_content.pt, partition.json
    path/{tag}_partial/optimizer_{i}.pt  in the place of these where parameters lie in pieces: of piece i, and
                                         optimizer_{mp_rank}_{i}.pt where an mp group has several ranks
    path/{tag}                           a full one: the model's state dict
    path/optimizer_{tag}                 a full one's optimizer state; this library's own
    path/user_content_{tag}

In half precision beside each ``optimizer_...`` an ``fp16_states_...``: master weights and loss scale.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import SMPError
from .identity import Identity, read_identity
from .switch import ready_files, ready_folder, retire

__all__ = [
    "FP16_STATES",
    "MODEL",
    "OF_OPTIMIZER",
    "OPTIMIZER",
    "PARTITION_FILE",
    "PARTS",
    "USER_CONTENT",
    "check_tag",
    "find_newest",
    "full_file",
    "part_file",
    "partial_name",
    "read_newest",
    "remove_old",
]

MODEL, OPTIMIZER, USER_CONTENT, FP16_STATES = PARTS = ("model", "optimizer", "user_content", "fp16_states")
OF_OPTIMIZER = (OPTIMIZER, FP16_STATES)
PARTITION_FILE = "partition.json"

_PARTIAL = "_partial"


def check_tag(tag: Any, caller: str, *, partial: bool) -> None:
    """Raises TypeError or ValueError where a tag cannot be part of a file name, or means another file."""
    if not isinstance(tag, str):
        raise TypeError(f"{caller}: tag must be a string, got {tag!r}")
    if not tag or "/" in tag or os.sep in tag or "\0" in tag or tag.startswith("."):
        raise ValueError(
            f"{caller}: tag={tag!r} must be a file name without '/' that does not begin with '.'"
        )
    taken = tag.startswith(tuple(f"{part}_" for part in PARTS if part != MODEL)) or tag.endswith(_PARTIAL)
    if not partial and (taken or tag == "newest"):
        raise ValueError(
            f"{caller}: a full checkpoint cannot have tag={tag!r}, since other files are called so: "
            "'newest', 'optimizer_{tag}', 'user_content_{tag}', '{tag}_partial'"
        )


def partial_name(tag: str) -> str:
    """The folder of a partial checkpoint."""
    return f"{tag}{_PARTIAL}"


def part_file(part: str, mp_rank: int, piece: int | None = None, mp_size: int = 1) -> str:
    """The name of a part in the folder of a partial checkpoint.

    Args:
        part: which one.
        mp_rank: whose part of the model it is.
        piece: which piece of sharded parameters the rank holds; None: they are whole.
        mp_size: ranks of an mp group.
    """
    if part == USER_CONTENT:
        return f"{part}.pt"
    if part == OPTIMIZER and piece is not None:
        return f"{part}_{piece}.pt" if mp_size == 1 else f"{part}_{mp_rank}_{piece}.pt"
    return f"{part}_{mp_rank}.pt"


def full_file(part: str, tag: str) -> str:
    """The name of a part of a full checkpoint."""
    return tag if part == MODEL else f"{part}_{tag}"


def find_newest(root: Path, *, partial: bool) -> str:
    """The name of the newest checkpoint of its kind: what ``newest`` says, else the latest that is there.

    Raises:
        FileNotFoundError: there is none.
    """
    name = read_newest(root)
    if name and name.endswith(_PARTIAL) == partial:
        return name
    found = _checkpoints(root, partial=partial)
    if not found:
        kind = "partial" if partial else "full"
        raise FileNotFoundError(f"resume_from_checkpoint: no {kind} checkpoint in {os.fspath(root)!r}")
    return found[-1][1]


def read_newest(root: Path) -> str | None:
    """The name in ``newest``; None: there is none.

    Raises:
        SMPError: it is damaged.
    """
    path = root / "newest"
    try:
        name = path.read_text().strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        name = "\0"
    if "\0" in name or "/" in name or name.startswith("."):
        raise SMPError(
            f"resume_from_checkpoint: {os.fspath(path)!r} names no checkpoint: it is damaged. Say which one "
            "with tag=..."
        )
    return name or None


def remove_old(root: Path, newest: str, keep: int) -> None:
    """Removes all partial checkpoints of this library but the last ``keep``; never ``newest``."""
    names = [name for _, name in _checkpoints(root, partial=True) if name != newest]
    for name in [*names, newest][:-keep]:
        retire(root / name)


def _checkpoints(root: Path, *, partial: bool) -> list[tuple[int, str]]:
    """(time of the save in ns, name), oldest first, of those that this library has saved."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        name = path.name
        if name.startswith(".") and name.endswith(".ready"):
            name = name[1 : -len(".ready")]
        if name.startswith(".") or name.endswith(_PARTIAL) != partial:
            continue
        identity = _folder_identity(root, name) if partial else _file_identity(root, name)
        if identity is not None:
            found.append((identity.saved_at_ns, name))
    return sorted(set(found))


def _folder_identity(root: Path, name: str) -> Identity | None:
    folder = ready_folder(root, name) or root / name
    parts = (read_identity(path) for path in sorted(folder.glob("*.pt")))
    return next((identity for identity in parts if identity is not None), None)


def _file_identity(root: Path, name: str) -> Identity | None:
    path = (ready_files(root, name) or {}).get(name, root / name)
    identity = read_identity(path) if path.is_file() else None
    return identity if identity is not None and identity.part == MODEL else None
