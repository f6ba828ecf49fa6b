"""Finding the files of one save, all of them and no others.

Which files belong together is told by the identity in each, not by their names: a copy of an old part, a
part that was lost, or a save that was switched to between two reads is an error that names the files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import SMPError
from ..plan.partitioning.partition import Partition
from .fingerprint import fingerprint
from .identity import Identity, read_identity
from .layout import (
    FP16_STATES,
    MODEL,
    OF_OPTIMIZER,
    OPTIMIZER,
    PARTITION_FILE,
    PARTS,
    USER_CONTENT,
    full_file,
    part_file,
)
from .switch import ready_files, ready_folder

__all__ = ["Found", "Reader", "find_full", "find_partial"]

_CALLER = "resume_from_checkpoint"


@dataclass(frozen=True)
class Found:
    """The files of one save that a rank reads."""

    files: Mapping[str, Path]
    """By part."""
    identity: Identity | None
    """None: a full checkpoint that another program wrote."""
    partition_file: Path | None = None

    @functools.cached_property
    def save(self) -> str:
        """Tells saves apart."""
        return self.identity.save if self.identity else fingerprint(self.files.values())

    def __str__(self) -> str:
        return str(self.identity) if self.identity else f"a file of another program ({self.files[MODEL]})"


@dataclass(frozen=True)
class Reader:
    """The rank that reads a partial checkpoint.

    Attributes:
        mp_rank, mp_size, partitions: its place.
        piece, pieces: which piece of sharded parameters it holds, of how many; 0 of 1: they are whole.
    """

    mp_rank: int
    mp_size: int
    partitions: int
    piece: int = 0
    pieces: int = 1

    def file(self, part: str) -> str:
        """The name of its part."""
        return part_file(part, self.mp_rank, self.piece if self.pieces > 1 else None, self.mp_size)


def find_partial(root: Path, name: str, reader: Reader, *, with_optimizer: bool) -> list[Found]:
    """The saves that this rank can resume from under a name, best first: more than one after a kill.

    Sharded parameters are in the optimizer's files, which are read then in any case.

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
            found.append(_look(folder, reader, with_optimizer or reader.pieces > 1))
        except SMPError as problem:
            problems.append(problem)
    if not found:
        raise problems[0]
    return found


def _look(folder: Path, reader: Reader, with_optimizer: bool) -> Found:
    if not folder.is_dir():
        raise SMPError(f"{_CALLER}: {os.fspath(folder)!r} is no folder, so no partial checkpoint")
    places = {part: folder / reader.file(part) for part in PARTS}
    files = {part: path for part, path in places.items() if path.exists()}
    if not with_optimizer:
        for part in OF_OPTIMIZER:
            files.pop(part, None)
    identities = {part: read_identity(path) for part, path in files.items()}
    first = next(filter(None, identities.values()), None) or _any_identity(folder)
    if first is None:
        raise SMPError(
            f"{_CALLER}: {os.fspath(folder)!r} holds no part that save_checkpoint has written, so it cannot "
            "be told whether its files belong together: load them with smp.load"
        )
    _check_size(folder, first, reader)
    for part in (MODEL, OPTIMIZER, USER_CONTENT) if reader.pieces > 1 else first.parts:
        if part not in files and (with_optimizer or part not in OF_OPTIMIZER):
            raise SMPError(f"{_CALLER}: {os.fspath(places[part])!r} is missing: it is a part of {first}")
    mine = (reader.mp_rank, reader.piece)
    _check_parts(files, identities, first, {MODEL: (reader.mp_rank, 0), OPTIMIZER: mine, FP16_STATES: mine})
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
        if path is not None and path.exists() and (with_optimizer or part not in OF_OPTIMIZER):
            files[part] = path
    if MODEL not in files:
        raise FileNotFoundError(f"{_CALLER}: {os.fspath(root / tag)!r} does not exist")
    if not files[MODEL].is_file() and not any(files[MODEL].glob("model.safetensors*")):
        raise SMPError(f"{_CALLER}: {os.fspath(root / tag)!r} is no file, so no full checkpoint")
    identities = {part: read_identity(path) if path.is_file() else None for part, path in files.items()}
    first = identities[MODEL]
    for part in first.parts if first is not None else ():
        if part not in files and (with_optimizer or part not in OF_OPTIMIZER):
            missing = os.fspath(root / full_file(part, tag))
            raise SMPError(f"{_CALLER}: {missing!r} is missing: it is a part of {first}")
    _check_parts(files, identities, first, {})
    return Found(files, first)


def _check_parts(
    files: Mapping[str, Path],
    identities: Mapping[str, Identity | None],
    first: Identity | None,
    owners: Mapping[str, tuple[int, int]],
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
        if found is None:
            continue
        mp_rank, piece = owners.get(part, (0, 0))
        if (found.part, found.mp_rank, found.piece) != (part, mp_rank, piece):
            which = f", piece {found.piece} of {found.pieces}" if found.pieces > 1 else ""
            raise SMPError(
                f"{_CALLER}: {os.fspath(files[part])!r} holds the {found.part} of mp rank {found.mp_rank}"
                f"{which}: it was renamed or copied there"
            )


def _check_size(folder: Path, identity: Identity, reader: Reader) -> None:
    mp_size, partitions = reader.mp_size, reader.partitions
    if identity.partitions != partitions:
        raise SMPError(
            f"{_CALLER}: {os.fspath(folder)!r} holds {identity.partitions} partitions, but "
            f"partitions={partitions}. A partial checkpoint resumes on the partitions it was saved from; a "
            "full one, of save_checkpoint(..., partial=False), resumes on any number"
        )
    if identity.mp_size != mp_size:
        in_memory = min(identity.mp_size, mp_size) < partitions
        why = (
            "one side is smp.init_in_memory, where one process plays all partitions"
            if in_memory
            else "it was saved with another tensor_parallel_degree"
        )
        raise SMPError(
            f"{_CALLER}: {os.fspath(folder)!r} has the parts of {identity.mp_size} rank(s) of an mp group, "
            f"but here it has {mp_size}: {why}. A full checkpoint, of save_checkpoint(..., partial=False), "
            "resumes on both"
        )

    if identity.pieces != reader.pieces:
        was, now = (
            f"in pieces over {pieces} ranks" if pieces > 1 else "whole"
            for pieces in (identity.pieces, reader.pieces)
        )
        raise SMPError(
            f"{_CALLER}: {os.fspath(folder)!r} was saved with parameters that lay {was}, and here they lie "
            f"{now} (sharded_data_parallel_degree). A partial checkpoint resumes with the same degree; a "
            "full one, of save_checkpoint(..., partial=False), or a portable one, with any"
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
