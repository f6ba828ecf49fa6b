"""Putting a new save in the place of an older one of the same name, so that a kill at any moment leaves one.

A folder cannot be renamed over another one, and several files cannot be renamed at once. So a save goes
through three places beside its own, in the same folder, and each step is one rename:

1. ``.{name}.{save}.saving`` is being written. Readers do not look there.
2. ``.{name}.ready`` is whole: renaming to it is the switch. From here on readers prefer it to ``{name}``.
3. What had the name before goes to ``.{name}.{save}.removing``, and what is ready gets the name. A set of
   files moves one by one; readers look for each in ``.{name}.ready`` first, and its manifest tells them
   which there are, until the last step takes the manifest away.

Whoever is killed leaves some of these behind. Readers never write; the next save (:func:`clear`) finishes
what is ready and removes the rest. One job at a time saves into a folder.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from .durable import remove, replace_file, sync_folder, write_text

__all__ = ["Switch", "clear", "new_name", "ready_files", "ready_folder", "retire", "write_newest"]

_MANIFEST = "manifest.json"
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?:[0-9a-f]{16}\.(?:saving|removing)|(?P<ready>ready))")


def new_name() -> str:
    """A random name for a save: 16 hexadecimal digits."""
    return secrets.token_hex(8)


class Switch:
    """One save on its way to its name.

    Args:
        root: the folder of all checkpoints.
        name: of a folder, or the common name of a set of files.
        save: :func:`new_name`, the same on all ranks.
    """

    def __init__(self, root: Path, name: str, save: str) -> None:
        self.root, self.name = root, name
        self.folder = root / f".{name}.{save}.saving"
        """Where the save is written."""
        self.leads = False
        """Whether this process made it, and switches."""

    def begin(self) -> None:
        """Makes the folder, unless another process has; who makes it also clears what was left behind."""
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self.folder.mkdir()
        except FileExistsError:
            return
        self.leads = True
        clear(self.root, keep=self.folder)

    def list_files(self, files: Sequence[str], gone: Sequence[str]) -> None:
        """Makes it the save of a set of files, which will lie in ``root`` itself.

        Args:
            files: their names.
            gone: what an older save has beside them, and which goes with it.
        """
        write_text(self.folder / _MANIFEST, json.dumps({"files": files, "gone": gone}))

    def discard(self) -> None:
        """Gives the save up, where it is not ready yet."""
        if self.leads:
            remove(self.folder)

    def commit(self) -> None:
        """The switch: from here on readers find this save."""
        sync_folder(self.folder)
        os.rename(self.folder, _ready(self.root, self.name))
        sync_folder(self.root)

    def finish(self) -> None:
        """Gives the save its name, and removes what had it before."""
        _finish(self.root, self.name)


def ready_folder(root: Path, name: str) -> Path | None:
    """A folder that was switched to and has not got its name yet."""
    folder = _ready(root, name)
    return folder if folder.is_dir() else None


def ready_files(root: Path, name: str) -> dict[str, Path] | None:
    """Where each file is of a set that was switched to and is on its way; None: none is."""
    folder = _ready(root, name)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except FileNotFoundError:
        return None
    places = [(folder / file, root / file) for file in manifest["files"]]
    return {ready.name: ready if ready.exists() else final for ready, final in places}


def clear(root: Path, keep: Path | None = None) -> None:
    """Finishes or removes what killed saves have left in a folder."""
    for path in sorted(root.iterdir()):
        found = _LEFTOVER.fullmatch(path.name)
        if found is None or path == keep:
            continue
        if found["ready"]:
            _finish(root, found["name"])
        else:
            remove(path)


def retire(path: Path) -> None:
    """Removes a checkpoint: it is gone at once, or not at all."""
    aside = path.with_name(f".{path.name}.{new_name()}.removing")
    os.rename(path, aside)
    remove(aside)


def write_newest(root: Path, name: str) -> None:
    """Names the newest checkpoint of a folder."""
    temporary = root / f".newest.{new_name()}.saving"
    replace_file(root / "newest", temporary, lambda path: write_text(path, name))


def _ready(root: Path, name: str) -> Path:
    return root / f".{name}.ready"


def _finish(root: Path, name: str) -> None:
    ready, final = _ready(root, name), root / name
    if (ready / _MANIFEST).exists():
        _finish_files(root, ready)
    elif not any(ready.iterdir()):
        ready.rmdir()  # a set of files, all but done
    elif os.path.lexists(final):
        aside = root / f".{name}.{new_name()}.removing"
        os.rename(final, aside)
        os.rename(ready, final)
        sync_folder(root)
        remove(aside)
    else:
        os.rename(ready, final)
        sync_folder(root)


def _finish_files(root: Path, ready: Path) -> None:
    manifest = json.loads((ready / _MANIFEST).read_text())
    for file in manifest["files"]:
        if (ready / file).exists():
            os.replace(ready / file, root / file)
    for file in manifest["gone"]:
        (root / file).unlink(missing_ok=True)
    sync_folder(root)
    (ready / _MANIFEST).unlink()
    ready.rmdir()
    sync_folder(root)
