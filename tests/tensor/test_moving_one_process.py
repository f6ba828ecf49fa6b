"""What a portable checkpoint says of what is missing, of another model, and which one is found."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import smp_lite as smp
from tests.api_support import Net, batch, build, in_memory, same, train, wrap

pytestmark = pytest.mark.filterwarnings("ignore:Stage ", "ignore:resume_from_checkpoint.*without an optim")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.fixture(autouse=True)
def _session() -> None:
    in_memory(2)


def again(net: nn.Module | None = None, optimizer: Any = adamw) -> tuple[Any, Any]:
    smp.reset()
    in_memory(2)
    return wrap(build(9) if net is None else net, optimizer)


def step(model: Any, optimizer: Any, index: int = 0) -> None:
    optimizer.zero_grad()
    train(model, *batch(index))
    optimizer.step()


def save(root: Path, tag: str = "t", **options: Any) -> tuple[Any, Any]:
    model, optimizer = wrap(build(), adamw)
    step(model, optimizer)
    smp.save_checkpoint(root, tag, portable=True, model=model, optimizer=optimizer, **options)
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("steps_before", [0, 1])
def test_everything_is_there_again_to_the_bit(tmp_path: Path, steps_before: int) -> None:
    content = {"numbers": [1, 2.5], "random": torch.get_rng_state()}
    saved = save(tmp_path, user_content=content)
    model, optimizer = again()
    for _ in range(steps_before):
        step(model, optimizer)
    assert same(smp.resume_from_checkpoint(tmp_path), content)
    if not steps_before:
        with pytest.raises(smp.SMPError, match="waits for the first step"):
            model.state_dict()
        with pytest.raises(smp.SMPError, match="waits for the first step"):
            optimizer.state_dict()
        with torch.no_grad():
            model.eval()
            train_nothing(model)
            model.train()
    assert same((model.state_dict(), optimizer.state_dict()), saved)


@smp.step
def train_nothing(model: Any, x: torch.Tensor | None = None) -> None:
    model(batch(0)[0])


def test_settings_of_groups_count_at_once(tmp_path: Path) -> None:
    save(tmp_path)
    _, optimizer = again(optimizer=lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.7))
    smp.resume_from_checkpoint(tmp_path)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.01, 0.01)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("no file", r"__0_0\.distcp' is missing"),
        ("half a file", r"__0_0\.distcp' has \d+ bytes instead of \d+: it was cut off"),
        ("no metadata", r"\.metadata' is missing, so this portable checkpoint is not whole"),
        ("no content", r"user_content\.pt' is missing: it is a part of save"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, damage: str, said: str, steps_before: int) -> None:
    save(tmp_path, user_content=[1])
    folder = tmp_path / "t_portable"
    data = folder / "__0_0.distcp"
    if damage == "half a file":
        data.write_bytes(data.read_bytes()[:-100])
    else:
        names = {"no file": data.name, "no metadata": ".metadata", "no content": "user_content.pt"}
        (folder / names[damage]).unlink()
    model, optimizer = again()
    for _ in range(steps_before):
        step(model, optimizer)
    before = model.state_dict()
    with pytest.raises(smp.SMPError, match=said):
        smp.resume_from_checkpoint(tmp_path, "t")
    assert same(model.state_dict(), before)


def change(folder: Path, edit: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda m: m.state_dict_metadata["model.first.0.weight"].chunks.clear(), "0 of the 32 elements of"),
        (
            lambda m: [
                m.storage_data.pop(k) for k in list(m.storage_data) if k.fqn == "model.first.0.weight"
            ],
            r"does not say where 'model\.first\.0\.weight' lies from \[0, 0\] on: a piece is missing",
        ),
        (lambda m: m.state_dict_metadata.pop("model.last.1.bias"), r"missing keys \['last\.1\.bias'\]"),
        (
            lambda m: m.state_dict_metadata.pop("optimizer.param_groups.0.params"),
            "does not say which parameters it has",
        ),
    ],
)
def test_a_missing_piece_is_named(tmp_path: Path, edit: Any, said: str) -> None:
    save(tmp_path)
    change(tmp_path / "t_portable", edit)
    model, optimizer = again()
    step(model, optimizer)
    before = model.state_dict(), optimizer.state_dict()
    with pytest.raises(smp.SMPError, match=said):
        smp.resume_from_checkpoint(tmp_path)
    assert same((model.state_dict(), optimizer.state_dict()), before)


def test_a_file_that_is_gone_by_the_first_step_stops_training(tmp_path: Path) -> None:
    saved = save(tmp_path)
    model, optimizer = again()
    smp.resume_from_checkpoint(tmp_path)
    data = tmp_path / "t_portable" / "__0_0.distcp"
    data.rename(tmp_path / "aside")
    with pytest.raises(FileNotFoundError):
        step(model, optimizer)
    for call in (lambda: step(model, optimizer), model.state_dict):
        with pytest.raises(
            smp.SMPError, match=r"could not be read by the first step|waits for the first step"
        ):
            call()
    (tmp_path / "aside").rename(data)
    smp.resume_from_checkpoint(tmp_path)
    assert same((model.state_dict(), optimizer.state_dict()), saved)
    step(model, optimizer)


def test_numbers_that_a_disk_has_lost_are_named(tmp_path: Path) -> None:
    model, _ = save(tmp_path)
    data = tmp_path / "t_portable" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    at = content.index(model["first.0.weight"].numpy().tobytes())
    content[at : at + 16] = bytes(16)
    data.write_bytes(content)
    resumed = again()
    smp.resume_from_checkpoint(tmp_path)
    with pytest.raises(smp.SMPError, match=r"__0_0\.distcp' is damaged from byte .* it does not hold"):
        step(*resumed)


def test_another_model_is_told_by_names_and_shapes(tmp_path: Path) -> None:
    save(tmp_path)
    again(Net(width=6))
    with pytest.raises(smp.SMPError, match=r"'first\.0\.weight' has shape \[8, 4\] there and \[6, 4\] here"):
        smp.resume_from_checkpoint(tmp_path)
    net = build(9)
    net.last.append(nn.Linear(1, 1))
    again(net)
    with pytest.raises(smp.SMPError, match=r"missing keys \['last\.2\.weight', 'last\.2\.bias'\]"):
        smp.resume_from_checkpoint(tmp_path)
    smp.resume_from_checkpoint(tmp_path, strict=False, load_optimizer=False)
    net = build(9)
    del net.last[1]
    again(net)
    with pytest.raises(smp.SMPError, match=r"unknown keys \['last\.1\.weight', 'last\.1\.bias'\]"):
        smp.resume_from_checkpoint(tmp_path)
    again(nn.Sequential(nn.Linear(4, 1)))
    with pytest.raises(smp.SMPError, match=r"holds none of this model's parameters: it has 'model\.first"):
        smp.resume_from_checkpoint(tmp_path)


def groups(*decays: float) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        both = list(parameters)
        found = [{"params": both[i :: len(decays)], "weight_decay": d} for i, d in enumerate(decays)]
        return torch.optim.AdamW(found, lr=0.01)

    return make


def test_groups_are_told_by_the_names_of_their_parameters(tmp_path: Path) -> None:
    model, optimizer = wrap(build(), groups(0.1, 0.2))
    step(model, optimizer)
    smp.save_checkpoint(tmp_path, "t", portable=True, model=model, optimizer=optimizer)
    names = optimizer.names_in_groups

    def other_order(parameters: Any) -> torch.optim.Optimizer:
        both = list(parameters)
        return torch.optim.AdamW([{"params": both[1::2][::-1]}, {"params": both[::2]}], weight_decay=0.7)

    step(model, optimizer, 1)
    wanted = model.state_dict()
    model, optimizer = again(optimizer=other_order)
    assert names[0] == optimizer.names_in_groups[1]
    smp.resume_from_checkpoint(tmp_path)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.1]
    step(model, optimizer, 1)
    assert same(model.state_dict(), wanted)
    again()
    with pytest.raises(smp.SMPError, match=r"group 0 .* has both .* saved with weight_decay=0\.1 and 0\.2"):
        smp.resume_from_checkpoint(tmp_path)
    again(optimizer=lambda p: adamw(list(p)[:-1]))
    with pytest.raises(smp.SMPError, match=r"holds 'optimizer\.|has optimizer settings of 'last\.1\.bias'"):
        smp.resume_from_checkpoint(tmp_path)
    smp.resume_from_checkpoint(tmp_path, load_optimizer=False)


def test_parameters_of_no_model_have_no_name(tmp_path: Path) -> None:
    model, optimizer = wrap(build(), lambda p: adamw([*p, nn.Parameter(torch.zeros(2))]))
    with pytest.raises(smp.SMPError, match="parameter 8 of the optimizer's group 0 is none of the model's"):
        smp.save_checkpoint(tmp_path, "t", portable=True, model=model, optimizer=optimizer)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("portable")]


def test_a_full_state_dict_is_needed_to_translate(tmp_path: Path) -> None:
    save(tmp_path)
    again()
    with pytest.raises(smp.SMPError, match="translate_function needs a whole state dict"):
        smp.resume_from_checkpoint(tmp_path, translate_function=dict)


def test_the_optimizer_must_be_there_or_be_left_out(tmp_path: Path) -> None:
    save(tmp_path)
    smp.reset()
    in_memory(2)
    model = smp.DistributedModel(build(9))
    smp.resume_from_checkpoint(tmp_path)
    with pytest.raises(smp.SMPError, match="before there was an optimizer"):
        smp.DistributedOptimizer(adamw(model.parameters()))


def test_extra_state_and_tensors_as_settings(tmp_path: Path) -> None:
    class WithExtra(Net):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    def adam(parameters: Any) -> torch.optim.Optimizer:
        more = {"schedule": {"warm": [torch.tensor(1), 2]}}
        return torch.optim.Adam([{"params": list(parameters), **more}], lr=torch.tensor(0.01))

    for extra in ({"a": {"b": torch.arange(3)}, "c": 2}, {1: "one"}, 5, {}):
        torch.manual_seed(7)
        net = WithExtra()
        net.extra = extra
        model, optimizer = again(net, adam)
        step(model, optimizer)
        smp.save_checkpoint(tmp_path, "t", portable=True, model=model, optimizer=optimizer)
        other = WithExtra()
        model, optimizer = again(other, lambda p: torch.optim.Adam(p, lr=torch.tensor(0.5)))
        step(model, optimizer)
        smp.resume_from_checkpoint(tmp_path)
        assert same(other.extra, extra)
        assert same(optimizer.param_groups[0]["lr"], torch.tensor(0.01))
        assert same(optimizer.param_groups[0]["schedule"], {"warm": [torch.tensor(1), 2]})


def test_the_latest_is_found_whatever_kind_it_is(tmp_path: Path) -> None:
    model, optimizer = wrap(build(), adamw)
    step(model, optimizer)

    def save_as(content: str, tag: str = "t", **kind: bool) -> None:
        smp.save_checkpoint(tmp_path, tag, model=model, optimizer=optimizer, user_content=content, **kind)

    def found(tag: str | None = None, **kind: bool) -> Any:
        return smp.resume_from_checkpoint(tmp_path, tag, **kind)

    save_as("partial 1")
    save_as("portable 2", portable=True)
    assert [found(), found("t"), found(partial=False), found("t", partial=False)] == ["portable 2"] * 4
    save_as("partial 3")
    assert [found(), found("t"), found("t", partial=False)] == ["partial 3"] * 2 + ["portable 2"]
    save_as("full 4", partial=False)
    assert [found(partial=False), found("t", partial=False), found("t")] == ["full 4"] * 2 + ["partial 3"]
    save_as("portable 5", "u", portable=True)
    (tmp_path / "newest").unlink()
    assert [found(), found(partial=False), found("t")] == ["portable 5"] * 2 + ["partial 3"]
    save_as("portable 6", "v", portable=True)
    smp.save_checkpoint(tmp_path, "w", portable=True, model=model, num_kept_partial_checkpoints=2)
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("_portable"))
    assert kept == ["v_portable", "w_portable"]
    (tmp_path / "x_portable").touch()
    with pytest.raises(smp.SMPError, match=re.escape("x_portable' is a file: choose another tag")):
        save_as("7", "x", portable=True)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        found("nowhere")


def test_folders_of_plain_pytorch_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    net = build(3)
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "plain", no_dist=True)
    for folder, tag in ((tmp_path / "plain", None), (tmp_path, "plain")):
        model, optimizer = again()
        step(model, optimizer)
        smp.resume_from_checkpoint(folder, tag)
        assert same(model.state_dict(), net.state_dict())
    shutil.copytree(tmp_path / "plain", tmp_path / "more")
    change(tmp_path / "more", lambda m: m.storage_data.update())
    assert smp.resume_from_checkpoint(tmp_path / "more", partial=False, load_optimizer=False) is None


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64, bias=False)
            self.last = nn.Linear(64, 64, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    smp.reset()
    in_memory(1)
    model = smp.DistributedModel(Tied())
    smp.save_checkpoint(tmp_path, "t", portable=True, model=model)
    size = (tmp_path / "t_portable" / "__0_0.distcp").stat().st_size
    assert 4 * 64 * 64 < size < 1.5 * 4 * 64 * 64
    state = {"model": Tied().state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "t_portable", no_dist=True)
    weight = model.state_dict()["first.weight"]
    assert torch.equal(state["model"]["last.weight"], weight) and torch.equal(
        state["model"]["first.weight"], weight
    )


def test_settings_without_a_portable_form_are_refused(tmp_path: Path) -> None:
    model, optimizer = wrap(build(), lambda p: adamw([{"params": list(p), "bits": {8: "yes"}}]))
    with pytest.raises(smp.SMPError, match=r"param_groups\[0\]\['bits'\] of the optimizer is a dict"):
        smp.save_checkpoint(tmp_path, "t", portable=True, model=model, optimizer=optimizer)
