"""What :mod:`.test_beginning` runs on ranks: models that ranks have built, loaded or changed apart from each
other before they are wrapped."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import smp_lite as smp
from tests.tensor.smp_api.cases import batches, loss_of

SEED, LOADED, STEPS = 0, 7, 3
_PLAN = {"up": "colwise", "down": "rowwise"}


class Net(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.up, self.down = linear(12, 20), linear(20, 12)
        self.norm = nn.BatchNorm1d(6).eval()  # statistics that are loaded, and stay

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.norm(x + self.down(torch.relu(self.up(x))))


def seeded(seed: int, linear: Callable[..., nn.Module] = nn.Linear) -> Net:
    torch.manual_seed(seed)
    return Net(linear)


@functools.cache
def trained(seed: int) -> dict[str, torch.Tensor]:
    """What a script loads, with statistics of the norm that are not those it begins with."""
    net = seeded(seed)
    nn.init.uniform_(net.norm.running_mean)
    return net.state_dict()


def chain(seed: int) -> nn.Sequential:
    """For which a plan can be derived."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12))


def by_hand(seed: int) -> Net:
    return seeded(seed, smp.nn.DistributedLinear)


def _marked(net: nn.Module) -> nn.Module:
    smp.set_tensor_parallelism(net)
    return net


def _planned(net: nn.Module) -> nn.Module:
    smp.parallelize(net, _PLAN)
    return net


def _loaded(net: nn.Module, *, everywhere: bool = False) -> nn.Module:
    if everywhere or smp.rank() == 0:
        net.load_state_dict(trained(LOADED))
    return net


def _loaded_by_rank(net: nn.Module) -> nn.Module:
    net.load_state_dict(trained(LOADED + smp.rank()))
    return net


def _after_other_numbers(linear: Callable[..., nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    if smp.rank() != 0:
        torch.rand(3)
    return Net(linear)


def _parts_loaded(rank: int | None) -> nn.Module:
    """The parts of another model, made by hand too."""
    parts = by_hand(LOADED).state_dict()
    net = by_hand(SEED)
    if rank in (None, smp.rank()):
        net.load_state_dict(parts)
    return net


def _scaled(rank: int | None) -> nn.Module:
    net = by_hand(SEED)
    if rank in (None, smp.rank()):
        with torch.no_grad():
            net.up.weight.mul_(0.5)
    return net


def _drawn() -> nn.Module:
    net = by_hand(SEED)
    torch.manual_seed(SEED)
    nn.init.normal_(net.up.weight)
    return net


def _whole_loaded(by_rank: bool) -> nn.Module:
    net = by_hand(SEED)
    for name in ("up", "down"):
        state = trained(LOADED + by_rank * smp.rank())
        layer = getattr(net, name)
        layer.load_whole({own: state[f"{name}.{own}"] for own in ("weight", "bias")})
    return net


def _delayed(make: Callable[[], nn.Module]) -> nn.Module:
    with smp.delay_param_initialization():
        return make()


WAYS: dict[str, Callable[[], nn.Module]] = {
    "rank 0 loads": lambda: _marked(_loaded(seeded(SEED))),
    "seeds by rank": lambda: _marked(seeded(SEED + smp.rank())),
    "other numbers drawn": lambda: _marked(_after_other_numbers(nn.Linear)),
    "nothing is split": lambda: _loaded(seeded(SEED)),
    "all load": lambda: _marked(_loaded(seeded(SEED + smp.rank()), everywhere=True)),
    "by hand": lambda: by_hand(SEED),
    "by hand, moved": lambda: copy.deepcopy(by_hand(SEED)).double().float(),
    "by hand, seeds by rank": lambda: by_hand(SEED + smp.rank()),
    "by hand, other numbers drawn": lambda: _after_other_numbers(smp.nn.DistributedLinear),
    "by hand, rank 0 loads parts": lambda: _parts_loaded(0),
    "by hand, all load parts": lambda: _parts_loaded(None),
    "by hand, rank 1 scales": lambda: _scaled(1),
    "by hand, all draw": _drawn,
    "by hand, all scale": lambda: _scaled(None),
    "by hand, others load": lambda: _whole_loaded(by_rank=True),
    "by hand, all load": lambda: _whole_loaded(by_rank=False),
    "a plan": lambda: _planned(seeded(SEED)),
    "a plan, all load": lambda: _planned(_loaded(seeded(SEED + smp.rank()), everywhere=True)),
    "a plan, rank 0 loads": lambda: _planned(_loaded(seeded(SEED))),
    "a plan, seeds by rank": lambda: _planned(seeded(SEED + smp.rank())),
    "delayed": lambda: _delayed(lambda: _marked(seeded(SEED))),
    "delayed, seeds by rank": lambda: _delayed(lambda: _marked(seeded(SEED + smp.rank()))),
    "delayed, rank 0 loads": lambda: _delayed(lambda: _marked(_loaded(seeded(SEED)))),
    "delayed, all load others": lambda: _delayed(lambda: _marked(_loaded_by_rank(seeded(SEED)))),
    "delayed, by hand": lambda: _delayed(lambda: by_hand(SEED)),
    "delayed, by hand, seeds by rank": lambda: _delayed(lambda: by_hand(SEED + smp.rank())),
}


def begin(parameters: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """For each way its error, or losses and whole state after some steps, and whether rank 0 was told."""
    found = {}
    for rank in range(2):
        trained(LOADED + rank)  # now, and not while something is delayed
    for name in names:
        smp.reset()
        smp.init(parameters)
        replica = 0 if parameters["prescaled_batch"] else smp.dp_rank()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found[name] = trained_by(smp.DistributedModel(WAYS[name]()), replica)
            except smp.SMPError as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
        found[name]["told"] = [str(each.message) for each in caught if "are taken" in str(each.message)]
    return found


def begin_on_meta(parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What is split has no data and nobody loads it; then a script does."""
    told: list[Any] = []
    for loads in (False, True):
        smp.reset()
        smp.init(parameters)
        with torch.device("meta"):
            net = _planned(Net())
        torch.manual_seed(SEED)  # from which the rest is drawn
        model = smp.DistributedModel(net)
        if loads:
            model.load_state_dict(trained(LOADED))
        try:
            told.append(trained_by(model))
        except smp.SMPError as error:
            told.append(str(error))
    return told[0], told[1]


def begin_with_system(configuration: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 alone has the model with other numbers, and a plan of another system splits it."""
    smp.init(configuration)
    return trained_by(smp.DistributedModel(chain(SEED + smp.rank())))


def trained_by(
    model: smp.DistributedModel, replica: int = 0, before: Callable[[], Any] | None = None
) -> dict[str, Any]:
    """Losses and whole state after some steps.

    Args:
        before: called when all is made.
    """
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), ids)
        model.backward(loss)
        return loss

    if before is not None:
        before()
    losses = []
    for ids in batches(STEPS, replica):
        optimizer.zero_grad()
        losses.append(step(ids).reduce_mean().item())
        optimizer.step()
    return {"losses": losses, "state": model.state_dict()}


def changed_after_wrapping(parameters: dict[str, Any], change: str, everywhere: bool = True) -> str:
    """A marked model whose parts rank 0 or all ranks change before the first step."""
    smp.init(parameters)
    model = smp.DistributedModel(_marked(seeded(SEED)))
    weight: Any = model.module.up.weight
    if everywhere or smp.rank() == 0:
        torch.manual_seed(SEED)
        try:
            with torch.no_grad():
                {"scale": lambda: weight.mul_(2.0), "draw": weight.normal_, "zero": weight.zero_}[change]()
        except smp.SMPError as error:
            return str(error)

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids).square().mean()
        model.backward(loss)
        return loss

    try:
        step(torch.arange(24).reshape(4, 6) % 11)
    except smp.SMPError as error:
        return str(error)
    return "ran"
