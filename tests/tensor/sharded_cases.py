"""What the tests of sharded parameters run in the ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.nn.guarding import plain as plain_of
from smp_lite.nn.layout import layout_of
from smp_lite.optim.state.split import whole_state
from smp_lite.session import current
from tests.tensor.runtime_cases import CLASSES, WIDTH, Block, Net, batches


class Shared(nn.Module):
    """Parameters of the root itself, a weight used by a function, a frozen one, batch norm, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.out = nn.Linear(WIDTH, CLASSES)
        self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(x)) + self.position
        for block in self.blocks:
            x = block(x) * self.scale
        x = F.linear(x, self.embed.weight.t()) + self.position
        return self.out(x)


class Twice(nn.Module):
    """One block that is called again and again, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 0, 2, 0):
            x = self.blocks[number](x)
        return self.out(x)


class DecaysMatrices(torch.optim.SGD):
    """Asks a parameter for its number of dimensions."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.dim() > 1:
                        parameter.mul_(0.9)
                    parameter.add_(parameter.grad, alpha=-group["lr"])


MODELS = {
    "net": Net,
    "tied": lambda: Net(tied=True),
    "dropout": lambda: Net(dropout=0.3),
    "shared": Shared,
    "twice": Twice,
    "one unit": lambda: Block(WIDTH),
}


def train(
    config: dict[str, Any],
    model: str = "net",
    *,
    num_steps: int = 3,
    optimizer: str = "AdamW",
    clip: float | None = None,
    passes: int = 1,
    checkpointing: bool = False,
    autocast: bool = False,
    options: dict[str, Any] | None = None,
    evaluate: bool = False,
) -> dict[str, Any]:
    """Losses, norms, the whole state at the end, and how much of it lay here."""
    smp.init(config)
    torch.manual_seed(0)
    net = MODELS[model]()
    wrapped = smp.DistributedModel(net, **(options or {}))
    optim = smp.DistributedOptimizer(getattr(torch.optim, optimizer)(wrapped.parameters(), lr=0.05))
    if checkpointing:
        for block in net.blocks:
            smp.set_activation_checkpointing(block)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = F.cross_entropy(wrapped(x)[:, :CLASSES], y)
        wrapped.backward(loss)
        return loss

    @smp.step
    def forward(x: torch.Tensor) -> torch.Tensor:
        return wrapped(x)

    losses, norms, outputs = [], [], []
    for number, (x, y) in enumerate(batches(num_steps * passes, smp.rdp_rank())):
        if number % passes == 0:
            optim.zero_grad()
        losses.append(step(x, y).reduce_mean().item())
        if (number + 1) % passes:
            continue
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(wrapped.parameters(), clip)))
        optim.step()
        if evaluate:
            wrapped.eval()
            with torch.no_grad():
                outputs.append(forward(x).concat())
            wrapped.train()
    sharded = wrapped.runtime.sharded
    state = optim.local_state_dict()["state"]
    return {
        "losses": losses,
        "norms": norms,
        "outputs": outputs,
        "state": wrapped.state_dict(),
        "optimizer": optim.state_dict(),
        "elements": sum(plain_of(parameter).numel() for parameter in wrapped.local_parameters()),
        "of_state": sum(v.numel() for s in state.values() for v in s.values() if v.dim()),
        "gradients": sum(plain_of(p.grad).numel() for p in wrapped.local_parameters() if p.grad is not None),
        "most_bytes": sharded.most_bytes if sharded is not None else None,
        "groups": [group.num_bytes for group in sharded.groups] if sharded is not None else None,
    }


def _step(config: dict[str, Any], net: nn.Module) -> tuple[Any, Any]:
    smp.init(config)
    torch.manual_seed(0)
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    return model, step


def refused(config: dict[str, Any], what: str) -> str:
    """What a script is told that does something that pieces cannot."""
    torch.manual_seed(0)
    net = Net()
    if what == "hidden":
        net.blocks[0].forward = lambda x, other=net.blocks[3]: x + F.linear(x, other.up.weight)[:, :WIDTH]
    model, step = _step(config, net)
    x, y = batches(1, smp.rdp_rank())[0]
    try:
        if what == "lamb":
            optimizer = smp.DistributedOptimizer(smp.optimizers.FusedLAMB(model.parameters(), lr=0.01))
            step(x, y)
            optimizer.step()
        elif what == "hook":
            model.register_comm_hook(None, lambda state, bucket: None)
            step(x, y)
        elif what == "outside":
            step(x, y)
            model(x)
        elif what == "gathered copy":
            step(x, y)
            with smp.gathered(copy.deepcopy(net)):
                pass
        elif what == "another piece":
            step(x, y)
            state = model.local_state_dict()
            state["_smp_is_partial"] = f"piece {1 - int(state['_smp_is_partial'].split()[1])} of 2"
            model.load_state_dict(state, same_partition_load=True)
        elif what == "whole part":
            step(x, y)
            model.load_state_dict({"_smp_is_partial": True}, same_partition_load=True)
        elif what == "other data":
            step(x, y)
            net.embed.weight.data = torch.zeros(WIDTH, WIDTH)
            step(x, y)
        elif what == "changed inside":
            step(x, y)

            @smp.step
            def changes(x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    net.embed.weight.clamp_(-0.1, 0.1)
                return model(x).sum()

            changes(x)
        elif what == "changed behind autograd":
            layer = net.blocks[2].up

            def normalised(x: torch.Tensor) -> torch.Tensor:
                layer.weight.data = F.normalize(layer.weight.data)
                return F.linear(x, layer.weight, layer.bias)

            layer.forward = normalised
            step(x, y)
        elif what == "by dimensions":
            optimizer = smp.DistributedOptimizer(DecaysMatrices(model.parameters(), lr=0.01))
            step(x, y)
            optimizer.step()
        elif what.startswith("between"):
            step(x, y)
            weight = net.embed.weight
            between = {
                "between: a norm": lambda: weight.grad.norm(),
                "between: a sum of what was made of it": lambda: (weight.detach() * 2).sum(),
                "between: a row": lambda: weight.data[0].zero_(),
                "between: noise": lambda: weight.grad.add_(torch.randn_like(weight)),
                "between: initialised": lambda: nn.init.normal_(weight),
                "between: saved": lambda: torch.save(net.state_dict(), io.BytesIO()),
                "between: multiplied": lambda: F.linear(x, weight),
                "between: turned": lambda: weight.T,
            }
            between[what]()
        elif what == "hidden":
            loss = step(x, y).reduce_mean().item()
            return "nan" if loss != loss else f"{loss:.6f}"
    except (smp.SMPError, ValueError) as error:
        return str(error)
    return ""


def data_replaced(config: dict[str, Any]) -> list[float]:
    """``parameter.data = ...`` between steps counts."""
    net = Net()
    _, step = _step(config, net)
    x, y = batches(1)[0]
    losses = [step(x, y).reduce_mean().item()]
    net.head.weight.data = net.head.weight.data * 2
    losses.append(step(x, y).reduce_mean().item())
    return losses


def fails(config: dict[str, Any], rank: int) -> tuple[str, float, float]:
    """One rank fails in a block: the error, seconds until it, and the next step's loss."""
    net = Net()
    _, step = _step(config, net)
    x, y = batches(1)[0]
    step(x, y)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if is_on and smp.rank() == rank:
                raise ArithmeticError("the cause")
            return gradient

    is_on = True
    net.blocks[1].forward = lambda x, block=net.blocks[1]: Block.forward(block, Fails.apply(x))
    start, text = time.monotonic(), ""
    try:
        step(x, y)
    except ArithmeticError as error:
        text = str(error)
    took = time.monotonic() - start
    is_on = False
    return text, took, step(x, y).reduce_mean().item()


def saves(config: dict[str, Any], folder: str, num_steps: int, portable: bool = True) -> list[float]:
    """Trains, and saves a portable checkpoint, or a full one, after two steps."""
    model, optim, step = _trainer(config)
    losses = []
    for number, (x, y) in enumerate(batches(num_steps)):
        if number == 2:
            smp.save_checkpoint(folder, "tag", False, model, optim, portable=portable)
        losses.append(_one(step, optim, x, y))
    return losses


def resumes(
    config: dict[str, Any], folder: str, num_steps: int, after_a_step: bool, portable: bool = True
) -> list[float]:
    """Goes on from there, under any layout."""
    _, optim, step = _trainer(config)
    if after_a_step:
        _one(step, optim, *batches(1)[0])
    smp.resume_from_checkpoint(folder, "tag", partial=portable)
    return [_one(step, optim, x, y) for x, y in batches(num_steps)[2:]]


def _trainer(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    model, step = _step(config, Net(tied=True))
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    return model, optim, step


def _one(step: Any, optim: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    optim.zero_grad()
    loss = step(x, y).reduce_mean().item()
    optim.step()
    return loss


def loads_state_before_partition(config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """State dicts of a job go into another one of its kind, before its first step."""
    model, optim, step = _trainer(config)
    data = batches(3)
    for x, y in data[:2]:
        _one(step, optim, x, y)
    state, optimizer = model.state_dict(), optim.state_dict()
    expected = [_one(step, optim, *data[2])]
    smp.reset()
    model, optim, step = _trainer(config)
    model.load_state_dict(state)
    optim.load_state_dict(optimizer)
    found = [_one(step, optim, *data[2])]
    here = [parameter for parameter in model.local_parameters() if layout_of(parameter) is not None]
    sharded = [(parameter, optim.state[parameter]) for parameter in here]
    assert len(sharded) > 5
    for parameter, own in sharded:
        assert plain_of(own["exp_avg"]).shape == plain_of(parameter).shape
        assert whole_state(parameter, own)["exp_avg"].shape == layout_of(parameter).shape
    return expected, found


def collectives_of_a_step(config: dict[str, Any]) -> dict[str, int]:
    """How many of each kind ran over the axis in a step, and how many elements they were about."""
    _, step = _step(config, Net())
    x, y = batches(1)[0]
    step(x, y)
    axis = current().axis("fsdp")
    before, elements = dict(axis.calls), dict(axis.elements)
    step(x, y)
    return {
        "gathers": axis.calls["all_gather"] - before["all_gather"],
        "elements": axis.elements["all_gather"] - elements["all_gather"],
    }


def element_by_element(config: dict[str, Any]) -> list[float]:
    """What is right on pieces: decay by groups of dimensions, weights clamped and averaged between steps."""
    smp.init(config)
    torch.manual_seed(0)
    net = Net()
    model = smp.DistributedModel(net)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optim = torch.optim.AdamW(groups, lr=0.05)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    losses = []
    slow: list[torch.Tensor] = []
    for x, y in batches(4, smp.rdp_rank()):
        optim.zero_grad()
        losses.append(step(x, y).reduce_mean().item())
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5 + 0.01 * parameter.detach()
        optim.step()
        with torch.no_grad():
            slow = slow or [copy.deepcopy(parameter) for parameter in model.parameters()]
            for parameter, other in zip(model.parameters(), slow, strict=True):
                parameter.clamp_(-0.3, 0.3)
                other.lerp_(parameter, 0.1)
                parameter.copy_(other)
    return losses
