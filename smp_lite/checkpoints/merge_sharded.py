"""Puts the files of a partial checkpoint of sharded parameters together: one plain state dict, in one file.

::

    python -m smp_lite.checkpoints.merge_sharded FOLDER OUT.pt [--tag TAG]

``FOLDER`` is what was given to ``smp.save_checkpoint``, or the ``{tag}_partial`` in it. No ranks are needed.
Parameters are in float32, as masters are; buffers as they were. It goes by the rules of SMP's files
(:mod:`.sharded_parts`), so files need nothing that this library puts beside; tables of parameters are taken
from ``user_content.pt``, or, where an mp group had several ranks, from each one's ``model_{mp_rank}.pt``.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import SMPError
from ..storage.identity import read_identity
from ..storage.layout import OPTIMIZER, USER_CONTENT, find_newest, partial_name
from ..storage.switch import ready_folder
from ..storage.torch_files import read_torch, write_torch
from ..wrapper.state.state_versions import with_versions_of
from .sharded_parts import BUFFER_NAMES, PARAM_SHAPES

__all__ = ["main", "merge"]

_CALLER = "merge_sharded"
_OPTIMIZER_FILE = re.compile(r"optimizer_(?:(?P<mp>\d+)_)?(?P<piece>\d+)\.pt")


def merge(folder: str | os.PathLike[str], tag: str | None = None) -> dict[str, torch.Tensor]:
    """The whole state dict.

    Args:
        folder: with checkpoints, or one partial checkpoint.
        tag: which one of several; None: the newest.

    Raises:
        FileNotFoundError: there is none.
        SMPError: a file is missing, or they do not go together.
    """
    root = _folder_of(Path(folder), tag)
    files = _files_of(root)
    content = _read(root / f"{USER_CONTENT}.pt")
    merged: dict[str, torch.Tensor] = {}
    for mp_rank, of_pieces in files.items():
        path = root / f"model_{mp_rank}.pt"
        model = _read(path)
        tables = model
        if len(files) == 1 and isinstance(content, Mapping) and PARAM_SHAPES in content:
            path, tables = root / f"{USER_CONTENT}.pt", content
        buffers = _entry(path, tables, BUFFER_NAMES, list | tuple, str)
        shapes = _entry(path, tables, PARAM_SHAPES, list | tuple, Mapping)
        module = _entry(root / f"model_{mp_rank}.pt", model, "module", Mapping)
        if lacking := [name for name in buffers if name not in module]:
            raise SMPError(f"{_CALLER}: {os.fspath(root / f'model_{mp_rank}.pt')!r} has no {lacking[0]!r}")
        pieces = [_read(path) for path in of_pieces]
        counts = [_count(path, piece) for path, piece in zip(of_pieces, pieces, strict=True)]
        for path, count in zip(of_pieces, counts, strict=True):
            if count != len(of_pieces):
                raise SMPError(
                    f"{_CALLER}: {os.fspath(path)!r} says partition_count={count}, and there are "
                    f"{len(of_pieces)} such files: one is missing, or belongs to another save"
                )
        for name in buffers:
            merged.setdefault(name, module[name])
        _merge_pieces(merged, of_pieces, pieces, shapes)
        merged = with_versions_of(module, merged)
    return merged


def _folder_of(root: Path, tag: str | None) -> Path:
    if not root.is_dir():
        raise FileNotFoundError(f"{_CALLER}: {os.fspath(root)!r} is no folder")
    if tag is None and any(_OPTIMIZER_FILE.fullmatch(path.name) for path in root.iterdir()):
        return root
    name = partial_name(tag) if tag is not None else find_newest(root, partial=True)
    folder = ready_folder(root, name) or root / name
    if not folder.is_dir():
        raise FileNotFoundError(f"{_CALLER}: {os.fspath(folder)!r} does not exist")
    return folder


def _files_of(root: Path) -> dict[int, list[Path]]:
    """For each mp rank its files, by piece; all of one save."""
    found: dict[int, dict[int, Path]] = {}
    saves = {}
    for path in sorted(root.glob("*.pt")):
        identity = read_identity(path)
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        mp_rank, piece = (int(match["mp"] or 0), int(match["piece"])) if match else (0, 0)
        if identity is not None:
            saves.setdefault(identity.save, path)
            if match and (identity.part, identity.mp_rank, identity.piece) != (OPTIMIZER, mp_rank, piece):
                raise SMPError(
                    f"{_CALLER}: {os.fspath(path)!r} holds the {identity.part} of mp rank "
                    f"{identity.mp_rank}, piece {identity.piece} of {identity.pieces}: it was renamed or "
                    "copied there"
                )
        if match:
            found.setdefault(mp_rank, {})[piece] = path
    if len(saves) > 1:
        raise SMPError(
            f"{_CALLER}: {', '.join(repr(os.fspath(path)) for path in saves.values())} are of different saves"
        )
    if not found:
        raise SMPError(f"{_CALLER}: {os.fspath(root)!r} holds no optimizer_*.pt, so no sharded parameters")
    for mp_rank, of_pieces in found.items():
        if sorted(of_pieces) != list(range(len(of_pieces))):
            raise SMPError(
                f"{_CALLER}: {os.fspath(root)!r} holds the pieces {sorted(of_pieces)} of mp rank {mp_rank}: "
                f"{min(set(range(max(of_pieces) + 1)) - of_pieces.keys())} is missing"
            )
    if sorted(found) != list(range(len(found))):
        raise SMPError(f"{_CALLER}: {os.fspath(root)!r} holds the pieces of mp ranks {sorted(found)} alone")
    identity = next(filter(None, (read_identity(p) for of in found.values() for p in of.values())), None)
    if identity is not None and identity.mp_size != len(found):
        raise SMPError(
            f"{_CALLER}: {os.fspath(root)!r} holds the pieces of {len(found)} mp ranks of {identity.mp_size}"
        )
    return {mp: [of[piece] for piece in sorted(of)] for mp, of in sorted(found.items())}


def _read(path: Path) -> Any:
    if not path.is_file():
        raise SMPError(f"{_CALLER}: {os.fspath(path)!r} is missing")
    return read_torch(path, caller=_CALLER)


def _entry(path: Path, content: Any, key: str, kind: Any, of: Any = None) -> Any:
    """What a file has under a key, if it is of that kind."""
    if not isinstance(content, Mapping) or key not in content:
        raise SMPError(f"{_CALLER}: {os.fspath(path)!r} has no {key!r}: it is no part of sharded parameters")
    value = content[key]
    if not isinstance(value, kind) or (of is not None and not all(isinstance(each, of) for each in value)):
        raise SMPError(f"{_CALLER}: {os.fspath(path)!r}: {key!r} is not what it was saved as: it was changed")
    return value


def _count(path: Path, piece: Any) -> int:
    _entry(path, piece, "fp32_flat_groups", list | tuple, torch.Tensor)
    count = _entry(path, piece, "partition_count", int | list | tuple)
    counts = count if isinstance(count, list | tuple) else [count]
    if not counts or not all(isinstance(each, int) for each in counts):
        raise SMPError(f"{_CALLER}: {os.fspath(path)!r} says partition_count={count!r}, which is no number")
    return max(counts)


def _merge_pieces(
    merged: dict[str, torch.Tensor],
    files: Sequence[Path],
    pieces: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, Sequence[int]]],
) -> None:
    """Adds the parameters of one mp rank."""
    flats = [torch.cat([flat.float() for flat in piece["fp32_flat_groups"]]) for piece in pieces]
    shapes = {name: tuple(shape) for table in tables for name, shape in table.items()}
    ranks = len(pieces)
    lengths = [-(-math.prod(shape) // ranks) for shape in shapes.values()]
    for path, flat in zip(files, flats, strict=True):
        if flat.numel() != sum(lengths):
            raise SMPError(
                f"{_CALLER}: {os.fspath(path)!r} has {flat.numel()} elements, and by param_shapes a piece "
                f"has {sum(lengths)}: it was changed, or not written whole"
            )
    rows = [flat.split(lengths) for flat in flats]
    for number, (long_name, shape) in enumerate(shapes.items()):
        name = _plain(long_name)
        slices = [
            piece.get("exact", {}).get(name, row[number]) for piece, row in zip(pieces, rows, strict=True)
        ]
        if not any(name in piece.get("boxes", {}) for piece in pieces):
            merged[name] = torch.cat(slices)[: math.prod(shape)].view(shape).clone()
            continue
        for piece, mine in zip(pieces, slices, strict=True):
            whole_shape, boxes = piece["boxes"][name]
            whole = merged.setdefault(name, mine.new_zeros(whole_shape))
            for offsets, start, sizes, strides in boxes:
                target = whole
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    target = target.narrow(dim, offset, size)
                target.copy_(mine.as_strided(sizes, strides, mine.storage_offset() + start))


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=f"python -m smp_lite.checkpoints.{_CALLER}", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="as given to smp.save_checkpoint")
    parser.add_argument("out", metavar="OUT.pt", help="the file to write; it must not exist")
    parser.add_argument("--tag", help="which checkpoint; without it the newest")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    given = parser.parse_args(arguments)
    try:
        merged = merge(given.folder, given.tag)
        write_torch(Path(given.out), merged)
    except (SMPError, OSError) as error:
        parser.exit(1, f"{error}\n")
    print(f"{len(merged)} tensors, {sum(t.numel() for t in merged.values()):,} elements: {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
