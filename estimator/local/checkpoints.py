"""The checkpoints of a job here: what an earlier job saved is there at its start, and what it saves stays.

A folder of this machine is linked, so that what the script saves is safe at once. Objects of S3 are
brought before the job and taken back after it.

`checkpoint_local_path` may be anywhere. Outside `/opt/ml` there is one for all hosts, and the link there
goes by way of a link in the job's folder: so a link of ours is known as one, and goes when the job ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .paths import CONTAINER_ROOT, translate_paths
from .store import Store

__all__ = ["bring_checkpoints", "keep_checkpoints"]


def bring_checkpoints(request: Mapping[str, Any], root: Path, store: Store) -> None:
    """Make a job's earlier checkpoints available to the host whose tree is at `root`.

    Raises:
        ValueError: the folder for them is taken, or S3 refuses.
    """
    if not request.get("CheckpointConfig"):
        return
    uri = request["CheckpointConfig"]["S3Uri"].rstrip("/")
    directory = _directory(request, root)
    path = store.local_path(uri)
    if path is None:
        directory.mkdir(parents=True, exist_ok=True)
        store.download(f"{uri}/", store.keys(f"{uri}/"), directory)
        return
    path.mkdir(parents=True, exist_ok=True)
    link = directory if directory.is_relative_to(root) else _own_link(root)
    link.parent.mkdir(parents=True, exist_ok=True)
    _link(link, path)
    if link != directory:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _link(directory, link)


def keep_checkpoints(request: Mapping[str, Any], root: Path, store: Store) -> None:
    """Keep what the host whose tree is at `root` has saved.

    Raises:
        ValueError: S3 refuses.
    """
    if not request.get("CheckpointConfig"):
        return
    uri = request["CheckpointConfig"]["S3Uri"].rstrip("/")
    directory = _directory(request, root)
    if store.local_path(uri) is None:
        store.upload(directory, uri)
    elif directory.is_symlink() and Path(os.readlink(directory)) == _own_link(root):
        directory.unlink()


def _directory(request: Mapping[str, Any], root: Path) -> Path:
    """Where the script finds its checkpoints: in the tree, or where the user says if that is elsewhere."""
    given = request["CheckpointConfig"].get("LocalPath", f"{CONTAINER_ROOT}/checkpoints")
    return Path(translate_paths(given, root))


def _own_link(root: Path) -> Path:
    return root / "checkpoints"


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and not link.exists():
        link.unlink()  # to a folder that is gone
    if not link.exists():
        link.symlink_to(target, target_is_directory=True)
    elif link.resolve() != target.resolve():
        way_out = "remove it if no job uses it" if link.is_symlink() else "name a new folder"
        raise ValueError(f"checkpoint_local_path={str(link)!r} exists already: {way_out}")
