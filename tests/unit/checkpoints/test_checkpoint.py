"""`smp.save`, `smp.load`, `smp.save_checkpoint` and `smp.resume_from_checkpoint` in one process.

On real ranks, where a partial checkpoint has several parts: `tests/launch/api/test_api_checkpoint.py`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_lite as smp
from tests.api_support import Net, batch, build, in_memory, same, train, wrap

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")
MANUAL = {"auto_partition": False, "default_partition": 0}
ADAM = partial(torch.optim.AdamW, lr=0.01)


def start(seed: int = 7, partitions: int = 2, **parameters: Any) -> tuple[Any, Any]:
    """A new session with a new model and optimizer."""
    smp.reset()
    in_memory(partitions, **parameters)
    return wrap(build(seed), ADAM)


def run(model: Any, optimizer: Any, indices: range) -> list[torch.Tensor]:
    losses = []
    for index in indices:
        optimizer.zero_grad()
        losses.append(train(model, *batch(index)).stack())
        optimizer.step()
    return losses


def names(directory: Path) -> list[str]:
    return sorted(os.fspath(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


@pytest.mark.parametrize("is_partial", [True, False])
def test_save_and_load(tmp_path: Path, is_partial: bool) -> None:
    in_memory()
    value = {"tensor": torch.arange(3), "text": "x"}
    file = tmp_path / "value.pt"
    for path in (file, os.fspath(file)):
        smp.save(value, path, partial=is_partial)
        assert same(smp.load(path, partial=is_partial), value)
    assert names(tmp_path) == ["value.pt_0" if is_partial else "value.pt"]


def test_a_full_save_is_a_plain_torch_file_both_ways(tmp_path: Path) -> None:
    model, optimizer = start()
    run(model, optimizer, range(2))
    smp.save(model.state_dict(), tmp_path / "net.pt", partial=False)
    plain = Net()
    plain.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    assert same(plain.state_dict(), model.state_dict())
    torch.save(build(seed=8).state_dict(), tmp_path / "plain.pt")
    model.load_state_dict(smp.load(tmp_path / "plain.pt", partial=False))
    assert same(model.state_dict(), build(seed=8).state_dict())


def test_load_names_the_path_and_the_likely_mistake(tmp_path: Path) -> None:
    in_memory()
    smp.save(1, tmp_path / "a", partial=False)
    with pytest.raises(FileNotFoundError, match=r"a_0' does not exist \(a full one is there"):
        smp.load(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"b_0' does not exist \(was it saved\?\)"):
        smp.load(tmp_path / "b")


def test_save_refuses_file_objects(tmp_path: Path) -> None:
    in_memory()
    with (tmp_path / "a").open("wb") as file, pytest.raises(TypeError, match="must be a path"):
        smp.save(1, file)


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    in_memory()
    smp.save("old", tmp_path / "a", partial=False)
    with pytest.raises(AttributeError, match="local object"):
        smp.save(lambda: None, tmp_path / "a", partial=False)
    assert names(tmp_path) == ["a"]
    assert smp.load(tmp_path / "a", partial=False) == "old"


@pytest.mark.parametrize("steps_before_resume", [0, 1], ids=["before partition", "after"])
def test_training_goes_on_from_a_partial_checkpoint_to_the_bit(
    tmp_path: Path, steps_before_resume: int
) -> None:
    model, optimizer = start()
    run(model, optimizer, range(3))
    content = {"epoch": 3, "rng": torch.arange(2)}
    smp.save_checkpoint(tmp_path, "three", model=model, optimizer=optimizer, user_content=content)
    losses = run(model, optimizer, range(3, 6))
    wanted = model.state_dict(), optimizer.state_dict()
    model, optimizer = start(seed=8)
    run(model, optimizer, range(steps_before_resume))
    assert same(smp.resume_from_checkpoint(tmp_path, tag="three"), content)
    assert same(run(model, optimizer, range(3, 6)), losses)
    assert same((model.state_dict(), optimizer.state_dict()), wanted)


def test_the_files_of_a_partial_checkpoint(tmp_path: Path) -> None:
    model, optimizer = start()
    run(model, optimizer, range(1))
    smp.save_checkpoint(tmp_path, "t", model=model, optimizer=optimizer, user_content=1)
    files = ("model_0.pt", "optimizer_0.pt", "partition.json", "user_content.pt")
    assert names(tmp_path) == ["newest", *[f"t_partial/{file}" for file in files]]
    assert (tmp_path / "newest").read_text() == "t_partial"
    state = torch.load(tmp_path / "t_partial" / "model_0.pt", weights_only=True)
    assert state["_smp_is_partial"] is True


def test_the_files_of_a_full_checkpoint(tmp_path: Path) -> None:
    model, optimizer = start()
    run(model, optimizer, range(1))
    smp.save_checkpoint(tmp_path, "t", partial=False, model=model, optimizer=optimizer, user_content=[1])
    assert names(tmp_path) == ["newest", "optimizer_t", "t", "user_content_t"]
    assert (tmp_path / "newest").read_text() == "t"
    # What a save of the same tag does not hold is gone.
    smp.save_checkpoint(tmp_path, "t", partial=False, model=model)
    assert names(tmp_path) == ["newest", "t"]


def test_a_plain_models_file_resumes_as_a_full_checkpoint(tmp_path: Path) -> None:
    plain = build(seed=8)
    torch.save({f"net.{key}": value for key, value in plain.state_dict().items()}, tmp_path / "t")
    model, _ = start()
    content = smp.resume_from_checkpoint(
        tmp_path,
        tag="t",
        partial=False,
        translate_function=lambda state: {key[4:]: value for key, value in state.items()},
    )
    assert content is None
    assert same(model.state_dict(), plain.state_dict())


def test_the_newest_checkpoint_of_the_kind_is_resumed_without_a_tag(tmp_path: Path) -> None:
    model, optimizer = start()
    run(model, optimizer, range(1))
    for tag, is_partial in (("a", True), ("b", True), ("c", False)):
        smp.save_checkpoint(tmp_path, tag, partial=is_partial, model=model, user_content=tag)
        os.utime(tmp_path / "a_partial", (1, 1))
    assert smp.resume_from_checkpoint(tmp_path) == "b"
    assert smp.resume_from_checkpoint(tmp_path, partial=False) == "c"
    smp.save_checkpoint(tmp_path, "d", model=model, user_content="d")
    assert smp.resume_from_checkpoint(tmp_path) == "d"


def test_older_partial_checkpoints_are_removed(tmp_path: Path) -> None:
    model, optimizer = start()
    run(model, optimizer, range(1))
    smp.save_checkpoint(tmp_path, "full", partial=False, model=model)
    for i, tag in enumerate("abcd"):
        smp.save_checkpoint(tmp_path, tag, model=model, num_kept_partial_checkpoints=2)
        os.utime(tmp_path / f"{tag}_partial", (i + 1, i + 1))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["c_partial", "d_partial"]
    assert (tmp_path / "full").exists()
    smp.save_checkpoint(tmp_path, "c", model=model, num_kept_partial_checkpoints=1)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["c_partial"]


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_a_wrong_number_to_keep_is_an_error_before_anything_is_written(tmp_path: Path, keep: Any) -> None:
    model, optimizer = start()
    run(model, optimizer, range(1))
    with pytest.raises(ValueError, match="num_kept_partial_checkpoints must be a positive integer"):
        smp.save_checkpoint(tmp_path, "t", model=model, num_kept_partial_checkpoints=keep)
    assert names(tmp_path) == []


def test_a_partial_checkpoint_belongs_to_its_partition(tmp_path: Path) -> None:
    model, optimizer = start(**MANUAL)
    run(model, optimizer, range(1))
    smp.save_checkpoint(tmp_path, "t", model=model, optimizer=optimizer)
    stages = dict(model.partition.stage_of)
    # Before the first step the stored decision is taken over, whatever would have been decided.
    smp.reset()
    in_memory(**MANUAL)
    model = smp.DistributedModel(build())
    smp.resume_from_checkpoint(tmp_path)
    train(model, *batch())
    assert dict(model.partition.stage_of) == stages
    # After it, another decision is an error.
    smp.reset()
    in_memory(**MANUAL)
    model = smp.DistributedModel(build())
    train(model, *batch())
    with pytest.raises(smp.SMPError, match="was saved with another partition than this model has"):
        smp.resume_from_checkpoint(tmp_path)
    smp.reset()
    in_memory(3)
    smp.DistributedModel(build())
    with pytest.raises(smp.SMPError, match="holds 2 partitions, but partitions=3"):
        smp.resume_from_checkpoint(tmp_path)


def test_the_optimizer_stays_as_it_is_on_request(tmp_path: Path) -> None:
    model, optimizer = start()
    run(model, optimizer, range(1))
    smp.save_checkpoint(tmp_path, "t", model=model, optimizer=optimizer)
    model, optimizer = start()
    smp.resume_from_checkpoint(tmp_path, load_optimizer=False)
    train(model, *batch())
    assert optimizer.state_dict()["state"] == {}


def test_a_checkpoint_of_user_content_alone(tmp_path: Path) -> None:
    in_memory()
    smp.save_checkpoint(tmp_path, "t", partial=False, user_content={"step": 5})
    assert names(tmp_path) == ["newest", "user_content_t"]


def test_what_cannot_be_saved_or_resumed_says_why(tmp_path: Path) -> None:
    in_memory()
    with pytest.raises(smp.SMPError, match="wrap the model"):
        smp.resume_from_checkpoint(tmp_path)
    model = smp.DistributedModel(build())
    with pytest.raises(smp.SMPError, match="not partitioned yet, run a step first"):
        smp.save_checkpoint(tmp_path, "t", model=model)
    for is_partial, kind in ((True, "partial"), (False, "full")):
        with pytest.raises(FileNotFoundError, match=f"no {kind} checkpoint in"):
            smp.resume_from_checkpoint(tmp_path, partial=is_partial)
    with pytest.raises(FileNotFoundError, match="missing_partial' does not exist"):
        smp.resume_from_checkpoint(tmp_path, tag="missing")
    with pytest.raises(FileNotFoundError, match="missing"):
        smp.resume_from_checkpoint(tmp_path, tag="missing", partial=False)


def test_resuming_is_strict_unless_told_otherwise(tmp_path: Path) -> None:
    state = build(seed=8).state_dict()
    torch.save({key: state[key] for key in list(state)[:2]}, tmp_path / "t")
    model, _ = start()
    with pytest.raises(smp.SMPError, match="missing keys"):
        smp.resume_from_checkpoint(tmp_path, tag="t", partial=False)
    smp.resume_from_checkpoint(tmp_path, tag="t", partial=False, strict=False)
    assert same(model.state_dict()["first.0.weight"], state["first.0.weight"])


@pytest.mark.parametrize("is_partial", [True, False])
def test_everything_is_on_the_disk_before_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_partial: bool
) -> None:
    model, optimizer = start()
    run(model, optimizer, range(1))
    log: list[tuple[str, set[Path]]] = []
    sync, rename = os.fsync, os.rename

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        log.append(("sync", {Path(os.readlink(f"/proc/self/fd/{descriptor}"))}))

    def noted_rename(source: Path, target: Path) -> None:
        log.append(("rename", {Path(source), *Path(source).iterdir()}))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    smp.save_checkpoint(tmp_path, "t", partial=is_partial, model=model, optimizer=optimizer, user_content=1)
    switch = next(i for i, (what, _) in enumerate(log) if what == "rename")
    written = log[switch][1]
    assert len(written) == 5  # four files and their folder
    assert written <= set.union(*(paths for _, paths in log[:switch]))
    assert log[switch + 1] == ("sync", {tmp_path})
    assert ("sync", {tmp_path}) in log[switch + 2 :]  # its name, and that it is the newest
