"""What is read of a file without asking, and what is said of the rest."""

from __future__ import annotations

import argparse
import collections
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_lite as smp
from tests.api_support import batch, build, in_memory, same, train, wrap

pytestmark = pytest.mark.filterwarnings(
    "ignore:Stage ", "ignore:resume_from_checkpoint.*without an optimizer"
)

PLAIN = {
    "numbers": [1, 2**70, 1.5, 1 + 2j, True, None],
    "texts": ("text", b"bytes", bytearray(b"more")),
    "sets": {frozenset({1, 2}), "x"},
    "range": range(3),
    "ordered": collections.OrderedDict(a={"deep": [torch.arange(3), torch.float16]}),
    "counted": collections.Counter("aab"),
    "random state": torch.get_rng_state(),
}


class Ours:
    """What a script may want to save."""

    def __init__(self, value: int) -> None:
        self.value = value


class Trap:
    """Runs code when it is unpickled in the ordinary way."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("trapped"),)


@pytest.fixture(autouse=True)
def _session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_memory()


def save_checkpoint(content: Any, *, partial: bool = True) -> None:
    model, _ = wrap(build(), torch.optim.AdamW)
    train(model, *batch())
    smp.save_checkpoint("c", "t", partial=partial, user_content=content)


def resume(**kwargs: Any) -> Any:
    smp.reset()
    in_memory()
    wrap(build(), torch.optim.AdamW)
    return smp.resume_from_checkpoint("c", **kwargs)


@pytest.mark.parametrize("partial", [True, False])
def test_plain_data_is_read_without_asking(partial: bool) -> None:
    smp.save(PLAIN, "a", partial=partial)
    assert same(smp.load("a", partial=partial), PLAIN)
    save_checkpoint(PLAIN, partial=partial)
    assert same(resume(partial=partial), PLAIN)


def test_code_runs_only_on_request() -> None:
    smp.save({"deep": [Trap()]}, "a", partial=False)
    with pytest.raises(smp.SMPError, match=r"'a' holds more than.*(PosixPath|getattr|touch)"):
        smp.load("a", partial=False)
    assert not Path("trapped").exists()
    smp.load("a", partial=False, weights_only=False)
    assert Path("trapped").exists()


def test_the_error_names_what_was_refused_and_the_way_out() -> None:
    smp.save([argparse.Namespace(x=1), Ours(2)], "a", partial=False)
    with pytest.raises(smp.SMPError) as caught:
        smp.load("a", partial=False, weights_only=None)
    text = str(caught.value)
    assert text.startswith(
        "smp.load: 'a' holds more than tensors and plain Python data: argparse.Namespace, "
    )
    assert f"{__name__}.Ours" in text
    assert "smp.load(..., weights_only=False)" in text
    assert "torch.serialization.add_safe_globals([...])" in text
    found = smp.load("a", partial=False, weights_only=False)
    assert (found[0].x, found[1].value) == (1, 2)


def test_what_torch_cannot_read_safely_even_if_allowed_is_named() -> None:
    smp.save(collections.deque([1]), "a", partial=False)
    with (
        torch.serialization.safe_globals([collections.deque]),
        pytest.raises(smp.SMPError, match=r"plain Python data: Can only append to lists.*deque"),
    ):
        smp.load("a", partial=False)


def test_classes_that_are_allowed_in_torchs_way_are_read() -> None:
    smp.save(Ours(3), "a", partial=False)
    with torch.serialization.safe_globals([Ours]):
        assert smp.load("a", partial=False).value == 3
    with pytest.raises(smp.SMPError, match="Ours"):
        smp.load("a", partial=False)


@pytest.mark.parametrize("partial", [True, False])
def test_user_content_of_other_classes_is_read_on_request(partial: bool) -> None:
    save_checkpoint(Ours(4), partial=partial)
    file = "user_content.pt" if partial else "user_content_t"
    with pytest.raises(smp.SMPError) as caught:
        resume(partial=partial)
    assert file in str(caught.value)
    assert "resume_from_checkpoint(..., weights_only=False)" in str(caught.value)
    assert resume(partial=partial, weights_only=False).value == 4


def test_refused_user_content_leaves_the_model_as_it_was() -> None:
    save_checkpoint(Ours(4))
    smp.reset()
    in_memory()
    model, _ = wrap(build(seed=8), torch.optim.AdamW)
    with pytest.raises(smp.SMPError, match="Ours"):
        smp.resume_from_checkpoint("c")
    train(model, *batch())  # would put in place what had been loaded
    assert same(model.state_dict()["first.0.weight"], build(seed=8).first[0].weight.detach())


class OwnPickle:
    """A `pickle_module`."""

    Pickler, Unpickler, load = pickle.Pickler, pickle.Unpickler, staticmethod(pickle.load)


def test_a_pickle_module_of_the_users_needs_to_be_asked_for() -> None:
    smp.save([1], "a", partial=False, pickle_module=OwnPickle)
    with pytest.raises(smp.SMPError, match=r"pickle_module=OwnPickle reads with code.*weights_only=False"):
        smp.load("a", partial=False, pickle_module=OwnPickle)
    assert smp.load("a", partial=False, pickle_module=OwnPickle, weights_only=False) == [1]
    assert smp.load("a", partial=False, pickle_module=pickle) == [1]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("data", ["", "text", "half", "pickle"])
def test_a_file_that_is_none_of_torch_save_is_named(data: str, weights_only: bool) -> None:
    torch.save(torch.zeros(1000), "whole")
    written = {
        "": b"",
        "text": b"hello world\n",
        "half": Path("whole").read_bytes()[:2000],
        "pickle": pickle.dumps({"a": 1}),
    }
    Path("a").write_bytes(written[data])
    with pytest.raises(smp.SMPError, match=r"smp.load: 'a' cannot be read: it is no file of torch.save"):
        smp.load("a", partial=False, weights_only=weights_only)


def test_errors_of_the_users_own_classes_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    smp.save(Ours(1), "a", partial=False)
    monkeypatch.delattr(f"{__name__}.Ours")
    with pytest.raises(AttributeError, match="Ours"):
        smp.load("a", partial=False, weights_only=False)


def test_a_missing_folder_or_a_folder_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("none/a")):
        smp.save(1, "none/a", partial=False)
    Path("folder").mkdir()
    with pytest.raises(IsADirectoryError):
        smp.load("folder", partial=False)
