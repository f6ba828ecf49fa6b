"""What the tests of calls outside a step run in the ranks, and the same in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import smp_lite as smp
from smp_lite.nn.layout import layout_of, whole_of
from smp_lite.session import current
from tests.tensor.smp_api.cases import MODELS, Linears, default_dtype

BATCH, LENGTH, ITERATIONS = 4, 6, 3
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class WithBuffers(nn.Module):
    """Its statistics change, and so does a sum that its output is made of; one parameter is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(self.embed(ids).mean(1)))
        with torch.no_grad():
            if self.training:
                self.scale += x.mean(0).abs()
        return x * self.scale.detach().clone()


def made(name: str) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    if name == "buffers":
        return WithBuffers(), lambda net: None
    return MODELS[name]()


def loss_of(found: Any, ids: torch.Tensor) -> torch.Tensor:
    x, extra = (found, 0.0) if isinstance(found, torch.Tensor) else found
    weight = torch.linspace(-1.0, 1.0, x[0].numel(), dtype=x.dtype).reshape(x[0].shape)
    return ((x * weight).flatten(1).sum(-1).tanh() * (1 + ids.float().mean(-1))).mean() + extra


def data(replica: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + replica)
    return [torch.randint(11, (BATCH, LENGTH), generator=generator) for _ in range(2 * ITERATIONS)]


# Ways to make gradients of two batches ----------------------------------------------------------------------


def _accumulated(call: Any, first: Any, second: Any) -> list[Any]:
    losses = []
    for ids in (first, second):
        loss = loss_of(call(ids), ids) / 2
        loss.backward()
        losses.append(loss)
    return losses


def _one_forward(call: Any, first: Any, second: Any) -> list[Any]:
    found = call(first)
    losses = [loss_of(found, first), loss_of(found, second) / 3]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    return losses


def _two_forwards(call: Any, first: Any, second: Any) -> list[Any]:
    losses = [loss_of(call(first), first), loss_of(call(second), second) / 3]
    sum(losses).backward()  # type: ignore[union-attr]
    return losses


WAYS = {"accumulated": _accumulated, "one forward": _one_forward, "two forwards": _two_forwards}


def loop(net: nn.Module, call: Any, optimizer: Any, way: str, batches: list[torch.Tensor]) -> list[float]:
    """Losses of a plain training loop, as it is written for one process."""
    losses = []
    for i in range(ITERATIONS):
        found = WAYS[way](call, *batches[2 * i : 2 * i + 2])
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if i < ITERATIONS - 1:
            optimizer.step()
            optimizer.zero_grad()
        losses += [loss.item() for loss in found]
        call.eval() if hasattr(call, "eval") else None
        with torch.no_grad():
            call(batches[0])
        call.train() if hasattr(call, "train") else None
    return losses


def _start(parameters: dict[str, Any], model_name: str, dtype: torch.dtype, **options: Any) -> Any:
    smp.init(parameters)
    torch.manual_seed(0)
    with default_dtype(dtype):
        net, marks = made(model_name)
        marks(net)
        model = smp.DistributedModel(net, **options)
    return model, smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))


def replica_of(parameters: dict[str, Any]) -> int:
    return smp.rdp_rank() if parameters.get("prescaled_batch") else smp.dp_rank()


def whole_gradients(model: Any) -> dict[str, Any]:
    found = {}
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        if parameter.grad is not None:
            found[name] = parameter.grad if layout is None else whole_of(parameter.grad, layout)
    return found


def train(
    model_name: str,
    way: str,
    parameters: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    model, optimizer = _start(parameters, model_name, dtype, **(options or {}))
    replica = replica_of(parameters)
    losses = loop(model, model, optimizer, way, data(replica))
    state = model.state_dict()
    gradients = whole_gradients(model)
    for to_hf, _ in smp.state.module_manager.translate_functions:
        state, gradients = to_hf(state), to_hf(gradients)
    moments = optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "replica": replica,
        "state": state,
        "gradients": gradients,
        "moments": {number: each["exp_avg"] for number, each in moments.items()},
        "overlapped": model.runtime.reducer.started_in_backward if model.runtime.reducer else 0,
    }


def dense(model_name: str, way: str, num_replicas: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same in one process, on all replicas' batches."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        net, _ = made(model_name)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses: list[list[float]] = [[] for _ in range(num_replicas)]
    for i in range(ITERATIONS):
        for replica in range(num_replicas):
            found = _scaled(net, WAYS[way], data(replica)[2 * i : 2 * i + 2], num_replicas)
            losses[replica] += found
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if i < ITERATIONS - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "state": net.state_dict(),
        "gradients": {n: p.grad for n, p in net.named_parameters() if p.grad is not None},
        "moments": {n: each["exp_avg"] for n, each in optimizer.state_dict()["state"].items()},
    }


def _scaled(net: nn.Module, way: Any, batches: list[torch.Tensor], num_replicas: int) -> list[float]:
    """A replica's part of the mean."""
    before = {p: p.grad for p in net.parameters()}
    for p in net.parameters():
        p.grad = None
    losses = way(net, *batches)
    for p in net.parameters():
        if p.grad is not None:
            part = p.grad / num_replicas
            p.grad = part if before[p] is None else before[p] + part
        else:
            p.grad = before[p]
    return [loss.item() for loss in losses]


# Ranks that do not do the same ------------------------------------------------------------------------------

DP = {"partitions": 1, "ddp": True, "microbatches": 2}
TP = {**DP, "tensor_parallel_degree": 2, "prescaled_batch": True}


def _linears(parameters: dict[str, Any], **options: Any) -> Any:
    return _start(parameters, "linears", torch.float32, **options)


def _said(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_backward_less() -> tuple[str, str, bool]:
    """Rank 1 makes two backwards before its optimizer steps, rank 0 one; then both make as many."""
    model, optimizer = _linears(DP)
    ids = data(0)[0]
    loss_of(model(ids), ids).backward()

    def second() -> None:
        if smp.rank() == 0:
            optimizer.step()
        loss_of(model(ids), ids).backward()

    said = _said(second)
    left = any(p.grad is not None for p in model.parameters())
    return said, _said(lambda: loss_of(model(ids), ids).backward()), left


def none_at_all() -> str:
    """Rank 1 makes no backward."""
    model, _ = _linears(DP)
    smp.set_watchdog(1.0)
    try:
        ids = data(0)[0]
        loss = loss_of(model(ids), ids)
        said = _said(loss.backward) if smp.rank() == 0 else ""
    finally:
        smp.set_watchdog(None)
    return said


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")


def failed_backward(then: str) -> tuple[str, list[bool], float, float]:
    """Rank 1's backward fails in its midst and rank 1 goes on; then all train as if it had not been."""
    model, optimizer = _linears(DP, bucket_cap_mb=1e-6)
    ids = data(smp.dp_rank())[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = model.module.norm(model.module.embed(ids)) if smp.rank() else None
    if smp.rank() == 0:
        said = _said(loss_of(model(ids), ids).backward)
    else:
        net = model.module
        assert x is not None
        found = _Fails.apply(x) + net.down(torch.relu(net.up(x)))
        said = _said(loss_of(found, ids).backward)
    if then == "optimizer":
        optimizer.step()
    stays = [torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()]
    if then == "step":
        step = smp.step(lambda model, ids: _loss_in_step(model, ids))
        step(model, ids)
    else:
        loss_of(model(ids), ids).backward()
    own = model.module.down.weight.grad.norm().item()
    twin = copy.deepcopy(model.module)
    twin.zero_grad()
    losses = []
    for replica in range(2):
        other = data(replica)[0]
        losses.append(loss_of(twin(other), other) / 2)
    sum(losses).backward()
    return said, stays, own, twin.down.weight.grad.norm().item()


def _loss_in_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(ids), ids)
    model.backward(loss)
    return loss


def refused() -> dict[str, str]:
    """Things that are errors on every rank; and what is not an error between them."""
    model, optimizer = _linears(DP)
    net = model.module
    ids = data(smp.dp_rank())[0]
    found = {}

    def loss() -> torch.Tensor:
        return loss_of(model(ids), ids)

    net.norm.weight.requires_grad_(False)
    found["frozen later"] = _said(lambda: loss().backward())
    net.norm.weight.requires_grad_(True)
    found["graph of gradients"] = _said(lambda: loss().backward(create_graph=True))
    handle = net.down.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    found["optimizer in a hook"] = _said(lambda: loss().backward())
    handle.remove()
    handle = net.down.weight.register_post_accumulate_grad_hook(_changed)
    found["changed in a hook"] = _said(lambda: loss().backward())
    handle.remove()

    def twice() -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return net.up(x)

        x = net.embed(ids)
        found = (
            checkpoint(inner, x, use_reentrant=True).sum()
            + checkpoint(inner, x * 2, use_reentrant=True).sum()
        )
        (found + net.down.weight.sum() + net.up(x).sum()).backward()

    found["in two parts"] = _said(twice)
    grads = torch.autograd.grad(loss(), list(net.parameters()))
    found["autograd.grad"] = _said(lambda: loss().backward())
    assert all(g is not None for g in grads)
    return found


def _changed(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(1)


def frozen_first() -> tuple[str, str]:
    """A parameter trains that did not when the model was wrapped, in a plain loop and in a step."""
    smp.init(DP)
    net = Linears()
    net.up.weight.requires_grad_(False)
    model = smp.DistributedModel(net)
    net.up.weight.requires_grad_(True)
    ids = data(0)[0]
    step = smp.step(_mixed_step)
    return _said(lambda: loss_of(model(ids), ids).backward()), _said(lambda: step(model, ids))


def tensor_ranks() -> dict[str, Any]:
    """Two ranks of one stage that do not call the model with the same things."""
    model, _ = _linears(TP)
    rank = smp.tp_rank()
    ids = data(0)[0]
    found: dict[str, Any] = {}
    found["shape"] = _said(lambda: model(ids[: 2 + rank]))
    found["numbers"] = _said(lambda: model((ids + rank) % 11))
    if rank:
        model.eval()
    found["mode"] = _said(lambda: model(ids))
    model.train()

    def graph() -> Any:
        with torch.set_grad_enabled(bool(rank)):
            return model(ids)

    found["graph"] = _said(graph)
    torch.manual_seed(rank)
    model(ids)
    found["random"] = torch.rand(1).item()
    calls = sum(current().axis("tp").calls.values())
    with torch.no_grad():
        found["fine"] = _said(lambda: model(ids))
    found["calls"] = sum(current().axis("tp").calls.values()) - calls
    return found


def dropped(prescaled: bool) -> list[Any]:
    """Parameters after a loop with dropout, whose ranks are in other random states."""
    smp.init({**TP, "optimize": "speed", "prescaled_batch": prescaled})
    torch.manual_seed(0)
    net, _ = MODELS["transformer"]()
    smp.set_tensor_parallelism(net.inner, attention_dropout_prob=0.5, hidden_dropout_prob=0.5)
    model = smp.DistributedModel(net)
    inside = []
    output = model.module.inner.seq_layers[-1].output
    output.register_forward_hook(lambda module, inputs, found: inside.append(found.detach()))
    torch.manual_seed(smp.tp_rank())
    ids = data(0 if prescaled else smp.tp_rank())[0]
    for _ in range(2):
        loss_of(model(ids), ids).backward()
    step = smp.step(_mixed_step)
    torch.manual_seed(smp.tp_rank())
    step(model, ids)
    return inside


def mixed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A step, a plain backward, and again; a graph made before a step comes back after it."""
    model, optimizer = _start(parameters, "linears", torch.float64)
    step = smp.step(_mixed_step)
    batches = data(replica_of(parameters))
    step(model, batches[0])
    early = loss_of(model(batches[1]), batches[1])
    step(model, batches[2])
    early.backward()
    loss = loss_of(model(batches[3]), batches[3])
    model.backward(loss)
    optimizer.step()
    step(model, batches[4])
    return {"gradients": whole_gradients(model), "state": model.state_dict()}


def _mixed_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return _loss_in_step(model, ids)


def mixed_dense(num_replicas: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        net = Linears()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def add(number: int, microbatches: int) -> None:
        for replica in range(num_replicas):
            for ids in data(replica)[number].chunk(microbatches):
                (loss_of(net(ids), ids) / microbatches / num_replicas).backward()

    for number, microbatches in enumerate((2, 1, 2, 1)):
        add(number, microbatches)
    optimizer.step()
    add(4, 2)
    return {"gradients": {n: p.grad for n, p in net.named_parameters()}, "state": net.state_dict()}


def passes() -> list[Any]:
    """Gradients that are reduced in every second backward."""
    model, _ = _start(DP, "linears", torch.float64, backward_passes_per_step=2)
    found = []
    for ids in data(smp.dp_rank())[:4]:
        loss_of(model(ids), ids).backward()
        found.append(model.module.up.weight.grad.clone())
    return found


def summed_dense(num_replicas: int) -> list[Any]:
    """The same in one process, where all gradients add up."""
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        net = Linears()
    found = []
    for number in range(4):
        for replica in range(num_replicas):
            ids = data(replica)[number]
            (loss_of(net(ids), ids) / num_replicas).backward()
        assert net.up.weight.grad is not None
        found.append(net.up.weight.grad.clone())
    return found


def alone() -> bool:
    """Rank 0 evaluates by itself, with and without a graph that nobody goes back through."""
    model, _ = _linears(DP)
    if smp.rank() == 0:
        model.eval()
        ids = data(0)[0]
        model(ids)
        with torch.no_grad():
            F.softmax(model(ids), -1)
    smp.barrier()
    return True


# Replicas that would drift apart ----------------------------------------------------------------------------


def new_parameters() -> list[str]:
    """Put into the model after it was wrapped; used by calls of the model, of the module, and between."""
    model, _ = _linears(DP)
    net, ids = model.module, data(smp.dp_rank())[0]
    found = []
    old = net.norm.bias
    net.norm.bias = nn.Parameter(old.detach().clone())
    found.append(_said(lambda: model(ids)))
    found.append(_said(lambda: loss_of(net(ids), ids).backward()))
    net.norm.bias = nn.Parameter(old.detach().clone(), requires_grad=False)
    found.append(_said(lambda: loss_of(model(ids), ids).backward()))
    net.norm.bias = old
    output = model(ids)
    net.added = nn.Linear(output.shape[-1], 2)
    found.append(_said(lambda: net.added(output).sum().backward()))
    del net.added
    found.append(_said(lambda: loss_of(model(ids), ids).backward()))
    return found


def own_gradients(parameters: dict[str, Any]) -> dict[str, str]:
    """Gradients that no backward has reduced, and others that are the same on all replicas."""
    model, _ = _linears(parameters)
    net = model.module
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    ids = data(replica_of(parameters))[0]
    trained = [p for p in net.parameters() if p.requires_grad]

    def assigned() -> Any:
        optimizer.zero_grad()
        for p, g in zip(trained, torch.autograd.grad(loss_of(model(ids), ids), trained), strict=True):
            p.grad = g
        return loss_of(net(ids), ids).detach()

    def copied() -> None:
        for p, g in zip(trained, torch.autograd.grad(loss_of(model(ids), ids), trained), strict=True):
            assert p.grad is not None
            p.grad.copy_(g)

    def backward() -> None:
        optimizer.zero_grad()
        loss_of(model(ids), ids).backward()

    found = {}
    assigned()
    found["assigned"] = _said(optimizer.step)
    backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    for p in trained:
        assert p.grad is not None
        p.grad.mul_(0.5)
    found["in place"] = _said(optimizer.step)
    found["twice"] = _said(optimizer.step)
    copied()
    found["copied"] = _said(optimizer.step)
    backward()
    for p in trained:
        assert p.grad is not None
        p.grad = p.grad * 0.5
    found["scaled"] = _said(optimizer.step)
    optimizer.zero_grad()
    found["in a closure"] = _said(lambda: optimizer.step(assigned))
    return found


def outside_parameters() -> dict[str, str]:
    """Of no wrapped model: a criterion's, and copies that are stepped in the place of the model's."""
    model, _ = _linears(DP)
    ids = data(smp.dp_rank())[0]
    net = model.module
    found = {}
    output = model(ids)
    torch.manual_seed(0)
    criterion = nn.Linear(output.shape[-1], 1)
    criterion(output).mean().backward()
    found["criterion"] = _said(torch.optim.SGD(criterion.parameters(), lr=0.1).step)
    copies = [nn.Parameter(p.detach().double()) for p in net.parameters()]
    for each, p in zip(copies, net.parameters(), strict=True):
        each.grad = None if p.grad is None else p.grad.double()
    found["copies"] = _said(torch.optim.SGD(copies, lr=0.1).step)
    return found


def cleared_on_one(set_to_none: bool) -> tuple[str, str]:
    """Only rank 0 clears gradients; then all train on."""
    model, optimizer = _linears(DP)
    ids = data(smp.dp_rank())[0]
    loss_of(model(ids), ids).backward()
    optimizer.step()
    if smp.rank() == 0:
        optimizer.zero_grad(set_to_none=set_to_none)
    said = _said(lambda: loss_of(model(ids), ids).backward())
    return said, _said(lambda: loss_of(model(ids), ids).backward())


def drifted(passes: int, name: str) -> str:
    """After some passes rank 1 changes one parameter."""
    model, _ = _linears(DP)
    ids = data(smp.dp_rank())[0]
    for _ in range(passes):
        loss_of(model(ids), ids).backward()
    parameter = model.module.get_parameter(name)
    with torch.no_grad():
        parameter.mul_(1 + 1e-6 * smp.rank())
    return _said(lambda: loss_of(model(ids), ids).backward())


def without_no_sync() -> tuple[str, bool]:
    model, _ = _linears(DP)
    return _said(lambda: model.no_sync()), hasattr(model, "no_sync")


def norm_by_hand() -> str:
    """A rank would scale gradients by the norm of what it holds."""
    model, _ = _linears(TP)
    ids = data(0)[0]
    loss_of(model(ids), ids).backward()
    return _said(
        lambda: torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    )
