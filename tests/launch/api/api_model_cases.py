"""What the tests of model and optimizer run in the ranks.

Every function gives back plain data and tensors; the plain twin trains in the rank as well, so that
what is compared came from one process.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

import smp_lite as smp
from smp_lite.record.parameters.away import is_away
from tests.api_support import batch, build, place, plain_train, same, train, wrap
from tests.launch.api.api_cases import error_of

ADAMW = partial(torch.optim.AdamW, lr=0.01)


def start(seed: int = 7, optimizer: Any = ADAMW) -> tuple[Any, Any]:
    warnings.filterwarnings("ignore", message="Stage ")
    smp.init()
    return wrap(build(seed), optimizer)


def restart(seed: int = 8) -> tuple[Any, Any]:
    smp.reset()
    return start(seed)


def run(model: Any, optimizer: Any, indices: range) -> list[torch.Tensor]:
    """Steps on this dp rank's own batches; losses [NUM_MICROBATCHES] of each."""
    losses = []
    for index in indices:
        optimizer.zero_grad()
        losses.append(train(model, *batch(index + 100 * smp.dp_rank())).stack())
        optimizer.step()
    return losses


def plain_run(indices: range, seed: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = build(seed)
    optimizer = ADAMW(net.parameters())
    for index in indices:
        optimizer.zero_grad()
        plain_train(net, *batch(index))
        optimizer.step()
    return net, optimizer


def local_things() -> dict[str, Any]:
    """What the `local_` methods list, before and after partition."""
    model, _ = start()
    before = [name for name, _ in model.local_named_parameters()]
    before_state = list(model.local_state_dict())
    train(model, *batch())
    parameters = dict(model.module.named_parameters())
    return {
        "before": (before, before_state),
        "parameters": [name for name, _ in model.local_named_parameters()],
        "same objects": [id(p) for p in model.local_parameters()]
        == [id(p) for _, p in model.local_named_parameters()],
        "buffers": [name for name, _ in model.local_named_buffers()],
        "modules": [name for name, _ in model.local_named_modules()],
        "state": list(model.local_state_dict()),
        "memoryless": [name for name, p in parameters.items() if is_away(p)],
        "gradients": [name for name, p in parameters.items() if not is_away(p.grad)],
        "all": list(parameters),
    }


def state_dicts() -> dict[str, Any]:
    model, optimizer = start()
    gathered_before = model.state_dict(gather_to_rank0=True)
    run(model, optimizer, range(2))
    net, reference = plain_run(range(2))
    state, optimizer_state = model.state_dict(), optimizer.state_dict()
    return {
        "model": same(state, net.state_dict()),
        "order": list(state) == list(net.state_dict()),
        "optimizer": same(optimizer_state, reference.state_dict()),
        "gathered": [
            len(part)
            for part in (
                gathered_before,
                model.state_dict(gather_to_rank0=True),
                optimizer.state_dict(gather_to_rank0=True),
            )
        ],
        "local positions": sorted(optimizer.local_state_dict()["state"]),
    }


def load_plain_states(partitioned: bool) -> bool:
    """A plain model's and a plain optimizer's states, loaded on all ranks: training goes on."""
    net, reference = plain_run(range(2))
    states = net.state_dict(), reference.state_dict()
    model, optimizer = start(seed=8)
    if partitioned:
        run(model, optimizer, range(5, 6))
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    run(model, optimizer, range(2, 4))
    wanted, its = plain_run(range(4))
    return same(model.state_dict(), wanted.state_dict()) and same(optimizer.state_dict(), its.state_dict())


def merge_parts(partitioned: bool) -> dict[str, Any]:
    """Parts saved under one partition go into a model that is cut the other way round."""
    model, optimizer = start()
    run(model, optimizer, range(1))
    part, state = model.local_state_dict(), model.state_dict()
    optimizer_part = optimizer.local_state_dict()
    smp.reset()
    smp.init()
    net = build(seed=8)
    model = smp.DistributedModel(net)
    place(lambda name: int(name.startswith("first")), net)
    optimizer = smp.DistributedOptimizer(ADAMW(model.parameters()))
    if partitioned:
        train(model, *batch())
    model.load_state_dict(part)
    if not partitioned:
        model.eval()
        forward = smp.step(lambda model, x: model(x))
        with torch.no_grad():
            forward(model, batch()[0])
    return {
        "merged": same(model.state_dict(), state),
        "optimizer": error_of(lambda: optimizer.load_state_dict(optimizer_part)),
    }


def load_own_parts(partitioned: bool) -> dict[str, Any]:
    """Each rank's own part without exchange, as `resume_from_checkpoint` does.

    The learning rate is saved with it, and changed between loading and the next step.
    """
    model, optimizer = start()
    optimizer.param_groups[0]["lr"] = 0.03
    run(model, optimizer, range(2))
    part, optimizer_part = copy.deepcopy((model.local_state_dict(), optimizer.local_state_dict()))
    optimizer.param_groups[0]["lr"] = 0.02
    run(model, optimizer, range(2, 4))
    wanted = model.state_dict(), optimizer.state_dict()
    model, optimizer = restart()
    if partitioned:
        run(model, optimizer, range(1))
    model.load_state_dict(part, same_partition_load=True)
    optimizer.load_state_dict(optimizer_part)
    loaded = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.02
    run(model, optimizer, range(2, 4))
    return {"lr": loaded, "same": same((model.state_dict(), optimizer.state_dict()), wanted)}


def strictness() -> dict[str, str]:
    """Own parts with too little in them; the ranks do not wait for each other here."""
    model, optimizer = start()
    run(model, optimizer, range(1))
    part = model.local_state_dict()
    key = next(key for key in part if key.endswith("weight"))
    del part[key]
    return {
        key: error_of(lambda: model.load_state_dict(part, same_partition_load=True)),
    }


def everything_on_cpu() -> dict[str, Any]:
    """`model.cpu()`: all parameters on every rank; training goes on, and saves what was trained."""
    model, optimizer = start()
    run(model, optimizer, range(2))
    model.cpu()
    net, _ = plain_run(range(2))
    gathered = same(dict(model.module.named_parameters()), dict(net.named_parameters()))
    buffers = same(dict(model.module.named_buffers()), dict(net.named_buffers()))
    local = [name for name, _ in model.local_named_parameters()]
    run(model, optimizer, range(2, 3))
    later, _ = plain_run(range(3))
    went_on = same(model.state_dict(), later.state_dict())
    model.cpu()
    again = same(model.module.state_dict(), later.state_dict())
    return {"now": gathered and buffers, "went on": went_on, "again": again, "local": local}


def empty_stage(optimizer: str) -> dict[str, Any]:
    """All parameters on stage 0: the optimizer of rank 1 owns none."""
    kind = getattr(torch.optim, optimizer)
    warnings.filterwarnings("ignore", message="Stage ")
    smp.init()
    net, plain = build(), build()
    model = smp.DistributedModel(net)
    its = smp.DistributedOptimizer(kind(model.parameters(), lr=0.01))
    reference = kind(plain.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(its, 1, 0.5)
    reference_scheduler = torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
    for index in range(2):
        its.zero_grad()
        reference.zero_grad()
        train(model, *batch(index))
        plain_train(plain, *batch(index))
        its.step()
        reference.step()
        scheduler.step()
        reference_scheduler.step()
    equal = same(model.state_dict(), plain.state_dict())
    return {
        "number": len(list(model.local_parameters())),
        "closure": its.step(lambda: 2.5),
        "equal": equal,
        "lr": its.param_groups[0]["lr"],
    }


class Root(nn.Module):
    """A container that counts in a buffer of its own, and is cut in two."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x) * (1 + self.calls)


def buffer_of_a_container() -> dict[str, Any]:
    """Saved in parts and loaded again, the container's buffer, which scales losses, is right."""
    warnings.filterwarnings("ignore", message="Stage ")
    smp.init()
    parts = None
    results = []
    for steps in (range(4), range(2), range(2, 4)):
        root = Root()
        model = smp.DistributedModel(root)
        place(lambda name: int(name.startswith("net.last")), root)
        if steps.start:
            model.load_state_dict(parts, same_partition_load=True)
        losses = [train(model, *batch(index)).stack() for index in steps]
        results.append((losses, root.calls.clone(), model.state_dict()["calls"]))
        parts = model.local_state_dict()
        smp.reset()
        smp.init()
    (all_losses, *all_calls), _, (late_losses, *late_calls) = results
    return {
        "losses": same(all_losses[2:], late_losses),
        "calls": [float(calls) for calls in (*all_calls, *late_calls)],
    }


class Counting(nn.Linear):
    """Keeps a number in its state dict that is neither parameter nor buffer."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def extra_state() -> list[int]:
    """Calls counted by the modules on the stages where they really run."""
    warnings.filterwarnings("ignore", message="Stage ")
    smp.init()
    net = nn.Sequential(Counting(4, 4), Counting(4, 1))
    model = smp.DistributedModel(net)
    place(lambda name: int(name == "1"), net)
    for _ in range(3):
        train(model, *batch())
    state = model.state_dict()
    return [state[f"{name}._extra_state"] for name in ("0", "1")]


def communication_hook(kind: str) -> dict[str, Any]:
    """Gradients are what the hook makes of the sums over microbatches; a second hook is refused."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model, _ = start()
    group = smp.get_dp_process_group()
    seen = []

    def own_hook(state: Any, bucket: Any) -> Any:
        parameters = bucket.parameters()
        seen.append((state, bucket.index(), len(parameters), bucket.is_last()))
        work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] * 3)

    if kind == "own":
        model.register_comm_hook("state", own_hook)
    else:
        model.register_comm_hook(group, allreduce_hook)
    again = error_of(lambda: model.register_comm_hook("state", own_hook))
    train(model, *batch(smp.dp_rank()))
    factor = 2 * (3 if kind == "own" else 1 / smp.dp_size())
    wanted: dict[str, Any] = {}
    for dp_rank in range(smp.dp_size()):
        plain = build()
        plain_train(plain, *batch(dp_rank))
        for name, parameter in plain.named_parameters():
            wanted[name] = wanted.get(name, 0) + parameter.grad * factor
    gradients = {name: parameter.grad for name, parameter in model.local_named_parameters()}
    close = [torch.allclose(g, wanted[n], rtol=1e-5, atol=1e-6) for n, g in gradients.items()]
    return {"seen": seen, "again": again, "close": close}


def counts_of_groups() -> dict[str, Any]:
    """The first stage has no parameters, so its rank's groups never step."""
    warnings.filterwarnings("ignore", message="Stage ")
    smp.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Tanh(), nn.Linear(4, 1))
    model = smp.DistributedModel(net)
    place(lambda name: 1 if name == "1" else 0, net)
    inner = smp.optimizers.FusedNovoGrad(model.parameters(), lr=0.01)
    optimizer = smp.DistributedOptimizer(inner)
    for index in range(3):
        train(model, *batch(index))
        optimizer.step()
    return optimizer.state_dict()["param_groups"][0]
