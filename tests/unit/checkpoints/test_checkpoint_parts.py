"""Parts of different saves are not mixed, and what is wrong with a checkpoint is said."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_lite as smp
from smp_lite.storage import identity as identity_module
from smp_lite.storage.finding import Reader, find_partial
from smp_lite.storage.torch_files import write_torch
from tests.api_support import batch, build, in_memory, train, wrap

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")


@pytest.fixture(autouse=True)
def _no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(partitions: int = 2) -> tuple[Any, Any]:
    smp.reset()
    in_memory(partitions)
    return wrap(build(), torch.optim.AdamW)


def save(*tags: str, **kwargs: Any) -> None:
    """Each tag after one more step."""
    model, optimizer = start()
    for tag in tags:
        optimizer.zero_grad()
        train(model, *batch())
        optimizer.step()
        saved = {"model": model, "optimizer": optimizer, "user_content": tag, **kwargs}
        smp.save_checkpoint(".", tag, **saved)


def refused(*said: str, **kwargs: Any) -> None:
    start()
    with pytest.raises(smp.SMPError) as caught:
        smp.resume_from_checkpoint(".", **kwargs)
    for text in said:
        assert text in str(caught.value), str(caught.value)


@pytest.mark.parametrize("file", ["model_0.pt", "optimizer_0.pt", "user_content.pt"])
def test_a_part_of_another_save_is_refused(file: str) -> None:
    save("a", "b")
    shutil.copy(f"a_partial/{file}", f"b_partial/{file}")
    refused("parts of different saves are not mixed", "b_partial", file, "'a' at step 1", "'b' at step 2")


@pytest.mark.parametrize("file", ["{}", "optimizer_{}", "user_content_{}"])
def test_a_file_of_another_full_save_is_refused(file: str) -> None:
    save("a", "b", partial=False)
    shutil.copy(file.format("a"), file.format("b"))
    refused("parts of different saves", file.format("b"), "'a' at step 1", "'b' at step 2", partial=False)


@pytest.mark.parametrize("partial", [True, False])
def test_a_part_that_another_program_wrote_is_refused(partial: bool) -> None:
    save("a", partial=partial)
    file = "a_partial/optimizer_0.pt" if partial else "optimizer_a"
    torch.save(torch.load(file), file)
    refused(Path(file).name, "is of no save of this library", partial=partial)
    start()
    assert smp.resume_from_checkpoint(".", partial=partial, load_optimizer=False) == "a"


@pytest.mark.parametrize("file", ["model_0.pt", "optimizer_0.pt", "user_content.pt", "partition.json"])
def test_a_missing_part_is_named(file: str) -> None:
    save("a")
    Path("a_partial", file).unlink()
    refused(f"a_partial/{file}' is missing", "'a' at step 1")


@pytest.mark.parametrize("file", ["optimizer_a", "user_content_a"])
def test_a_missing_file_of_a_full_checkpoint_is_named(file: str) -> None:
    save("a", partial=False)
    Path(file).unlink()
    refused(f"{file}' is missing", partial=False)


def test_parts_under_each_others_names_are_refused() -> None:
    save("a")
    Path("a_partial/model_0.pt").rename("a_partial/x")
    Path("a_partial/optimizer_0.pt").rename("a_partial/model_0.pt")
    Path("a_partial/x").rename("a_partial/optimizer_0.pt")
    refused("model_0.pt' holds the optimizer of mp rank 0", "renamed or copied")


def test_a_changed_partition_is_refused() -> None:
    save("a")
    file = Path("a_partial/partition.json")
    text = file.read_text()
    file.write_text(text.replace('"first.0": 0', '"first.0": 1'))
    assert file.read_text() != text
    refused("partition.json' holds another partition", "it was changed")
    file.write_text("{")
    refused("partition.json' cannot be read", "not JSON")


def test_a_copied_or_renamed_checkpoint_resumes() -> None:
    save("a")
    shutil.copytree("a_partial", "b_partial")
    shutil.rmtree("a_partial")
    start()
    assert smp.resume_from_checkpoint(".", tag="b") == "a"


def test_other_partitions_are_told_the_way_out() -> None:
    save("a")
    start(partitions=3)
    with pytest.raises(smp.SMPError, match=r"holds 2 partitions, but partitions=3.*partial=False"):
        smp.resume_from_checkpoint(".")


def test_what_is_no_checkpoint_is_said_to_be_none() -> None:
    Path("a_partial").mkdir()
    refused("holds no part that save_checkpoint has written", tag="a")
    torch.save(build().state_dict(), "a_partial/model_0.pt")
    refused("holds no part that save_checkpoint has written", "smp.load", tag="a")
    Path("b_partial").write_text("")
    refused("b_partial' is no folder", tag="b")
    Path("c").mkdir()
    refused("c' is no file", tag="c", partial=False)
    Path("d").write_text("text")
    refused("d' cannot be read", tag="d", partial=False)
    torch.save([1], "e")
    refused("e' holds no state dict, but a list", tag="e", partial=False)
    torch.save(build().state_dict(), "f")
    torch.save({}, "optimizer_f")
    refused("optimizer_f' holds no optimizer's state dict", tag="f", partial=False)


def test_user_content_alone_does_not_resume() -> None:
    in_memory()
    smp.save_checkpoint(".", "a", user_content=1)
    refused("a_partial' holds no model")


@pytest.mark.parametrize("partial", [True, False])
def test_a_save_in_the_way_of_something_else_is_refused(partial: bool) -> None:
    if partial:
        Path("a_partial").write_text("mine")
    else:
        Path("optimizer_a").mkdir()
    with pytest.raises(smp.SMPError, match=r"choose another tag, or remove it"):
        save("a", partial=partial)
    assert [path.name for path in Path().iterdir()] == ["a_partial" if partial else "optimizer_a"]


def test_files_of_others_beside_a_full_checkpoint_stay() -> None:
    torch.save("mine", "optimizer_a")
    save("a", partial=False, optimizer=None)
    assert torch.load("optimizer_a") == "mine"


@pytest.mark.parametrize("tag", ["", "a/b", ".a", 3, None])
def test_a_tag_must_be_a_file_name(tag: Any) -> None:
    in_memory()
    with pytest.raises((ValueError, TypeError), match="save_checkpoint: tag"):
        smp.save_checkpoint(".", tag, user_content=1)


@pytest.mark.parametrize("tag", ["newest", "optimizer_a", "user_content_a", "a_partial"])
def test_a_tag_must_not_be_the_name_of_another_file(tag: str) -> None:
    in_memory()
    with pytest.raises(ValueError, match="since other files are called so"):
        smp.save_checkpoint(".", tag, partial=False, user_content=1)
    smp.save_checkpoint(".", tag, user_content=1)
    assert Path(f"{tag}_partial").is_dir()


def test_only_what_is_of_this_library_can_be_saved() -> None:
    model, optimizer = start()
    train(model, *batch())
    with pytest.raises(TypeError, match=r"saves an smp.DistributedModel, got Net"):
        smp.save_checkpoint(".", "a", model=model.module)
    with pytest.raises(TypeError, match=r"saves an smp.DistributedOptimizer, got AdamW"):
        smp.save_checkpoint(".", "a", optimizer=optimizer.optimizer)
    smp.reset()
    in_memory()
    with pytest.raises(smp.SMPError, match="no model, no optimizer and no user content"):
        smp.save_checkpoint(".", "a")
    assert list(Path().iterdir()) == []


def test_what_cannot_be_written_is_named_and_leaves_the_older_save() -> None:
    save("a")
    model, _ = start()
    train(model, *batch())
    for partial, file in ((True, "a_partial/user_content.pt"), (False, "user_content_a")):
        with pytest.raises(smp.SMPError, match=rf"'{file}' could not be written.*local object"):
            smp.save_checkpoint(".", "a", partial=partial, user_content=lambda: None)
        assert sorted(path.name for path in Path().iterdir()) == ["a_partial", "newest"]
    start()
    assert smp.resume_from_checkpoint(".") == "a"


def test_a_checkpoint_of_a_later_version_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(identity_module, "_FORMAT", 2)
        save("a")
    refused("model_0.pt' cannot be told apart", "written by another version of smp_lite", tag="a")


def test_an_optimizer_that_comes_after_its_state_is_refused() -> None:
    save("a")
    smp.reset()
    in_memory()
    model = smp.DistributedModel(build())
    smp.resume_from_checkpoint(".")
    with pytest.raises(smp.SMPError, match=r"optimizer_0.pt', before there was an optimizer"):
        smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    smp.resume_from_checkpoint(".", load_optimizer=False)
    smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))


def test_an_optimizer_that_was_not_saved_starts_afresh_with_a_warning() -> None:
    save("a", optimizer=None)
    start()
    with pytest.warns(UserWarning, match="model_0.pt' was saved without an optimizer"):
        smp.resume_from_checkpoint(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smp.resume_from_checkpoint(".", load_optimizer=False)


def test_state_that_waits_for_the_first_step_is_not_given_out() -> None:
    save("a")
    model, _ = start()
    smp.resume_from_checkpoint(".")
    asked = (model.state_dict, model.local_state_dict, model.cpu)
    for ask in asked:
        with pytest.raises(smp.SMPError, match="waits for the first step"):
            ask()
    with pytest.raises(smp.SMPError, match="waits for the first step"):
        smp.save_checkpoint(".", "b", partial=False)
    train(model, *batch())
    for ask in asked:
        ask()


def test_checkpoints_are_aged_by_when_they_were_saved_not_by_the_file_system() -> None:
    save("a", "b")
    shutil.copytree("a_partial", "a2")
    shutil.rmtree("a_partial")
    Path("a2").rename("a_partial")  # as when they come back from S3: the oldest has the latest time
    Path("mine_partial").mkdir()
    Path("newest").unlink()
    start()
    assert smp.resume_from_checkpoint(".") == "b"
    save("c", num_kept_partial_checkpoints=2)
    assert sorted(path.name for path in Path().iterdir() if path.is_dir()) == [
        "b_partial",
        "c_partial",
        "mine_partial",
    ]


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("how", ["numbers", "directory"])
def test_a_damaged_file_is_named(partial: bool, how: str) -> None:
    """A disk that has lost a block gives zeros; torch reads them as numbers."""
    save("a", partial=partial)
    path = Path("a_partial/optimizer_0.pt" if partial else "optimizer_a")
    content = bytearray(path.read_bytes())
    values = torch.load(path, weights_only=True)["state"][0]["exp_avg"].numpy().tobytes()
    # Names in the archive's directory, at its end, are no text any more; or some numbers are lost.
    at = content.index(values[:16]) if how == "numbers" else content.rindex(b"/data.pkl")
    content[at : at + 8] = bytes(8) if how == "numbers" else b"\xe2" * 8
    path.write_bytes(content)
    refused(path.name, partial=partial)


def test_a_file_without_check_sums_is_read() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save("a")
    finally:
        torch.serialization.set_crc32_options(True)
    start()
    assert smp.resume_from_checkpoint(".") == "a"


@pytest.mark.parametrize("content", [b"a_part\xe2", b"a_par\0ial", b"../a"])
def test_a_damaged_name_of_the_newest_is_said(content: bytes) -> None:
    save("a")
    Path("newest").write_bytes(content)
    refused("'newest' names no checkpoint: it is damaged. Say which one with tag=...")
    start()
    assert smp.resume_from_checkpoint(".", tag="a") == "a"


def test_another_tensor_parallel_degree_is_told_from_one_process(tmp_path: Path) -> None:
    save("a")
    reader = Reader(mp_rank=0, mp_size=4, partitions=2)
    with pytest.raises(smp.SMPError, match=r"one side is smp\.init_in_memory"):
        find_partial(tmp_path, "a_partial", reader, with_optimizer=True)
    path = tmp_path / "a_partial" / "model_0.pt"
    identity = identity_module.read_identity(path)
    assert identity is not None
    content = torch.load(path, weights_only=True)
    for part in path.parent.glob("*.pt"):
        part.unlink()
    write_torch(path, content, replace(identity, mp_size=2, parts=("model",)).to_json())
    with pytest.raises(smp.SMPError, match="it was saved with another tensor_parallel_degree"):
        find_partial(tmp_path, "a_partial", reader, with_optimizer=True)
