"""Finding the files of one save, all of them and no others.

Which files belong together is told by the identity in each, not by their names: a copy of an old part, a
part that was lost, or a save that was switched to between two reads is an error that names the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import SMPError
from ..plan.partition import Partition
from .identity import Identity, read_identity
from .layout import MODEL, OPTIMIZER, PARTITION_FILE, PARTS, full_file, part_file
from .switch import ready_files, ready_folder

__all__ = ["Found", "find_full", "find_partial"]

_CALLER = "resume_from_checkpoint"


@dataclass(frozen=True)
class Found:
    """The files of one save that a rank reads."""

    files: Mapping[str, Path]
    """By part."""
    identity: Identity | None
    """None: a full checkpoint that another program wrote."""
    partition_file: Path | None = None

    @property
    def save(self) -> str | None:
        return self.identity.save if self.identity else None

    def __str__(self) -> str:
        return str(self.identity) if self.identity else f"a file of another program ({self.files[MODEL]})"


def find_partial(
    root: Path, name: str, *, mp_rank: int, mp_size: int, partitions: int, with_optimizer: bool
) -> list[Found]:
    """The saves that this rank can resume from under a name, best first: more than one after a kill.

    Raises:
        FileNotFoundError: there is no checkpoint of that name.
        SMPError: a part is missing or of another save, or they are for other partitions.
    """
    folders = [folder for folder in (ready_folder(root, name), root / name) if folder and folder.exists()]
    if not folders:
        raise FileNotFoundError(f"{_CALLER}: {os.fspath(root / name)!r} does not exist")
    found, problems = [], []
    for folder in folders:
        try:
            found.append(_look(folder, mp_rank, mp_size, partitions, with_optimizer))
        except SMPError as problem:
            problems.append(problem)
    if not found:
        raise problems[0]
    return found


def _look(folder: Path, mp_rank: int, mp_size: int, partitions: int, with_optimizer: bool) -> Found:
    if not folder.is_dir():
        raise SMPError(f"{_CALLER}: {os.fspath(folder)!r} is no folder, so no partial checkpoint")
    places = {part: folder / part_file(part, mp_rank) for part in PARTS}
    files = {part: path for part, path in places.items() if path.exists()}
    if not with_optimizer:
        files.pop(OPTIMIZER, None)
    identities = {part: read_identity(path) for part, path in files.items()}
    first = next(filter(None, identities.values()), None) or _any_identity(folder)
    if first is None:
        raise SMPError(
            f"{_CALLER}: {os.fspath(folder)!r} holds no part that save_checkpoint has written, so it cannot "
            "be told whether its files belong together: load them with smp.load"
        )
    _check_size(folder, first, mp_size, partitions)
    for part in first.parts:
        if part not in files and (with_optimizer or part != OPTIMIZER):
            raise SMPError(f"{_CALLER}: {os.fspath(places[part])!r} is missing: it is a part of {first}")
    _check_parts(files, identities, first, {MODEL: mp_rank, OPTIMIZER: mp_rank})
    if MODEL not in files:
        raise SMPError(f"{_CALLER}: {os.fspath(folder)!r} holds no model: it was saved without one")
    _check_partition(folder / PARTITION_FILE, first)
    return Found(files, first, folder / PARTITION_FILE)


def _any_identity(folder: Path) -> Identity | None:
    return next(filter(None, map(read_identity, sorted(folder.glob("*.pt")))), None)


def find_full(root: Path, tag: str, *, with_optimizer: bool) -> Found:
    """The files of a full checkpoint.

    Raises:
        FileNotFoundError: there is none of that tag.
        SMPError: a part is missing or of another save.
    """
    on_their_way = ready_files(root, tag)
    files = {}
    for part in PARTS:
        name = full_file(part, tag)
        path = root / name if on_their_way is None else on_their_way.get(name)
        if path is not None and path.exists() and (with_optimizer or part != OPTIMIZER):
            files[part] = path
    if MODEL not in files:
        raise FileNotFoundError(f"{_CALLER}: {os.fspath(root / tag)!r} does not exist")
    if not files[MODEL].is_file():
        raise SMPError(f"{_CALLER}: {os.fspath(root / tag)!r} is no file, so no full checkpoint")
    identities = {part: read_identity(path) for part, path in files.items()}
    first = identities[MODEL]
    for part in first.parts if first is not None else ():
        if part not in files and (with_optimizer or part != OPTIMIZER):
            missing = os.fspath(root / full_file(part, tag))
            raise SMPError(f"{_CALLER}: {missing!r} is missing: it is a part of {first}")
    _check_parts(files, identities, first, {})
    return Found(files, first)


def _check_parts(
    files: Mapping[str, Path],
    identities: Mapping[str, Identity | None],
    first: Identity | None,
    mp_ranks: Mapping[str, int],
) -> None:
    """Raises SMPError unless all are parts of one save, each under its own name."""
    if len({found and found.save for found in (first, *identities.values())}) > 1:
        said = "; ".join(
            f"{path.name!r} is of {identities[part] or 'no save of this library'}"
            for part, path in files.items()
        )
        folder = os.fspath(next(iter(files.values())).parent)
        raise SMPError(
            f"{_CALLER}: parts of different saves are not mixed, and in {folder!r} {said}. Remove what does "
            "not belong there, or resume from another checkpoint (load_optimizer=False leaves the "
            "optimizer's part aside)"
        )
    for part, found in identities.items():
        if found is not None and (found.part, found.mp_rank) != (part, mp_ranks.get(part, 0)):
            raise SMPError(
                f"{_CALLER}: {os.fspath(files[part])!r} holds the {found.part} of mp rank {found.mp_rank}: "
                "it was renamed or copied there"
            )


def _check_size(folder: Path, identity: Identity, mp_size: int, partitions: int) -> None:
    if identity.partitions != partitions:
        raise SMPError(
            f"{_CALLER}: {os.fspath(folder)!r} holds {identity.partitions} partitions, but "
            f"partitions={partitions}. A partial checkpoint resumes on the partitions it was saved from; a "
            "full one, of save_checkpoint(..., partial=False), resumes on any number"
        )
    if identity.mp_size != mp_size:
        raise SMPError(
            f"{_CALLER}: {os.fspath(folder)!r} has the parts of {identity.mp_size} rank(s) of an mp group, "
            f"but here it has {mp_size}: one side is smp.init_in_memory, where one process plays all "
            "partitions. A full checkpoint, of save_checkpoint(..., partial=False), resumes on both"
        )


def _check_partition(path: Path, identity: Identity) -> None:
    try:
        digest = Partition.from_json(path.read_text()).digest()
    except FileNotFoundError:
        raise SMPError(f"{_CALLER}: {os.fspath(path)!r} is missing: it is a part of {identity}") from None
    except ValueError as error:
        raise SMPError(f"{_CALLER}: {os.fspath(path)!r} cannot be read: {error}") from error
    if digest != identity.partition:
        raise SMPError(
            f"{_CALLER}: {os.fspath(path)!r} holds another partition than {identity} was made with: it was "
            "changed, or belongs to another save"
        )
