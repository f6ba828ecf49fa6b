"""What the tests of half precision and sharded optimizer state run in the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

import smp_lite as smp
from smp_lite.nn.guarding import plain
from smp_lite.nn.layout import layout_of, whole_of
from smp_lite.session import current
from tests.tensor.runtime_cases import Net, batches, split


def build(parameters: Any, optimizer: str = "AdamW", **settings: Any) -> torch.optim.Optimizer:
    """Vectors are in a group without decay."""
    members = list(parameters)
    decayed = [p for p in members if p.dim() > 1]
    plain = {"params": [p for p in members if p.dim() < 2], "weight_decay": 0.0}
    return getattr(torch.optim, optimizer)(
        [{"params": decayed, "weight_decay": 0.1}, plain], lr=0.01, **settings
    )


def net(*, frozen: bool = False, **options: Any) -> Net:
    torch.manual_seed(0)
    found = Net(**options)
    if frozen:
        found.blocks[1].up.weight.requires_grad_(False)
    return found


def train(
    parameters: dict[str, Any],
    *,
    num_steps: int = 4,
    optimizer: str = "AdamW",
    scaling: dict[str, Any] | None = None,
    clip: float | None = None,
    passes: int = 1,
    poison: Sequence[int] = (),
    poisoned_rank: int = 0,
    options_of_net: dict[str, Any] | None = None,
    is_split: bool = False,
    outside: bool = False,
    options: dict[str, Any] | None = None,
    same_batch: bool = False,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Losses, norms, scales, and at the end parameters, masters and the optimizer's state."""
    smp.init(parameters)
    module = net(**(options_of_net or {}))
    if is_split:
        split(module, current().axis("tp"))
    model = smp.DistributedModel(module, **(options or {}))
    optim = smp.DistributedOptimizer(build(model.parameters(), optimizer), **(scaling or {}))
    if checkpointing:
        for block in module.blocks:
            smp.set_activation_checkpointing(block)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    def plainly(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss.item()

    replica = 0 if same_batch else smp.rdp_rank()
    losses, norms, scales, skipped = [], [], [], []
    for number, (x, y) in enumerate(batches(num_steps * passes, replica)):
        if number % passes == 0:
            optim.zero_grad()
        losses.append(plainly(x, y) if outside else step(x, y).reduce_mean().item())
        if (number + 1) % passes:
            continue
        if (number + 1) // passes - 1 in poison and smp.rank() == poisoned_rank:
            next(p for p in model.local_parameters() if p.grad is not None).grad[0] = math.inf
        if clip is not None:
            norms.append(optim.clip_master_grads(clip))
        optim.step()
        skipped.append(optim.overflow)
        if parameters.get("fp16"):
            scales.append(optim.loss_scale)
    masters = {}
    elements = 0
    for name, parameter in model.local_named_parameters():
        stand_in = optim.stand_in_of(parameter)
        elements += sum(
            plain(value).numel()  # of what is here: a piece has the sizes of its whole, to a script
            for value in optim.state.get(parameter, {}).values()
            if torch.is_tensor(value) and value.dim()
        )
        layout = layout_of(stand_in)
        masters[name] = whole_of(stand_in.detach(), layout) if layout is not None else stand_in.detach()
    return {
        "losses": losses,
        "norms": norms,
        "scales": scales,
        "skipped": skipped,
        "state": model.state_dict(),
        "masters": masters,
        "optimizer": optim.state_dict(),
        "elements": elements,
        "coordinate": (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()),
    }


def resume(
    parameters: dict[str, Any],
    path: str,
    kind: str,
    *,
    changed: dict[str, Any] | None = None,
    scaling: dict[str, Any] | None = None,
    num_steps: int = 3,
) -> dict[str, Any]:
    """Losses of a run of twice as many steps, and those of one that stops half-way and is resumed."""

    def run(first: int, last: int, found: dict[str, Any], *, resumed: bool, saves: bool) -> Any:
        smp.init(found)
        model = smp.DistributedModel(net())
        optim = smp.DistributedOptimizer(build(model.parameters(), "AdamW"), **(scaling or {}))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optim.optimizer, 0.9)

        @smp.step
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            model.backward(loss)
            return loss

        arguments: dict[str, Any] = (
            {"portable": True} if kind == "portable" else {"partial": kind == "partial"}
        )
        if resumed:
            content = smp.resume_from_checkpoint(path, tag="t", partial=kind != "full")
            schedule.load_state_dict(content["schedule"])
        losses = []
        for x, y in batches(2 * num_steps)[first:last]:
            optim.zero_grad()
            losses.append(step(x, y).reduce_mean().item())
            optim.clip_master_grads(0.5)
            optim.step()
            schedule.step()
        if saves:
            content = {"schedule": schedule.state_dict()}
            smp.save_checkpoint(path, "t", model=model, optimizer=optim, user_content=content, **arguments)
        state = optim.state_dict()
        smp.reset()
        return losses, state

    whole, state = run(0, 2 * num_steps, parameters, resumed=False, saves=False)
    before, _ = run(0, num_steps, parameters, resumed=False, saves=True)
    after, resumed_state = run(
        num_steps, 2 * num_steps, {**parameters, **(changed or {})}, resumed=True, saves=False
    )
    smp.init(parameters)
    same = torch.equal if changed is None else torch.allclose
    differs = [
        (i, key)
        for i, entry in state["state"].items()
        for key, value in entry.items()
        if not same(value, resumed_state["state"][i][key])
    ]
    return {"whole": whole, "resumed": before + after, "differs": differs}


class FirstElement(torch.optim.SGD):
    """Steps by the largest element of each gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.abs().max())


def refusals(parameters: dict[str, Any]) -> dict[str, str]:
    """Texts of errors."""
    smp.init(parameters)
    model = smp.DistributedModel(net())
    found = {}

    def attempt(name: str, call: Any) -> Any:
        try:
            return call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        return None

    for kind in ("Adafactor", "Muon", "LBFGS"):
        if hasattr(torch.optim, kind):
            attempt(kind, lambda kind=kind: smp.DistributedOptimizer(_matrices(model, kind)))
    attempt("own", lambda: smp.DistributedOptimizer(FirstElement(model.parameters(), lr=0.1)))
    lamb = smp.optimizers.FusedLAMB(model.parameters(), max_grad_norm=0)
    attempt("FusedLAMB", lambda: smp.DistributedOptimizer(lamb))
    return found


def _matrices(model: Any, kind: str) -> torch.optim.Optimizer:
    return getattr(torch.optim, kind)([p for p in model.parameters() if p.dim() == 2], lr=0.1)


def views(parameters: dict[str, Any], path: str) -> dict[str, Any]:
    """What scripts do with shards: local state dicts, gathered or not, files by rank, names."""
    smp.init(parameters)
    model = smp.DistributedModel(net())
    optim = smp.DistributedOptimizer(build(model.parameters()))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    def run(first: int, last: int) -> list[float]:
        losses = []
        for x, y in batches(last, smp.rdp_rank())[first:]:
            optim.zero_grad()
            losses.append(step(x, y).reduce_mean().item())
            optim.step()
        return losses

    run(0, 2)
    own = optim.local_state_dict(gather_if_shard=False)
    gathered = optim.local_state_dict(gather_if_shard=True)
    weights = model.state_dict()
    smp.save({"optimizer": own, "model": model.local_state_dict()}, f"{path}/own", partial=True, v3=True)
    if smp.rdp_rank() == 0:
        smp.save({"optimizer": gathered, "model": model.local_state_dict()}, f"{path}/all", partial=True)
    smp.barrier()
    after = run(2, 4)
    found: dict[str, Any] = {
        "gathered": isinstance(gathered["state"], list) and len(gathered["state"]),
        "elements": sum(s["exp_avg"].numel() for s in own["state"].values()),
        "raw": sorted(optim.orig_state_dict()) == ["param_groups", "state"],
        "virtual": sum(p.numel() for _, p in model.virtual_named_parameters()),
        "indices": [optim._param_id_to_index()[id(p)] for _, p in model.virtual_named_parameters()],
        "again": [],
    }
    pp, tp, rdp = smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()
    for name, gather in ((f"{path}/all_{pp}_{tp}", True), (f"{path}/own_{pp}_{tp}_{rdp}", False)):
        content = torch.load(name)
        model.load_state_dict(weights)
        optim.load_state_dict(content["optimizer"], gather)
        found["again"].append(run(2, 4) == after)
    try:
        other = torch.load(f"{path}/own_{pp}_{tp}_{1 - rdp}")
        optim.load_state_dict(other["optimizer"], False)
    except ValueError as error:
        found["other"] = str(error)
    return found


def scaled(parameters: dict[str, Any]) -> dict[str, Any]:
    """torch's clipping and a GradScaler over sharded state, on the whole gradients."""
    smp.init(parameters)
    model = smp.DistributedModel(net())
    optim = smp.DistributedOptimizer(build(model.parameters()))
    scaler = smp.amp.GradScaler("cpu", init_scale=16.0)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(scaler.scale(loss))
        return loss

    norms = []
    for x, y in batches(3, smp.rdp_rank()):
        optim.zero_grad()
        step(x, y)
        scaler.unscale_(optim)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        scaler.step(optim)
        scaler.update()
    return {"norms": norms, "state": model.state_dict()}


def one_number(parameters: dict[str, Any]) -> dict[str, Any]:
    """A parameter without dimensions: its state is saved, loaded and stepped on."""
    smp.init(parameters)
    model = smp.DistributedModel(Scaled())
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(3):
        optim.zero_grad()
        model.backward(model(torch.ones(3)))
        optim.step()
        optim.load_state_dict(optim.state_dict())
        optim.load_state_dict(optim.local_state_dict(gather_if_shard=False))
    return {"state": model.state_dict(), "optimizer": optim.state_dict()["state"]}


class Scaled(torch.nn.Module):
    """A row of numbers, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.row = torch.nn.Parameter(torch.ones(3))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.row * self.scale).square().sum()
