"""Names of portable checkpoints, and which there are.

::

    path/{tag}_portable/.metadata          of torch.distributed.checkpoint, as are __{rank}_0.distcp
    path/{tag}_portable/smp_lite.json      which save it is
    path/{tag}_portable/user_content.pt

Folders that plain PyTorch has saved have a ``.metadata`` alone; they are found by their own path, or by a tag
that is their name.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import SMPError
from ...storage.fingerprint import fingerprint
from ...storage.identity import Identity, read_identity
from ...storage.layout import MODEL, full_file, partial_name, read_newest
from ...storage.switch import ready_files, ready_folder, retire

__all__ = [
    "IDENTITY_FILE",
    "METADATA_FILE",
    "Portable",
    "find_portable",
    "look_at",
    "portable_name",
    "remove_old_portable",
]

IDENTITY_FILE = "smp_lite.json"
METADATA_FILE = ".metadata"
_PORTABLE = "_portable"
_CALLER = "resume_from_checkpoint"


@dataclass(frozen=True)
class Portable:
    """A folder to resume from."""

    folder: Path
    identity: Identity | None
    """None: plain PyTorch has saved it."""

    @functools.cached_property
    def save(self) -> str:
        """Tells saves apart."""
        return self.identity.save if self.identity else fingerprint([self.folder])

    def __str__(self) -> str:
        return str(self.identity) if self.identity else f"a checkpoint of another program ({self.folder})"


def portable_name(tag: str) -> str:
    """The folder of a portable checkpoint."""
    return f"{tag}{_PORTABLE}"


def find_portable(root: Path, tag: str | None, *, partial: bool) -> Portable | None:
    """What is resumed from, if it is a portable checkpoint; None: it is another one, or there is none.

    Where there is another one of the same tag, or without a tag, the later counts.

    Args:
        root: the folder of all checkpoints, or a portable one itself.
        tag: None: the newest.
        partial: which other kind is asked for.

    Raises:
        SMPError: a folder is no whole checkpoint.
    """
    if tag is None:
        if (root / METADATA_FILE).exists():
            return look_at(root)
        named = read_newest(root)
        if named is not None and named.endswith(_PORTABLE):
            found = _of_name(root, named)
            if found is not None:
                return found
        portables = _all(root)
        if not portables or (named is not None and named.endswith("_partial") == partial):
            return None
        best = max(portables, key=_time)
        others = _other_times(root, partial=partial)
        return best if _time(best) > max(others, default=-1) else None
    found = _of_name(root, portable_name(tag)) or _of_name(root, tag)
    if found is None:
        return None
    other = _other_time(root, partial_name(tag) if partial else tag, partial=partial)
    return found if other is None or _time(found) > other else None


def remove_old_portable(root: Path, newest: str, keep: int) -> None:
    """Removes all portable checkpoints of this library but the last ``keep``; never ``newest``."""
    found = sorted(_all(root), key=_time)
    names = [name for each in found if (name := each.folder.name) != newest]
    for name in [*names, newest][:-keep]:
        retire(root / name)


def _of_name(root: Path, name: str) -> Portable | None:
    folder = ready_folder(root, name) or root / name
    if (folder / METADATA_FILE).exists() or (folder / IDENTITY_FILE).exists():
        return look_at(folder)
    return None


def look_at(folder: Path) -> Portable:
    """The checkpoint in a folder.

    Raises:
        SMPError: it is not whole.
    """
    if not (folder / METADATA_FILE).exists():
        raise SMPError(
            f"{_CALLER}: {os.fspath(folder / METADATA_FILE)!r} is missing, so this portable checkpoint is "
            "not whole: resume from another one"
        )
    try:
        return Portable(folder, Identity.from_json((folder / IDENTITY_FILE).read_text()))
    except FileNotFoundError:
        return Portable(folder, None)
    except (ValueError, TypeError, KeyError) as error:
        raise SMPError(f"{_CALLER}: {os.fspath(folder / IDENTITY_FILE)!r} cannot be read: {error}") from error


def _all(root: Path) -> list[Portable]:
    """Those that this library has saved."""
    names = set()
    for path in root.iterdir() if root.is_dir() else ():
        name = path.name
        if name.startswith(".") and name.endswith(".ready"):
            name = name[1 : -len(".ready")]
        if not name.startswith(".") and name.endswith(_PORTABLE):
            names.add(name)
    found = (_of_name(root, name) for name in sorted(names))
    return [each for each in found if each is not None and each.identity is not None]


def _time(found: Portable) -> int:
    """Of the save, in ns since the epoch."""
    if found.identity is not None:
        return found.identity.saved_at_ns
    return (found.folder / METADATA_FILE).stat().st_mtime_ns


def _other_times(root: Path, *, partial: bool) -> list[int]:
    """Of all partial or of all full checkpoints."""
    times = []
    for path in root.iterdir():
        name = path.name
        if name.startswith(".") and name.endswith(".ready"):
            name = name[1 : -len(".ready")]
        if not name.startswith(".") and name.endswith("_partial") == partial:
            times.append(_other_time(root, name, partial=partial, ours=True))
    return [time for time in times if time is not None]


def _other_time(root: Path, name: str, *, partial: bool, ours: bool = False) -> int | None:
    """Of a partial or full checkpoint, if there is one of that name.

    Args:
        ours: only if this library has saved it.
    """
    if partial:
        folder = ready_folder(root, name) or root / name
        parts = (read_identity(path) for path in sorted(folder.glob("*.pt")))
        found = next((identity for identity in parts if identity is not None), None)
        return None if found is None else found.saved_at_ns
    path = (ready_files(root, name) or {}).get(full_file(MODEL, name), root / name)
    if not path.is_file():
        return None
    found = read_identity(path)
    if found is None:
        return None if ours else path.stat().st_mtime_ns
    return found.saved_at_ns if found.part == MODEL else None
