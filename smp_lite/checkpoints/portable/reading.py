"""Reading boxes of tensors out of a folder of ``torch.distributed.checkpoint`` (DCP).

A rank reads what it needs and no more: of a chunk that it needs all of, the file of ``torch.save`` in it; of
one that it needs a part of, that part's bytes. (Check sums are of whole chunks, and looked at where one is
read.) DCP's own reader always reads whole chunks, and would leave what no chunk covers as it was; here it is
an error. Nothing that is read runs code, unless asked for.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...devices import CPU
from ...errors import SMPError
from ...storage.torch_files import damage
from .names import METADATA_FILE
from .pieces import Box

__all__ = ["PieceReader", "read_metadata"]

_RUN_BYTES = 4096
"""Parts of rows that are shorter are read with what lies between them."""

_IN_METADATA = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
}


def read_metadata(folder: Path, caller: str, *, weights_only: bool | None = None) -> Metadata:
    """What a checkpoint holds.

    Args:
        folder: of the checkpoint.
        caller: the public function, for errors.
        weights_only: False: its pickle may hold anything, which can run code of whoever made it.

    Raises:
        SMPError: it cannot be read.
        OSError: it cannot be opened.
    """
    path = folder / METADATA_FILE
    with open(path, "rb") as file:
        try:
            found = pickle.load(file) if weights_only is False else _Unpickler(file).load()
        except OSError:
            raise
        except _Refused as error:
            raise SMPError(
                f"{caller}: {os.fspath(path)!r} holds more than the description of a checkpoint: {error}. "
                f"That can run code, so it is read only on request. If you trust the file: {caller}(..., "
                "weights_only=False)"
            ) from error
        except Exception as error:
            raise SMPError(
                f"{caller}: {os.fspath(path)!r} cannot be read: it is no whole metadata file of "
                f"torch.distributed.checkpoint ({type(error).__name__}: {error})"
            ) from error
    if not isinstance(found, Metadata) or found.storage_data is None:
        raise SMPError(
            f"{caller}: {os.fspath(path)!r} holds no metadata of torch.distributed.checkpoint, but a "
            f"{type(found).__name__}"
        )
    return found


class _Refused(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata alone."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _IN_METADATA.get(module, ()):
            raise _Refused(f"{module}.{name}")
        return super().find_class(module, name)


class PieceReader:
    """One checkpoint that is being read; a context manager.

    Args:
        folder: of the checkpoint.
        metadata: of :func:`read_metadata`.
        caller: the public function, for errors.
        weights_only: as in ``torch.load``, for what is no tensor.

    Attributes:
        bytes_read: how many bytes of its files have been read.
    """

    def __init__(
        self, folder: Path, metadata: Metadata, caller: str, *, weights_only: bool | None = None
    ) -> None:
        self.folder, self.metadata = folder, metadata
        self.bytes_read = 0
        self._caller, self._weights_only = caller, weights_only
        self._files: dict[str, BinaryIO] = {}
        self._starts: dict[MetadataIndex, tuple[int, tuple[int, ...]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def entries(self) -> Mapping[str, Any]:
        """Tensors (``TensorStorageMetadata``) and others, by key."""
        found: Mapping[str, Any] = self.metadata.state_dict_metadata
        return found

    def path(self, key: str) -> tuple[str | int, ...]:
        """The place of an entry in the nest of dicts and lists that was saved."""
        paths = self.metadata.planner_data
        return paths[key] if isinstance(paths, Mapping) and key in paths else (key,)

    def check_files(self) -> None:
        """
        Raises:
            SMPError: a file is missing or cut off.
        """
        ends: Counter[str] = Counter()
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise SMPError(
                    f"{self._caller}: {os.fspath(path)!r} is missing: it is a part of this checkpoint. "
                    "Resume from another one"
                ) from None
            if size < end:
                raise SMPError(
                    f"{self._caller}: {os.fspath(path)!r} has {size} bytes instead of {end}: it was cut off. "
                    "Resume from another checkpoint"
                )

    def value(self, key: str) -> Any:
        """An entry that is no tensor."""
        info = self._info(MetadataIndex(key))
        self._check(info)
        try:
            with torch.serialization.safe_globals([frozenset, range]):
                return torch.load(self._window(info), map_location="cpu", weights_only=self._weights_only)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise SMPError(
                f"{self._caller}: {key!r} in {os.fspath(self.folder)!r} cannot be read: it holds more than "
                "tensors and plain Python data, which can run code and so is read only on request, or is "
                f"damaged ({type(error).__name__}: {first_line}). If you trust the folder: "
                f"{self._caller}(..., weights_only=False)"
            ) from error

    def tensor(self, key: str, boxes: Sequence[Box] | None = None, shape: Sequence[int] = ()) -> torch.Tensor:
        """Boxes of a tensor, put together; zeros elsewhere (padding).

        Args:
            key: of a tensor.
            boxes: None: all of it.
            shape: of the result.

        Raises:
            SMPError: no chunk holds some of it, or a file does not hold what the metadata say.
        """
        entry = self.entries[key]
        dtype = entry.properties.dtype
        if boxes is None:
            zeros = (0,) * len(entry.size)
            boxes, shape = [Box(zeros, zeros, tuple(entry.size))], entry.size
        result = torch.zeros(tuple(shape), dtype=dtype, device=CPU)
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
        found: list[int] = [0] * len(boxes)
        for item in create_read_items_for_chunk_list(key, entry, chunks):
            place = item.dest_index.index
            assert place is not None
            target = boxes[place].within(result)
            for dim, (start, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(dim, start, size)
            target.copy_(self._part_of_chunk(item, entry))
            found[place] += math.prod(item.lengths)
        for box, elements in zip(boxes, found, strict=True):
            if elements != box.numel:
                raise SMPError(
                    f"{self._caller}: {os.fspath(self.folder)!r} holds {elements} of the {box.numel} "
                    f"elements of {key!r} that begin at {list(box.offsets)}: a piece of it is missing, or "
                    "there twice"
                )
        return result

    def _part_of_chunk(self, item: ReadItem, entry: TensorStorageMetadata) -> torch.Tensor:
        assert item.storage_index.index is not None
        sizes = tuple(entry.chunks[item.storage_index.index].sizes)
        info = self._info(item.storage_index)
        wanted = tuple(item.lengths)
        if wanted == sizes:
            self._check(info)
            chunk = self._load(info)
        elif (start := self._start(item.storage_index, info, sizes)) is not None:
            window = self._window(info)
            return _read_box(
                window, start, sizes, tuple(item.storage_offsets), wanted, entry.properties.dtype
            )
        else:
            self._check(info)
            chunk = self._load(info)
        if tuple(chunk.shape) != sizes:
            raise SMPError(
                f"{self._caller}: {os.fspath(self.folder / info.relative_path)!r} holds a tensor of shape "
                f"{list(chunk.shape)} where {item.storage_index.fqn!r} should have {list(sizes)}"
            )
        for dim, (offset, size) in enumerate(zip(item.storage_offsets, wanted, strict=True)):
            chunk = chunk.narrow(dim, offset, size)
        return chunk

    def _check(self, info: Any) -> None:
        """Looks at all of a range of a file that is about to be read: it holds what was written."""
        before = self.bytes_read
        found = damage(self._window(info))
        self.bytes_read = before  # whoever reads it now finds it in the system's memory
        if found is not None:
            raise SMPError(
                f"{self._caller}: {os.fspath(self.folder / info.relative_path)!r} is damaged from byte "
                f"{info.offset} on: it does not hold what was written ({found}). Resume from another one"
            )

    def _load(self, info: Any) -> torch.Tensor:
        path = self.folder / info.relative_path
        try:
            found = torch.load(self._window(info), map_location="cpu", weights_only=True)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise SMPError(
                f"{self._caller}: {os.fspath(path)!r} cannot be read at byte {info.offset}: it holds no "
                f"tensor of torch.save there ({type(error).__name__}: {first_line})"
            ) from error
        assert isinstance(found, torch.Tensor)
        return found

    def _start(self, index: MetadataIndex, info: Any, sizes: tuple[int, ...]) -> int | None:
        """Where a chunk's elements begin in its window; None: they do not lie one after another."""
        if index not in self._starts:
            with FakeTensorMode():
                fake = self._load(info)
            at = getattr(fake.untyped_storage(), "_checkpoint_offset", None)
            is_plain = at is not None and fake.is_contiguous() and tuple(fake.shape) == sizes
            start = at + fake.storage_offset() * fake.element_size() if is_plain else -1
            self._starts[index] = (start, sizes)
        start = self._starts[index][0]
        return None if start < 0 else start

    def _info(self, index: MetadataIndex) -> Any:
        info = self.metadata.storage_data.get(index)
        if info is None:
            raise SMPError(
                f"{self._caller}: {os.fspath(self.folder)!r} does not say where {index.fqn!r} lies"
                f"{'' if index.offset is None else f' from {list(index.offset)} on'}: a piece is missing"
            )
        if getattr(info, "transform_descriptors", None):
            raise SMPError(
                f"{self._caller}: {index.fqn!r} was written through {list(info.transform_descriptors)}, an "
                "extension of torch.distributed.checkpoint that is not read here: load it with torch's own "
                "load and save it again without"
            )
        return info

    def _window(self, info: Any) -> _Window:
        if info.relative_path not in self._files:
            self._files[info.relative_path] = open(self.folder / info.relative_path, "rb", buffering=0)  # noqa: SIM115
        return _Window(self, self._files[info.relative_path], info.offset, info.length)


class _Window(io.RawIOBase):
    """A range of a file as if it were one; counts what is read."""

    def __init__(self, reader: PieceReader, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._reader, self._file, self._offset, self._length = reader, file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._at))]
        done = 0
        while done < len(view):
            self._file.seek(self._offset + self._at)
            count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                break
            done, self._at = done + count, self._at + count
        self._reader.bytes_read += done
        return done


def _read_box(
    window: _Window,
    start: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A box of a tensor whose elements lie one after another from ``start`` on."""
    element = dtype.itemsize
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Up to this dimension the box is a part; behind it, whole: so its elements lie in runs.
    last = max(dim for dim in range(len(shape)) if sizes[dim] != shape[dim])
    run = sizes[last] * strides[last]
    if run * element < _RUN_BYTES and last > 0:
        wide = (*sizes[:1], *shape[1:])
        begin = (*offsets[:1], *(0,) * (len(shape) - 1))
        rows = _read(window, start + begin[0] * strides[0] * element, math.prod(wide), dtype).view(wide)
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        return rows
    runs = []
    for place in itertools.product(
        *(range(o, o + s) for o, s in zip(offsets[:last], sizes[:last], strict=True))
    ):
        first = (
            sum(i * stride for i, stride in zip(place, strides, strict=False)) + offsets[last] * strides[last]
        )
        runs.append(_read(window, start + first * element, run, dtype))
    return torch.cat(runs).view(sizes)


def _read(window: _Window, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(count, dtype=dtype, device=CPU)
    window.seek(at)
    data = memoryview(tensor.view(torch.uint8).numpy())
    if window.readinto(data) != len(data):
        raise SMPError(f"a file ends before {count} elements of {dtype}: it was cut off")
    return tensor
