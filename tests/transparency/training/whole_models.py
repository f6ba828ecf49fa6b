"""What scripts do with weights between steps, run in the ranks of an MPI job against plain torch there."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models.layers import WIDTH, Chain, regression_batch

NUM_STEPS = 3
DECAY = 0.9


class WithStatistics(Chain):
    """Batch norms, whose buffers only their own stage keeps up to date."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.BatchNorm1d(WIDTH)) for block in self.blocks)


def train(model: Any, step: Callable[..., Any], optimizer: Any, between: Callable[[], None]) -> None:
    batch = regression_batch(8)
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        step(model, *[tensor.roll(number, 0) for tensor in batch.values()])
        optimizer.step()
        between()


def plain_step(model: nn.Module, x: Tensor, target: Tensor) -> None:
    for part, wanted in zip(x.chunk(2), target.chunk(2)):
        (F.mse_loss(model(part), wanted) / 2).backward()


def both(between: Callable[[nn.Module, dict[str, Any]], None], before: Callable[..., None]) -> Any:
    """(what the library's run kept, what the plain run kept, the library's model)."""
    kept: list[dict[str, Any]] = []
    smp.init()
    for library in (True, False):
        torch.manual_seed(0)
        module = WithStatistics()
        own: dict[str, Any] = {}
        before(module, own)
        model: Any = smp.DistributedModel(module) if library else module
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if library:
            optimizer = smp.DistributedOptimizer(optimizer)
        step = smp.step(library_step) if library else plain_step
        train(model, step, optimizer, lambda model=model, own=own: between(model, own))
        own["model"] = model
        kept.append(own)
    return kept


def library_step(model: Any, x: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), target)
    model.backward(loss)
    return loss


def _same(ours: nn.Module, plain: nn.Module) -> list[str]:
    """Names of what differs in a whole model."""
    theirs = plain.state_dict()
    pairs = [(name, value.cpu(), theirs[name].cpu()) for name, value in ours.state_dict().items()]
    return [name for name, value, wanted in pairs if not torch.equal(value, wanted)]


def average_from_before() -> list[str]:
    """EMA of a copy made before training, by zip of parameters."""

    def before(module: nn.Module, own: dict[str, Any]) -> None:
        own["average"] = copy.deepcopy(module)

    def between(model: Any, own: dict[str, Any]) -> None:
        with torch.no_grad():
            for ours, theirs in zip(own["average"].parameters(), model.parameters()):
                ours.mul_(DECAY).add_(theirs, alpha=1 - DECAY)

    ours, plain = both(between, before)
    # Buffers of the average stay as they were, on both sides.
    with smp.gathered(ours["average"]) as whole:
        return _same(whole, plain["average"])


def average_from_the_first_step() -> list[str]:
    """EMA of a copy made after the first step, by state dicts."""

    def between(model: Any, own: dict[str, Any]) -> None:
        module = getattr(model, "module", model)
        if "average" not in own:
            own["average"] = copy.deepcopy(model)
            return
        for ours, theirs in zip(own["average"].state_dict().values(), module.state_dict().values()):
            if ours.dtype.is_floating_point:
                ours.lerp_(theirs, 1 - DECAY)

    ours, plain = both(between, lambda *_: None)
    with smp.gathered(ours["average"]) as whole:
        return [name for name in _same(whole, plain["average"]) if "num_batches" not in name]


def averaged_model() -> list[str]:
    """torch's AveragedModel, made at the first step, updated after each."""

    def between(model: Any, own: dict[str, Any]) -> None:
        if "average" not in own:
            own["average"] = torch.optim.swa_utils.AveragedModel(model)
        own["average"].update_parameters(model)

    ours, plain = both(between, lambda *_: None)
    with smp.gathered(ours["average"].module) as whole:
        return [
            name
            for name in _same(whole, plain["average"].module)
            if "running" not in name and "num" not in name
        ]


def shadow_dict() -> list[str]:
    """The shadow class of many repositories: registered before training, updated by name."""

    def before(module: nn.Module, own: dict[str, Any]) -> None:
        own["shadow"] = {name: p.data.clone() for name, p in module.named_parameters()}

    def between(model: Any, own: dict[str, Any]) -> None:
        for name, parameter in getattr(model, "module", model).named_parameters():
            own["shadow"][name] = ((1 - DECAY) * parameter.data + DECAY * own["shadow"][name]).clone()

    ours, plain = both(between, before)
    local = {name for name, _ in ours["model"].local_named_parameters()}
    return [name for name in local if not torch.equal(ours["shadow"][name], plain["shadow"][name])]


def whole_on_all() -> list[str]:
    """The gathered model: weights, statistics, a plain evaluation; and training goes on as before."""
    wrong: list[str] = []

    def between(model: Any, own: dict[str, Any]) -> None:
        x = regression_batch(8)["x"]
        if hasattr(model, "module"):
            with smp.gathered(model) as module:
                own.setdefault("states", []).append(copy.deepcopy(module.state_dict()))
                own.setdefault("outputs", []).append(module.eval()(x).detach())
                own.setdefault("again", []).append(model(x).detach())
                module.train()
        else:
            own.setdefault("states", []).append(copy.deepcopy(model.state_dict()))
            own.setdefault("outputs", []).append(model.eval()(x).detach())
            own.setdefault("again", []).append(model(x).detach())
            model.train()

    ours, plain = both(between, lambda *_: None)
    for a, b in zip(ours["states"], plain["states"], strict=True):
        wrong += [name for name in b if not torch.equal(a[name], b[name])]
    for kind in ("outputs", "again"):
        wrong += [kind for a, b in zip(ours[kind], plain[kind], strict=True) if not torch.equal(a, b)]
    local = {id(p) for p in ours["model"].local_parameters()}
    for parameter in ours["model"].parameters():
        if id(parameter) not in local and "AwayTensor" not in repr(parameter):
            wrong.append("something stayed")
    return wrong


def whole_on_one() -> tuple[list[str], list[str]]:
    """On one rank only; (errors of reading there, of changing a stranger's parameter)."""
    smp.init()
    model = smp.DistributedModel(WithStatistics())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, smp.step(library_step), optimizer, lambda: None)
    reading, changing = [], []
    try:
        with smp.gathered(model, rank=1) as module:
            if smp.mp_rank() == 1:
                io.BytesIO().write(str(sum(p.sum().item() for p in module.parameters())).encode())
    except smp.SMPError as error:
        reading.append(str(error))
    try:
        with smp.gathered(model, rank=1) as module:
            if smp.mp_rank() == 1:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.add_(1)
    except smp.SMPError as error:
        changing.append(str(error))
    return reading, changing


USES: dict[str, Callable[[Any], Any]] = {
    "item": lambda model: [p.norm().item() for p in model.parameters()],
    "sum of norms": lambda model: float(sum(p.norm() for p in model.parameters())),
    "penalty": lambda model: bool(sum((p**2).sum() for p in model.parameters()) + 1 > 0),
    "gradient norm": lambda model: float(sum((p.grad**2).sum() for p in model.parameters())),
    "numpy": lambda model: [p.detach().numpy() for p in model.parameters()],
    "save": lambda model: torch.save(model.module.state_dict(), io.BytesIO()),
    "save the module": lambda model: torch.save(model.module, io.BytesIO()),
    "equal": lambda model: [torch.equal(p, p.clone()) for p in model.parameters()],
    "call": lambda model: float(model.module(torch.zeros(8, WIDTH)).sum()),
    "buffer": lambda model: [b.sum().item() for b in model.module.buffers()],
    "histogram": lambda model: [torch.histc(p.data).tolist() for p in model.parameters()],
    "copy": lambda model: nn.Linear(WIDTH, WIDTH).load_state_dict(_either_stage(model)) and None,
}


def _either_stage(model: Any) -> dict[str, Tensor]:
    head = model.module.head
    return {
        "weight": head.weight.double().float(),
        "bias": model.module.blocks[0][0].contract.bias * head.bias,
    }


def uses() -> dict[str, str]:
    """By name of the use the error's text; every use needs data of both stages."""
    smp.init()
    model = smp.DistributedModel(WithStatistics())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, smp.step(library_step), optimizer, lambda: None)
    step = smp.step(library_step)
    step(model, *regression_batch(8).values())
    found = {}
    average = torch.optim.swa_utils.AveragedModel(model.module)
    average.update_parameters(model.module)

    def of_average(_: Any) -> None:
        torch.save(average.state_dict(), io.BytesIO())

    for name, use in {**USES, "an average": of_average}.items():
        try:
            use(model)
            found[name] = ""
        except smp.SMPError as error:
            found[name] = str(error)
    # What needs no data is right.
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in WithStatistics().parameters())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert next(model.parameters()).dtype == torch.float32
    return found
