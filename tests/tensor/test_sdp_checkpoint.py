"""Partial checkpoints of sharded parameters: files that a reader of SMP's rules understands, and resuming."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_lite.checkpoints import merge_sharded
from smp_lite.errors import SMPError
from smp_lite.storage.torch_files import write_torch
from tests.harness import run_distributed
from tests.tensor.sdp_cases import config

CASES = "tests.tensor.sdp_cases"


def train(ranks: int, parameters: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
    return run_distributed(f"{CASES}:train", ranks, kwargs={"parameters": parameters, **kwargs})


# The files, by their rules alone --------------------------------------------------------------------------


def read_by_the_rules(folder: Path) -> dict[str, torch.Tensor]:
    """A plain state dict, as a public script of SMP's makes it: pure torch, nothing of this library."""
    folder = folder / (folder / "newest").read_text()
    model = torch.load(folder / "model_0.pt", weights_only=True)
    content = torch.load(folder / "user_content.pt", weights_only=True)
    files = sorted(folder.glob("optimizer_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
    ranks = len(files)
    flats = []
    for file in files:
        saved = torch.load(file, weights_only=True)
        assert saved["partition_count"] == ranks
        assert all(flat.dtype == torch.float32 for flat in saved["fp32_flat_groups"])
        flats.append(torch.cat(saved["fp32_flat_groups"]))
    shapes = {name: shape for group in content["param_shapes"] for name, shape in group.items()}
    lengths = {name: math.ceil(shape.numel() / ranks) for name, shape in shapes.items()}
    assert sum(lengths.values()) * ranks == ranks * len(flats[0])
    found = {name: model["module"][name] for name in content["buffer_names"]}
    start = 0
    for name, shape in shapes.items():
        pieces = [flat[start : start + lengths[name]] for flat in flats]
        found[name.removeprefix("module.")] = torch.cat(pieces)[: shape.numel()].view(shape)
        start += lengths[name]
    return found


FILES: dict[str, dict[str, Any]] = {
    "two ranks": {"model": "counting", "groups": "two"},
    "tied": {"model": "tied"},
    "outside of the optimizer": {"groups": "some"},
    "some whole": {"keys": {"sdp_param_persistence_threshold": 40}},
    "a scalar, and a frozen one": {"model": "shared"},
    "four ranks": {"ranks": 4, "degree": 4, "model": "counting"},
    "two copies": {"ranks": 4, "degree": 2},
    "bf16 parameters": {"half": True},
    "bf16": {"keys": {"bf16": True, "sdp_param_persistence_threshold": 40}},
}


@pytest.mark.slow(keep=1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FILES)
def test_files_read_by_their_rules_are_the_plain_state_dict(tmp_path: Path, name: str) -> None:
    options = dict(FILES[name])
    ranks, degree = options.pop("ranks", 2), options.pop("degree", 2)
    parameters = config(degree, **options.pop("keys", {}))
    user = {"epoch": 3, "text": "a", "numbers": [1.5, 2]}
    found = train(ranks, parameters, **options, num_steps=2, save=str(tmp_path), save_at=1, user_content=user)
    # Saved after the first of two steps: so train one only for what is compared.
    expected = train(ranks, parameters, **options, num_steps=1)[0]["state"]
    assert any(not torch.equal(expected[key], found[0]["state"][key]) for key in expected)
    read = read_by_the_rules(tmp_path)
    assert {key: value.to(expected[key].dtype) for key, value in read.items()}.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(read[key].to(value.dtype), value), key
    content = torch.load(tmp_path / "tag_partial" / "user_content.pt")
    assert {key: content[key] for key in user} == user
    out = tmp_path / "merged.pt"
    assert merge_sharded.main([str(tmp_path), str(out)]) == 0
    merged = torch.load(out)
    assert merged.keys() == read.keys()
    assert all(torch.equal(merged[key], read[key]) for key in read)


MERGED = {
    "pipeline": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "split layers": {"tensor_parallel_degree": 2, "prescaled_batch": True},
    "pipeline, two copies": {
        "pipeline_parallel_degree": 2,
        "microbatches": 2,
        "sdp_param_persistence_threshold": 40,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGED)
def test_pieces_of_several_stages_are_merged(tmp_path: Path, name: str) -> None:
    parameters = config(2, **MERGED[name])
    train(4, parameters, model="tied", num_steps=2, save=str(tmp_path), save_at=1)
    expected = train(4, parameters, model="tied", num_steps=1)[0]["state"]
    merged = merge_sharded.merge(tmp_path, "tag")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[key], expected[key]) for key in expected)
    names = sorted(path.name for path in (tmp_path / "tag_partial").glob("*.pt"))
    assert names == [
        *("model_0.pt", "model_1.pt", "optimizer_0_0.pt", "optimizer_0_1.pt"),
        *("optimizer_1_0.pt", "optimizer_1_1.pt", "user_content.pt"),
    ]


# Resuming ---------------------------------------------------------------------------------------------------

RESUMED: dict[str, dict[str, Any]] = {
    "two ranks": {"model": "counting", "groups": "two"},
    "in the midst": {"after_a_step": True, "model": "tied"},
    "outside of the optimizer": {"groups": "some"},
    "pipeline": {"ranks": 4, "keys": {"pipeline_parallel_degree": 2, "microbatches": 2}, "model": "tied"},
    "pipeline, in the midst": {
        "ranks": 4,
        "keys": {"pipeline_parallel_degree": 2, "microbatches": 2, "sdp_param_persistence_threshold": 40},
        "after_a_step": True,
    },
    "some whole": {"keys": {"sdp_param_persistence_threshold": 40}},
    "split layers": {
        "ranks": 4,
        "keys": {
            "tensor_parallel_degree": 2,
            "prescaled_batch": True,
            "sdp_param_persistence_threshold": 20,
        },
    },
    "two copies": {"ranks": 4},
    "bf16": {"keys": {"bf16": True, "sdp_param_persistence_threshold": 40}, "after_a_step": True},
    "fp16, pipeline": {"ranks": 4, "keys": {"fp16": True, "pipeline_parallel_degree": 2}},
    "full": {"partial": False},
    "full, pipeline": {"ranks": 4, "keys": {"pipeline_parallel_degree": 2}, "partial": False},
}


@pytest.mark.slow(keep=1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    options = dict(RESUMED[name])
    ranks, after_a_step = options.pop("ranks", 2), options.pop("after_a_step", False)
    parameters = config(2, **options.pop("keys", {}))
    user = {"epoch": 3}
    whole = train(ranks, parameters, **options, num_steps=4, save=str(tmp_path), user_content=user)
    again = train(ranks, parameters, **options, num_steps=4, resume=str(tmp_path), after_a_step=after_a_step)
    for mine, theirs in zip(again, whole, strict=True):
        assert mine["losses"] == theirs["losses"][2:]
        torch.testing.assert_close(mine["state"], theirs["state"], rtol=0.0, atol=0.0)
        torch.testing.assert_close(mine["optimizer"], theirs["optimizer"], rtol=0.0, atol=0.0)
        assert mine["user"] == user


@pytest.mark.ci
def test_weights_alone_are_loaded_where_that_is_asked(tmp_path: Path) -> None:
    parameters = config(2)
    whole = train(2, parameters, num_steps=3, save=str(tmp_path))
    for asked in ({"load_sharded_optimizer_state": False}, {"load_optimizer": False}):
        again = train(2, parameters, num_steps=3, resume=str(tmp_path), resume_with=asked)
        for mine, theirs in zip(again, whole, strict=True):
            assert mine["losses"] == theirs["losses"][2:]  # of the same weights
            assert {float(s["step"]) for s in mine["optimizer"]["state"].values()} == {1.0}  # moments are new
            assert mine["user"] is None


# What does not go together ----------------------------------------------------------------------------------


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another content with the same note."""
    content = torch.load(file, weights_only=False)
    change(content)
    note = _note(file)
    file.unlink()
    write_torch(file, content, note)


def _note(file: Path) -> str | None:
    from smp_lite.storage.torch_files import read_note

    return read_note(file)


def other_count(folder: Path) -> None:
    edit(folder / "optimizer_1.pt", lambda content: content.update(partition_count=3))


def fewer_elements(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["fp32_flat_groups"][0] = content["fp32_flat_groups"][0][:-1]

    edit(folder / "optimizer_1.pt", change)


def lost(folder: Path) -> None:
    (folder / "optimizer_1.pt").unlink()


def swapped(folder: Path) -> None:
    (folder / "optimizer_1.pt").rename(folder / "x")
    (folder / "optimizer_0.pt").rename(folder / "optimizer_1.pt")
    (folder / "x").rename(folder / "optimizer_0.pt")


def cut(folder: Path) -> None:
    file = folder / "optimizer_1.pt"
    os.truncate(file, file.stat().st_size // 2)


def listed(folder: Path) -> None:
    file = folder / "user_content.pt"
    note = _note(file)
    file.unlink()
    write_torch(file, [1], note)


BROKEN: dict[str, tuple[Callable[[Path], None], str, str | None]] = {
    "partition_count": (other_count, "says partition_count=3", "says partition_count=3, and there are 2"),
    "elements": (fewer_elements, "slices of group 0 have .* and its flat tensor", "by param_shapes a piece"),
    "lost": (lost, "optimizer_1.pt' is missing", "says partition_count=2, and there are 1"),
    "swapped": (swapped, *["holds the optimizer of mp rank 0, piece . of 2: it was renamed"] * 2),
    "cut": (cut, "'optimizer_1.pt' is of no save", "optimizer_1.pt' cannot be read: .* not a whole one"),
    "listed": (listed, "user_content.pt' holds a list", None),
}

DAMAGED: dict[str, tuple[str, Any, str]] = {
    "optimizer_1.pt": ("partition_count", "2", "'partition_count' is not what it was saved as"),
    "optimizer_0.pt": ("fp32_flat_groups", [1], "'fp32_flat_groups' is not what it was saved as"),
    "model_0.pt": ("module", None, "model_0.pt' has no 'module'"),
    "user_content.pt": ("buffer_names", ["other"], "model_0.pt' has no 'other'"),
}
"""By file: a key, what it says then (None: it is not there), and what the merger says."""


@pytest.mark.ci
def test_files_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    train(2, config(2), num_steps=2, save=str(tmp_path / "whole"), save_at=1)
    for name, (change, told, told_by_merging) in BROKEN.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        change(folder / "tag_partial")
        kwargs = {"parameters": config(2), "what": "resumes", "folder": str(folder)}
        for text in run_distributed(f"{CASES}:refused", 2, kwargs=kwargs):
            assert re.search(told, text), (name, text)
        if told_by_merging is not None:
            with pytest.raises(SMPError, match=told_by_merging):
                merge_sharded.merge(folder)


def test_the_merger_names_what_is_damaged(tmp_path: Path) -> None:
    train(2, config(2), num_steps=2, save=str(tmp_path / "whole"), save_at=1)
    for name, (key, value, told) in DAMAGED.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        file = folder / "tag_partial" / name
        note, content = _note(file), torch.load(file, weights_only=False)
        file.unlink()
        others = {other: each for other, each in content.items() if other != key}
        write_torch(file, others if value is None else others | {key: value}, note)
        with pytest.raises(SMPError, match=re.escape(told)):
            merge_sharded.merge(folder)


@pytest.mark.parametrize(
    ("ranks", "parameters", "told"),
    [
        (4, config(4), "lay in pieces over 2 ranks, and here they lie in pieces over 4"),
        (2, config(1), "lay in pieces over 2 ranks, and here they lie whole"),
        (
            2,
            config(2, sdp_param_persistence_threshold=9),
            "sdp_param_persistence_threshold=0, and here it is 9",
        ),
        (4, config(2, pipeline_parallel_degree=2), "holds 1 partitions, but partitions=2"),
    ],
    ids=["degree", "whole", "threshold", "partitions"],
)
def test_other_layouts_are_refused(tmp_path: Path, ranks: int, parameters: dict[str, Any], told: str) -> None:
    train(2, config(2), num_steps=2, save=str(tmp_path), save_at=1)
    kwargs = {"parameters": parameters, "what": "resumes", "folder": str(tmp_path)}
    for text in run_distributed(f"{CASES}:refused", ranks, kwargs=kwargs):
        assert told in text, text


@pytest.mark.parametrize(
    ("what", "told"),
    [("user content", "user_content is a list"), ("taken", "user_content has the key 'param_shapes'")],
)
def test_user_content_leaves_room_for_the_tables(tmp_path: Path, what: str, told: str) -> None:
    kwargs = {"parameters": config(2), "what": what, "folder": str(tmp_path)}
    for text in run_distributed(f"{CASES}:refused", 2, kwargs=kwargs):
        assert told in text
    assert not any(tmp_path.iterdir())


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        merge_sharded.main([str(tmp_path), str(tmp_path / "out.pt")])
    assert "no partial checkpoint" in capsys.readouterr().err
