"""What :mod:`.test_guard` runs on ranks whose parameters are sharded."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smp_lite as smp
from smp_lite.nn import guarding

SHARDED = {
    "partitions": 1,
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "microbatches": 1,
}


def _trained(**others: Any) -> tuple[nn.Module, Any, Any]:
    smp.init({**SHARDED, **others})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(x: torch.Tensor, *, stepping: bool) -> torch.Tensor:
        loss = model(x).square().mean()
        if stepping:
            optimizer.optimizer.step()
        model.backward(loss)
        return loss

    step(torch.ones(4, 8), stepping=False)
    optimizer.step()
    return net, optimizer, step


def _told(of: Any) -> str:
    try:
        return str(of())
    except smp.SMPError as error:
        return str(error)


def after_errors() -> tuple[list[str], list[int]]:
    """Norms of gradients after steps that went wrong, and how far the guard is open then."""
    net, optimizer, step = _trained()
    norms, opened = [], []

    def fails(*args: Any) -> None:
        raise KeyError("the script's own")

    for number in range(3):
        handle = None
        if number == 1:
            handle = optimizer.optimizer.register_step_post_hook(fails)
        with contextlib.suppress(smp.SMPError, KeyError):
            if number == 2:
                step(torch.ones(4, 8), stepping=True)
            else:
                optimizer.optimizer.step()
        if handle is not None:
            handle.remove()
        step(torch.ones(4, 8), stepping=False)
        optimizer.step()
        norms.append(_told(lambda: net[0].weight.grad.norm()))
        opened.append(guarding._open)
    return norms, opened


def written(folder: str) -> list[str]:
    """A file of safetensors with copies of pieces; what may be done with pieces besides."""
    from safetensors.torch import save_file

    net, _, _ = _trained()
    copies = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    gradient = net[0].weight.grad
    assert gradient is not None
    right = [
        net[0].weight.new_tensor([1.0, 2.0]).tolist() == [1.0, 2.0],
        gradient.detach_() is gradient,
        bool((guarding.plain(gradient.masked_fill_(gradient.abs() >= 0, 2.0)) == 2.0).all()),
    ]
    return [_told(lambda: save_file(copies, Path(folder) / f"{smp.rank()}.safetensors")), str(right)]


def after_an_inner_step() -> tuple[str, str]:
    """The wrapped optimizer's step is called without its wrapper, and its closure fails: a norm, a file."""
    net, optimizer, _ = _trained(sdp_gradient_clipping=0)

    def closure() -> None:
        raise KeyError("the script's own")

    with contextlib.suppress(KeyError):
        optimizer.optimizer.step(closure)
    norm = _told(lambda: net[0].weight.grad.norm())
    return norm, _told(lambda: torch.save(dict(net.state_dict()), io.BytesIO()))
