"""What the tests of loading run in two ranks: modules with code of their own, other models, other files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp
from tests.api_support import place, same
from tests.launch.api.api_cases import error_of

WIDTH = 4


class Turned(nn.Module):
    """Has changed what it saves, twice: until version 3 the weight was transposed."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 3:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Renamed(nn.Module):
    """Reads files in which its parameter had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_load_state_dict_pre_hook(self._rename)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}matrix" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}matrix")


class Kept(nn.Module):
    """Keeps an entry in an attribute, and saves its parameter in another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.power = 1

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) ** self.power

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}power"] = torch.tensor(self.power)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.power = int(state.pop(f"{prefix}power"))
        super()._load_from_state_dict(state, prefix, *rest)


class Net(nn.Module):
    """Each kind of module on either stage."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (Turned, Renamed, Kept)
        self.first = nn.Sequential(*(kind() for kind in kinds), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Sequential(*(kind() for kind in kinds), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class WithoutStatistics(Net):
    """Lacks buffers that were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.last[3] = nn.BatchNorm1d(WIDTH, track_running_stats=False)


class Wider(Net):
    """Has another shape on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.last[3] = nn.Linear(WIDTH, WIDTH)


def build(kind: type[nn.Module] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def begin(kind: type[nn.Module] = Net, seed: int = 0) -> tuple[Any, Any]:
    """A new session."""
    smp.reset()
    smp.init()
    net = build(kind, seed)
    place(lambda name: int(name.startswith("last")), net)
    model = smp.DistributedModel(net)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


@smp.step
def _train(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def train(model: Any, *optimizers: Any) -> Tensor:
    """One step; its losses."""
    for each in optimizers:
        each.zero_grad()
    losses = _train(model, torch.arange(8.0 * WIDTH).view(8, WIDTH).cos()).stack()
    for each in optimizers:
        each.step()
    return losses


def save(folder: str, form: str, model: Any, optimizer: Any) -> None:
    """Under the tag "t"."""
    smp.save_checkpoint(
        folder, "t", partial=form == "partial", portable=form == "portable", model=model, optimizer=optimizer
    )


def own_code(folder: str, form: str, steps_before: int) -> bool:
    """Whether what was saved is what was loaded."""
    model, optimizer = begin()
    model.module.first[2].power = model.module.last[2].power = 2
    train(model, optimizer)
    save(folder, form, model, optimizer)
    wanted = train(model, optimizer)
    model, optimizer = begin(seed=1)
    for _ in range(steps_before):
        train(model, optimizer)
    smp.resume_from_checkpoint(folder, partial=form == "partial")
    return same(train(model, optimizer), wanted)


def plain_files(folder: str) -> dict[str, bool]:
    """A plain model reads what the ranks have saved, and they what it has saved and what is older."""
    model, optimizer = begin()
    train(model, optimizer)
    save(folder, "full", model, optimizer)
    plain = build(seed=1)
    plain.load_state_dict(torch.load(f"{folder}/t", weights_only=True))
    found = {"read by plain": same(dict(plain.state_dict()), model.state_dict())}
    old = build(seed=2).state_dict()
    old["first.1.matrix"] = old.pop("first.1.weight")
    old["last.1.matrix"] = old.pop("last.1.weight")
    old._metadata["first.0"]["version"] = 1
    old._metadata["last.0"]["version"] = 2
    plain.load_state_dict(old)
    keys = model.load_state_dict(old)
    found["read from plain"] = same(dict(plain.state_dict()), model.state_dict())
    found["keys"] = not keys.missing_keys and not keys.unexpected_keys
    return found


def other_models(folder: str) -> dict[str, Any]:
    """What is said of entries that a model lacks, and of another shape; and what the next step says."""
    model, optimizer = begin()
    train(model, optimizer)
    save(folder, "partial", model, optimizer)
    wanted = train(model, optimizer)
    said: dict[str, Any] = {}
    model, optimizer = begin(WithoutStatistics)
    train(model)
    said["after a step"] = error_of(lambda: smp.resume_from_checkpoint(folder, load_optimizer=False))
    smp.resume_from_checkpoint(folder, load_optimizer=False, strict=False)
    for key, kind in (("lacking", WithoutStatistics), ("shape", Wider)):
        model, optimizer = begin(kind)
        smp.resume_from_checkpoint(folder, load_optimizer=False)
        said[key] = [error_of(lambda: train(model)) for _ in range(2)]  # noqa: B023
    model, optimizer = begin(WithoutStatistics)
    smp.resume_from_checkpoint(folder, load_optimizer=False)
    said["before"] = error_of(lambda: train(model))
    smp.resume_from_checkpoint(folder, load_optimizer=False, strict=False)
    said["then"] = same(train(model, optimizer), wanted)
    return said


def added_group(folder: str, form: str) -> bool:
    """A group that the script adds after resuming has no state yet; the others have theirs."""

    def again(seed: int) -> tuple[Any, Any, list[Any]]:
        model, _ = begin(seed=seed)
        head = list(model.module.last[3].parameters())
        others = [p for p in model.parameters() if all(p is not each for each in head)]
        smp.state.optimizers.clear()
        return model, smp.DistributedOptimizer(torch.optim.AdamW(others, lr=0.1)), head

    model, optimizer, _ = again(0)
    train(model, optimizer)
    save(folder, form, model, optimizer)
    saved = optimizer.state_dict()["state"]
    model, optimizer, head = again(1)
    smp.resume_from_checkpoint(folder, partial=form == "partial")
    optimizer.add_param_group({"params": head, "lr": 0.5})
    with torch.no_grad():
        _evaluate(model, torch.ones(8, WIDTH))
    found = optimizer.state_dict()
    is_loaded = same(found["state"], saved) and [g["lr"] for g in found["param_groups"]] == [0.1, 0.5]
    train(model, optimizer)
    return is_loaded


@smp.step
def _evaluate(model: Any, x: Tensor) -> Tensor:
    return model(x)


def strange_parameter(folder: str) -> bool:
    """An optimizer over a parameter that is none of the model's resumes from a full checkpoint."""

    def again(seed: int) -> tuple[Any, Any]:
        model, _ = begin(seed=seed)
        smp.state.optimizers.clear()
        strange = nn.Parameter(torch.full((3,), float(seed)))
        strange.grad = torch.ones(3)
        groups = [{"params": list(model.parameters())}, {"params": [strange]}]
        return model, smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=0.1))

    model, optimizer = again(0)
    train(model)
    optimizer.step()
    save(folder, "full", model, optimizer)
    saved = optimizer.state_dict()
    model, optimizer = again(1)
    smp.resume_from_checkpoint(folder, partial=False)
    train(model)
    return same(optimizer.state_dict(), saved) and len(saved["state"]) == len(list(model.parameters())) + 1


def files_of_hosts(folder: str) -> dict[str, str]:
    """Files of other programs, in a folder that each rank has for itself: other ones, and copies."""
    model, _ = begin()
    train(model)
    own = Path(folder) / str(smp.rank())
    own.mkdir()
    for tag, seed in (("other", smp.rank()), ("copy", 3)):
        torch.save(build(seed=seed).state_dict(), own / tag)
    return {tag: error_of(lambda: _resume_plain(own, tag)) for tag in ("other", "copy")}  # noqa: B023


def _resume_plain(folder: Path, tag: str) -> None:
    smp.resume_from_checkpoint(folder, tag, partial=False, load_optimizer=False)


class Noticing(nn.Linear):
    """Notes which entries were missing, and its own as they were saved."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.missed: list[str] = []
        self.sum = 0.0
        self.register_load_state_dict_post_hook(self._note)

    @staticmethod
    def _note(module: Any, keys: Any) -> None:
        module.missed = sorted(keys.missing_keys)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        self.sum = float(state[f"{prefix}weight"].sum())


class Two(nn.Module):
    """One on either stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Noticing(), Noticing()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def _what_a_load_shows(model: Any, net: Any, state: dict[str, Tensor], without: str) -> list[Any]:
    """Of a state dict that lacks an entry, and of the whole one."""
    less = {key: value for key, value in state.items() if key != without}
    lacking = model.load_state_dict(less, strict=False)
    found = [list(lacking.missing_keys), net.first.missed, net.last.missed]
    model.load_state_dict(state)
    return [*found, net.first.missed, net.last.missed, net.first.sum, net.last.sum]


def entries_of_all_stages(folder: str) -> list[str]:
    """What a load after the first step shows otherwise than one in one process; errors that it lacks."""
    del folder
    state = build(Two, seed=1).state_dict()
    wrong = []
    for without in ("first.bias", "last.bias"):
        model, optimizer = begin(Two)
        train(model, optimizer)
        plain = build(Two)
        found = _what_a_load_shows(model, model.module, state, without)
        if found != _what_a_load_shows(plain, plain, state, without):
            wrong.append(f"{without}: {found}")
        less = {key: value for key, value in state.items() if key != without}
        if f"missing keys ['{without}']" not in error_of(partial(model.load_state_dict, less)):
            wrong.append(f"{without} may be missing")
    for key in ("first.weight", "last.weight"):
        other = {**state, key: torch.zeros(3, 3)}
        if f"size mismatch for {key}" not in error_of(partial(model.load_state_dict, other)):
            wrong.append(f"{key} may have another shape")
    return wrong


def hooks_after_partition(folder: str) -> dict[str, Any]:
    """What stays of what was loaded before the first step where a hook after partition changes everything."""
    del folder
    state = build(seed=1).state_dict()
    older = {key.replace("1.weight", "1.matrix"): value for key, value in state.items()}

    def change(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for part in (model.module.first, model.module.last):
            part[2].power = 7

    found = {}
    for name, loaded in (("present names", state), ("older names", older)):
        model, _ = begin()
        model.register_post_partition_hook(change)
        with_versions = type(state)(loaded)
        with_versions._metadata = state._metadata  # type: ignore[attr-defined]
        model.load_state_dict(with_versions)
        train(model)
        now = model.state_dict()
        found[name] = all(
            torch.equal(now[key], value) for key, value in state.items() if key.endswith(("weight", "power"))
        )
    model, _ = begin(Two)
    model.register_post_partition_hook(lambda *_: None)
    train(model)
    found["nothing was loaded"] = model.module.first.sum == model.module.last.sum == 0.0
    model, _ = begin()
    train(model)
    part = model.local_state_dict()
    model, _ = begin(seed=1)
    model.load_state_dict(part, same_partition_load=True)

    def fail(*_: Any) -> None:
        raise ValueError("of the script")

    model.register_post_partition_hook(fail)
    found["fails"] = [error_of(lambda: train(model)) for _ in range(2)]
    return found
