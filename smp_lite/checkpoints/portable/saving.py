"""Writing a portable checkpoint: a folder of ``torch.distributed.checkpoint`` (DCP), by our own ranks.

DCP's planner decides which replica writes what, and its file writer writes; only the messages between ranks
are ours, so no process group is needed. ``.metadata`` comes last, after all ranks have written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from ...errors import SMPError
from ...session import Session
from ...storage.durable import write_text
from ...storage.identity import Identity
from ...storage.layout import MODEL, OPTIMIZER, USER_CONTENT, part_file
from ...storage.switch import Switch
from ...storage.torch_files import write_torch
from .entries import Entries, entries_here
from .names import IDENTITY_FILE
from .pieces import Piece
from .together import together

__all__ = ["write_portable"]

Writing = Callable[[Path], contextlib.AbstractContextManager[None]]


def write_portable(
    session: Session,
    caller: str,
    switch: Switch,
    identity: Identity,
    objects: dict[str, Any],
    writing: Writing,
) -> None:
    """Writes the folder, whole, where the switch wants it. Collective over all ranks.

    Args:
        session: with the ranks.
        caller: the public function.
        switch: begun on rank 0.
        identity: of the save.
        objects: by part: the model, the optimizer, the user content; or None.
        writing: gives errors of the disk the name of the file.

    Raises:
        SMPError: a rank could not write, does not see the folder, or has something that has no portable form.
    """
    planner = _Planner()
    final = switch.root / switch.name

    def plan() -> SavePlan:
        if not switch.folder.is_dir():
            raise SMPError(
                f"{caller}: rank {session.rank} does not see {os.fspath(switch.folder)!r}, which rank 0 has "
                "made: a portable checkpoint is one folder, so all hosts must have the same file system there"
            )
        planner.take(entries_here(session, objects[MODEL], objects[OPTIMIZER]))
        return planner.create_local_plan()

    plans = together(session, caller, plan)
    writer = _Writer(switch.folder, final, identity.save)
    metadata: list[Metadata] = []

    def write() -> list[WriteResult]:
        all_plans, whole = planner.create_global_plan(plans)
        metadata.append(whole)
        mine = planner.finish_plan(writer.prepare_global_plan(all_plans)[session.rank])
        results: list[WriteResult] = []
        if mine.items:
            with writing(final / f"{mine.storage_data.prefix}0.distcp"):
                results = writer.write_data(mine, planner).value()
        if session.rank == 0:
            if objects[USER_CONTENT] is not None:
                name = part_file(USER_CONTENT, 0)
                with writing(final / name):
                    write_torch(
                        switch.folder / name, objects[USER_CONTENT], identity.of(USER_CONTENT).to_json()
                    )
            with writing(final / IDENTITY_FILE):
                write_text(switch.folder / IDENTITY_FILE, identity.to_json())
        return results

    results = together(session, caller, write)

    def finish() -> None:
        if session.rank == 0:
            with writing(final / ".metadata"):
                further = _name_further(metadata[0], results, planner.entries.further)
                _put_in_order(metadata[0], objects[MODEL])
                writer.finish(metadata[0], [*results, further])

    together(session, caller, finish)


class _Planner(DefaultSavePlanner):
    """DCP's own, over entries of which a rank has boxes."""

    def take(self, entries: Entries) -> None:
        """What this rank has."""
        self.entries = entries

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self.entries.values.items() for item in _items(key, value)]
        return SavePlan(items, planner_data=self.entries.paths)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.entries.values[index.fqn]
        return value.at(index.offset) if isinstance(value, Piece) else value


def _items(key: str, value: Any) -> list[WriteItem]:
    if not isinstance(value, Piece):
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]
    properties = TensorProperties(dtype=value.part.dtype)
    size = torch.Size(value.shape)
    found = []
    for box in value.boxes:
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        found.append(
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
        )
    return found


class _Writer(FileSystemWriter):
    """DCP's own, which notes the name of the save and the place where it will lie."""

    def __init__(self, folder: Path, final: Path, save: str) -> None:
        super().__init__(folder, sync_files=True)
        self.final, self.save = final, save

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.final, save_id=self.save)


def _name_further(
    metadata: Metadata, results: list[list[WriteResult]], further: dict[str, str]
) -> list[WriteResult]:
    """Gives entries that are written their further names, which share the bytes."""
    written: dict[str, list[WriteResult]] = {}
    for result in (result for of_rank in results for result in of_rank):
        written.setdefault(result.index.fqn, []).append(result)
    entries = metadata.state_dict_metadata
    found = []
    for key, stands_for in further.items():
        if stands_for in entries:
            entries[key] = entries[stands_for]
            found += [replace(result, index=replace(result.index, fqn=key)) for result in written[stands_for]]
    metadata.planner_data = {key: path for key, path in metadata.planner_data.items() if key in entries}
    return found


def _put_in_order(metadata: Metadata, model: Any) -> None:
    """Entries in the order of the model's state dict: a file that is made of them has the usual order."""
    keys = [] if model is None else [f"{MODEL}.{key}" for key in model.module.state_dict(keep_vars=True)]
    place = {key: number for number, key in enumerate(keys)}
    in_order = sorted(
        metadata.state_dict_metadata.items(), key=lambda item: place.get(item[0], len(place))
    )  # sorting is stable
    metadata.state_dict_metadata = dict(in_order)
