"""What ranks run that look at parameters of split layers between steps; called through `tests.harness`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp

__all__ = ["ALLOWED", "REFUSED", "allowed", "ended", "in_hooks_and_closures", "refused", "trained_plainly"]

Look = Callable[[nn.Parameter], Any]


def _set_row(p: nn.Parameter) -> None:
    with torch.no_grad():
        p[0] = 0.0


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


REFUSED: dict[str, Look] = {
    "norm": lambda p: p.norm(),
    "sum of squares": lambda p: p.square().sum(),
    "detached": lambda p: p.detach().mean(),
    "data": lambda p: p.data.abs().max(),
    "the gradient's norm": lambda p: _gradient(p).norm(),
    "several norms": lambda p: torch._foreach_norm([_gradient(p)]),
    "a norm by torch": lambda p: torch.linalg.vector_norm(_gradient(p)),
    "finite": lambda p: _gradient(p).isfinite().all(),
    "a copy's": lambda p: _gradient(p).clone().float().flatten().dot(_gradient(p).flatten()),
    "a product": lambda p: p @ p.T,
    "drawn": lambda p: nn.init.normal_(p),
    "xavier": lambda p: nn.init.xavier_uniform_(p),
    "eye": lambda p: nn.init.eye_(p),
    "a row set": _set_row,
    "a vector": lambda p: nn.utils.parameters_to_vector([p]).sum(),
}


def _saved(p: nn.Parameter) -> bool:
    file = io.BytesIO()
    torch.save({"p": p, "gradient": p.grad}, file)
    file.seek(0)
    found = torch.load(file)
    return type(found["p"]) is nn.Parameter and type(found["gradient"]) is Tensor


def _averaged(p: nn.Parameter) -> bool:
    average = p.detach().clone()
    average.mul_(0.5).add_(p.detach(), alpha=0.5)
    return torch.allclose(average, p)


def _scaled(p: nn.Parameter) -> bool:
    before = p.tolist()
    with torch.no_grad():
        p.mul_(2.0)
        p.data.div_(2.0)
    return p.tolist() == before


def _with_own(p: nn.Parameter) -> bool:
    mine = torch.tensor(_gradient(p).tolist())
    return float((_gradient(p) - mine).abs().max()) == 0.0


def _set_gradient(p: nn.Parameter) -> bool:
    before = _gradient(p)
    p.grad = before * 2
    doubled = p.grad.tolist() == (before + before).tolist()
    p.grad = before
    return doubled


ALLOWED: dict[str, Callable[[nn.Parameter], bool]] = {
    "shapes": lambda p: p.shape == _gradient(p).shape and p.numel() == _gradient(p).numel(),
    "saved": _saved,
    "copied": lambda p: type(copy.deepcopy(p)) is nn.Parameter,
    "averaged": _averaged,
    "scaled": _scaled,
    "with a tensor of its own": _with_own,
    "a gradient set": _set_gradient,
    "numbers": lambda p: _gradient(p).numpy().shape == p.shape and isinstance(repr(p), str),
    "its own shape": lambda p: bool((p > 0).tolist() or True) and p.flatten().view_as(p).shape == p.shape,
    "a model's copy": lambda p: isinstance(copy.deepcopy(nn.ParameterList([p]))[0], nn.Parameter),
}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def _wrapped(**parameters: Any) -> tuple[smp.DistributedModel, nn.Module]:
    smp.init(
        {"partitions": 1, "ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True, **parameters}
    )
    torch.manual_seed(0)
    net = _Net()
    plain = copy.deepcopy(net)
    smp.set_tensor_parallelism(net)
    return smp.DistributedModel(net), plain


@smp.step
def _step(model: smp.DistributedModel, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def _batch() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(4, 6)


def refused() -> dict[str, list[str]]:
    """What each way is told before the first step, where there are gradients, and after a failed step."""
    model, _ = _wrapped()
    told: dict[str, list[str]] = {name: [] for name in REFUSED}

    def look() -> None:
        weight = model.module.up.weight
        for name, function in REFUSED.items():
            if weight.grad is None:
                weight.grad = torch.ones_like(weight)
            try:
                function(weight)
                told[name].append("ran")
            except smp.SMPError as error:
                told[name].append(str(error))

    look()
    _step(model, _batch())
    look()
    try:
        _step(model, torch.ones(4, 5))
    except Exception:
        look()
    return told


def allowed() -> dict[str, bool]:
    model, _ = _wrapped()
    _step(model, _batch())
    return {name: function(model.module.up.weight) for name, function in ALLOWED.items()}


def in_hooks_and_closures() -> dict[str, str]:
    """What a script's own code is told that runs within ``optimizer.step()``."""
    model, _ = _wrapped()
    told: dict[str, str] = {}

    def look(where: str) -> None:
        try:
            sum(p.norm() for p in model.parameters())
            told[where] = "ran"
        except smp.SMPError as error:
            told[where] = str(error)

    def closure() -> Tensor:
        loss = _step(model, _batch()).reduce_mean()
        look("closure")
        return loss

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.register_step_pre_hook(lambda *_: look("before"))
    inner.register_step_post_hook(lambda *_: look("after"))
    optimizer = smp.DistributedOptimizer(inner)
    optimizer.step(closure)
    look("then")
    return told


def trained_plainly(name: str) -> tuple[list[float], list[float], float, float]:
    """Losses of plain loops with an optimizer of torch's that nobody wrapped, and norms of gradients by
    torch's function, here and in one process."""
    model, plain = _wrapped()
    losses: list[list[float]] = []
    norms = []
    for net in (model, plain):
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.05)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(_batch()).square().mean()
            loss.backward()
            norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()
            losses[-1].append(loss.item())
        norms.append(norm)
    return losses[0], losses[1], norms[0], norms[1]


def ended() -> str:
    """What the type of a parameter is when the session has ended."""
    model, _ = _wrapped()
    _step(model, _batch())
    weight = model.module.up.weight
    smp.reset()
    return type(weight).__name__
