"""Boxes of parts, and reading them out of files of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import itertools
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import smp_lite as smp
from smp_lite.checkpoints.portable.pieces import Box, boxes_of, whole_box
from smp_lite.checkpoints.portable.reading import PieceReader, read_metadata
from smp_lite.comm.groups.axis import Axis
from smp_lite.nn.layout import ParameterLayout, part_of


@st.composite
def layouts(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], list[list[int]], dict[int, tuple[int, ...]], dict[int, int]]:
    """Shape, sizes of the axes that split each dimension, sections and padding."""
    shape, axes, sections, padded = [], [], {}, {}
    for dim in range(draw(st.integers(0, 3))):
        sizes = draw(st.lists(st.integers(1, 3), max_size=2))
        parts = math.prod(sizes)
        kind = draw(st.sampled_from(["plain", "sections", "padded"]))
        if kind == "sections":
            found = [parts * n for n in draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))]
            sections[dim] = tuple(found)
            shape.append(sum(found))
        elif kind == "padded":
            size = draw(st.integers(1, 7))
            padded[dim] = -(-size // parts) * parts
            shape.append(size)
        else:
            shape.append(parts * draw(st.integers(1, 3)))
        axes.append(sizes)
    return tuple(shape), axes, sections, padded


@settings(max_examples=150)
@given(layouts())
def test_boxes_of_all_ranks_are_the_whole_and_each_is_its_ranks_part(case: Any) -> None:
    shape, axes, sections, padded = case
    whole = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    seen = torch.zeros(shape)
    flat = [size for sizes in axes for size in sizes]
    for coordinate in itertools.product(*(range(size) for size in flat)):
        index = iter(coordinate)
        dims = tuple(
            tuple(Axis(f"d{dim}a{i}", range(size), next(index)) for i, size in enumerate(sizes))
            for dim, sizes in enumerate(axes)
        )
        layout = ParameterLayout(shape, dims, (), sections, padded)
        part = torch.zeros(layout.local_shape)
        for box in boxes_of(layout, shape):
            in_whole = whole
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                in_whole = in_whole.narrow(dim, start, size)
            box.within(part).copy_(in_whole)
            if box.sizes:
                place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                seen[place] += 1
            else:
                seen += 1
        assert torch.equal(part, part_of(whole, layout))
    assert torch.equal(seen, torch.ones(shape))  # each element on one rank


TENSORS = {
    "matrix": torch.randn(64, 48, generator=torch.Generator().manual_seed(1)),
    "rows": torch.randn(40, 4096, generator=torch.Generator().manual_seed(2)),
    "transposed": torch.arange(300.0).view(10, 30).t(),
    "half": torch.arange(60.0).view(3, 4, 5).to(torch.bfloat16),
    "flags": torch.arange(77) % 3 == 0,
    "number": torch.tensor(3.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
}


def reader(folder: Path) -> PieceReader:
    return PieceReader(folder, read_metadata(folder, "test"), "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pieces")
    dcp.save({**TENSORS, "other": {"a": [1, "b"]}}, checkpoint_id=path, no_dist=True)
    return path


@settings(max_examples=60)
@given(st.data())
def test_any_box_of_a_tensor_is_read(folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name, tensor in TENSORS.items() if tensor.numel()]))
    tensor = TENSORS[name]
    starts = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
    sizes = [
        data.draw(st.integers(1, size - start)) for size, start in zip(tensor.shape, starts, strict=True)
    ]
    place = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    box = Box(tuple(starts), (0,) * len(sizes), tuple(sizes))
    with reader(folder) as found:
        assert torch.equal(found.tensor(name, [box], sizes), tensor[place])
        assert torch.equal(found.tensor(name), tensor)


def test_an_empty_tensor_and_what_is_none_are_read(folder: Path) -> None:
    with reader(folder) as found:
        assert found.tensor("none").shape == (0, 4)
        assert found.tensor("number", whole_box(()), ()) == 3.5
        assert found.value("other.a") == [1, "b"]


def test_only_the_bytes_of_a_box_are_read(folder: Path) -> None:
    whole = TENSORS["rows"].numel() * 4
    around = 8192  # the archive's own records, once
    for box, share in (
        (Box((10, 0), (0, 0), (10, 4096)), 1 / 4),
        (Box((0, 1024), (0, 0), (40, 1024)), 1 / 4),  # a quarter of each row, each by itself
        (Box((4, 2048), (0, 0), (20, 2048)), 1 / 4),
    ):
        with reader(folder) as found:
            found.tensor("rows", [box], box.sizes)
            assert found.bytes_read <= share * whole + around


def test_a_piece_that_no_chunk_holds_is_an_error(folder: Path) -> None:
    metadata = read_metadata(folder, "test")
    metadata.state_dict_metadata["rows"].chunks.clear()
    with pytest.raises(smp.SMPError, match=r"0 of the 163840 elements of 'rows' that begin at \[0, 0\]"):
        PieceReader(folder, metadata, "test").tensor("rows")


class Trap:
    def __reduce__(self) -> Any:
        return os.system, ("touch trapped",)


def test_metadata_that_would_run_code_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(smp.SMPError, match=r"system\. That can run code.*weights_only=False"):
        read_metadata(tmp_path, "smp.x")
    assert not (tmp_path / "trapped").exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(smp.SMPError, match=r"holds no metadata of .*, but a list"):
        read_metadata(tmp_path, "smp.x")
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(smp.SMPError, match="no whole metadata file"):
        read_metadata(tmp_path, "smp.x")
