"""What the tests of SMP's sharded data parallelism run in the ranks, and beside them in plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.nn.guarding import plain as plain_of
from smp_lite.nn.layout import layout_of
from smp_lite.session import current
from tests.tensor.runtime_cases import CLASSES, WIDTH, Block, Net, batches, split
from tests.tensor.sharded_cases import Shared, Twice


class Unused(Net):
    """A layer that nobody calls, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Counting(nn.Module):
    """Buffers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.out = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("silent", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(x))
        for block in self.blocks:
            x = block(x) * self.table[1]
        return self.out(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "tied": lambda: Net(tied=True),
    "dropout": lambda: Net(dropout=0.3),
    "shared": Shared,
    "twice": Twice,
    "unused": Unused,
    "counting": Counting,
    "one unit": lambda: Block(WIDTH),
}


def config(degree: int, **more: Any) -> dict[str, Any]:
    """Parameters of SMP."""
    return {
        "pipeline_parallel_degree": 1,
        "ddp": True,
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 0,
        "sdp_gradient_clipping": 0.0,
        **more,
    }


def groups_of(net: nn.Module, kind: str) -> Any:
    """Parameters as a script would give them to the optimizer."""
    if kind == "two":
        decays = [p for p in net.parameters() if p.dim() > 1]
        rest = [p for p in net.parameters() if p.dim() <= 1]
        return [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if kind == "some":
        return [p for name, p in net.named_parameters() if "norm" not in name]
    return list(net.parameters())


def train(
    parameters: dict[str, Any],
    model: str = "net",
    *,
    num_steps: int = 3,
    optimizer: str = "AdamW",
    groups: str = "all",
    passes: int = 1,
    clip: float | None = None,
    half: bool = False,
    freeze_at: int | None = None,
    closure: bool = False,
    scheduler: bool = False,
    checkpointing: bool = False,
    options: dict[str, Any] | None = None,
    save: str | None = None,
    resume: str | None = None,
    resume_with: dict[str, Any] | None = None,
    save_at: int = 2,
    after_a_step: bool = False,
    partial: bool = True,
    user_content: Any = None,
) -> dict[str, Any]:
    """Trains; what there is at the end, whole, and how much of it lay here."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = MODELS[model]()
    if parameters.get("tensor_parallel_degree", 1) > 1:
        split(net, current().axis("tp"))
    if half:
        net.bfloat16()
    members = groups_of(net, groups)
    wrapped = smp.DistributedModel(net, **(options or {}))
    optim = smp.DistributedOptimizer(getattr(torch.optim, optimizer)(members, lr=0.05))
    if checkpointing:
        for block in net.blocks:
            smp.set_activation_checkpointing(block)
    rates = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5) if scheduler else None

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(wrapped(x)[:, :CLASSES].float(), y)
        wrapped.backward(loss)
        return loss

    data = batches(num_steps * passes, smp.rdp_rank())
    if half:
        data = [(x.bfloat16(), y) for x, y in data]
    user, first = None, 0
    if resume is not None:
        if after_a_step:
            optim.zero_grad()
            step(*data[0])
            optim.step()
        user = smp.resume_from_checkpoint(resume, "tag", partial=partial, **(resume_with or {}))
        first = save_at
    losses, norms = [], []
    for number in range(first * passes, num_steps * passes):
        x, y = data[number]
        if save is not None and number == save_at * passes:
            smp.save_checkpoint(save, "tag", partial, wrapped, optim, user_content)
        if freeze_at is not None and number == freeze_at * passes:
            net.blocks[1].up.weight.requires_grad_(False)
        if number % passes == 0:
            optim.zero_grad()

        def evaluate(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optim.zero_grad()
            return float(step(x, y).reduce_mean())

        if closure:
            losses.append(optim.step(evaluate))
        else:
            losses.append(step(x, y).reduce_mean().item())
            if (number + 1) % passes == 0:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(wrapped.parameters(), clip)
                optim.step()
        if rates is not None:
            rates.step()
        with contextlib.suppress(AttributeError):
            norms.append(optim._global_grad_norm)
    sharded = wrapped.runtime.sharded
    state = optim.local_state_dict()["state"]
    local = list(wrapped.local_parameters())
    found = {
        "losses": losses,
        "norms": norms,
        "user": user,
        "state": wrapped.state_dict(),
        "optimizer": optim.state_dict(),
        "rate": optim.param_groups[0]["lr"],
        "elements": sum(plain_of(parameter).numel() for parameter in local),
        "memory": sum(p.untyped_storage().nbytes() for p in _storages(local)),
        "of_state": sum(v.numel() for s in state.values() for v in s.values() if v.dim()),
        "gradients": sum(plain_of(p.grad).numel() for p in local if p.grad is not None),
        "wholes": sum(layout_of(p) is None for p in local),
    }
    if sharded is not None:
        found |= {
            "most_live": sharded.most_live_elements,
            "groups": [group.num_elements for group in sharded.groups],
            "largest": wrapped.runtime.reducer.largest_of_pieces,
            "slices": _slices(wrapped, optim),
        }
    return found


def _storages(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({tensor.untyped_storage()._cdata: tensor.detach() for tensor in tensors}.values())


def _slices(wrapped: Any, optim: Any) -> list[dict[str, Any]]:
    """By name, of each group: what scripts read."""
    names = {id(p): name for name, p in wrapped.local_named_parameters()}
    found = []
    for group, flat in zip(optim.fp16_groups, optim.fp32_partitioned_groups_flat, strict=True):
        of_group = {
            names[id(p)]: (
                tuple(p.ds_shape),
                p.ds_numel,
                p.ds_tensor.ds_numel,
                p.ds_tensor.data.float().clone(),
            )
            for p in group
        }
        if group:
            # In half precision it is the masters', which the parameters are when they are rounded.
            own = torch.cat([piece for *_, piece in of_group.values()])
            assert flat.dtype == torch.float32 and torch.equal(flat.to(group[0].dtype).float(), own)
        found.append(of_group)
    return found


def plain(
    num_ranks: int,
    model: str = "net",
    *,
    num_steps: int = 3,
    optimizer: str = "AdamW",
    groups: str = "all",
    clip: float | None = None,
    microbatches: int = 1,
    average: bool = True,
) -> dict[str, Any]:
    """One process and plain torch, on the batches of all ranks."""
    torch.manual_seed(0)
    net = MODELS[model]()
    optim = getattr(torch.optim, optimizer)(groups_of(net, groups), lr=0.05)
    data = [batches(num_steps, rank) for rank in range(num_ranks)]
    losses, norms = [], []
    for number in range(num_steps):
        optim.zero_grad()
        for rank in range(num_ranks):
            x, y = data[rank][number]
            loss = torch.stack(
                [
                    F.cross_entropy(net(part)[:, :CLASSES], of_part)
                    for part, of_part in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
                ]
            )
            (loss.mean() if average else loss.sum()).div(num_ranks).backward()
            if rank == 0:
                losses.append(loss.mean().item())
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), clip)))
        optim.step()
    return {"losses": losses, "norms": norms, "state": net.state_dict(), "optimizer": optim.state_dict()}


def before_a_step(parameters: dict[str, Any], what: str) -> Any:
    """What a script finds right after smp.DistributedOptimizer."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Counting()
    whole = {name: p.detach().clone() for name, p in net.named_parameters()}
    wrapped = smp.DistributedModel(net)
    optim = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(net, "two"), lr=0.05))
    if what == "slices":
        import torch.distributed as dist

        group = optim.ds_param_shard_group
        names = {id(p): name for name, p in net.named_parameters()}
        for _ in range(2):
            for of_group in optim.fp16_groups:
                for p in of_group:
                    rows = [torch.empty_like(p.ds_tensor.data) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(rows, p.ds_tensor.data, group=group)
                    full = torch.cat(rows)[: p.ds_numel].view(p.ds_shape)
                    assert torch.equal(full, whole[names[id(p)]]), names[id(p)]
            # Slices are views: also after the values have changed.
            with torch.no_grad():
                for name, p in net.named_parameters():
                    p.mul_(2.0)
                    whole[name] *= 2.0
        return _slices(wrapped, optim), optim._global_grad_norm
    told = {}
    parameter = next(iter(wrapped.parameters()))
    reads: dict[str, Callable[[], Any]] = {
        "ds_tensor": lambda: parameter.ds_tensor.data,
        "fp16_groups": lambda: optim.fp16_groups,
        "flat": lambda: optim.fp32_partitioned_groups_flat,
        "norm": lambda: optim._global_grad_norm,
        "shape": lambda: (tuple(parameter.ds_shape), parameter.ds_numel, parameter.ds_tensor.ds_numel),
    }
    for name, read in reads.items():
        try:
            told[name] = read()
        except AttributeError as error:
            told[name] = str(error)
    return told


def ranks_of_groups(parameters: dict[str, Any]) -> dict[str, Any]:
    """Who is with whom, for the script and for the mechanism."""
    import torch.distributed as dist

    smp.init(parameters)
    session = current()
    group = session.process_groups.get("SDP")
    return {
        "dp": (smp.dp_rank(), smp.dp_size(), smp.get_dp_group()),
        "rdp": (smp.rdp_rank(), smp.rdp_size(), smp.get_rdp_group()),
        "mp": smp.get_mp_group(),
        "shares": list(session.axis("sdp").ranks) if session.shard_axes else None,
        "process group": dist.get_process_group_ranks(group) if group is not None else None,
        "copies": list(session.group(session.copies)),
    }


def refused(parameters: dict[str, Any], what: str, folder: str = "") -> str:
    """What a script is told."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Net()
    if what == "unfrozen":
        net.blocks[1].up.weight.requires_grad_(False)
    live = net.state_dict()
    if what == "shared memory":
        net.blocks[1].up.weight.data = net.blocks[0].up.weight.data
    wrapped = smp.DistributedModel(net)
    kind: Any = torch.optim.AdamW

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(wrapped(x), y)
        wrapped.backward(loss)
        return loss

    x, y = batches(1, smp.rdp_rank())[0]
    try:
        optim = smp.DistributedOptimizer(kind(wrapped.parameters(), lr=0.05))
        step(x, y)
        optim.step()
        if what == "unfrozen":
            net.blocks[1].up.weight.requires_grad_(True)
            step(x, y)
        elif what == "live state":
            float(live["blocks.0.up.weight"].sum())
        elif what == "inner step":
            optim.optimizer.step()
        elif what == "smp.save":
            smp.save({"model": wrapped.local_state_dict()}, folder, partial=True)
        elif what == "user content":
            smp.save_checkpoint(folder, "tag", user_content=[1])
        elif what == "taken":
            smp.save_checkpoint(folder, "tag", user_content={"param_shapes": 1})
        elif what == "resumes":
            smp.resume_from_checkpoint(folder, "tag")
    except (smp.SMPError, ValueError, TypeError, FileNotFoundError, RuntimeError) as error:
        return str(error)
    return ""


def gathers(parameters: dict[str, Any]) -> dict[str, Any]:
    """What ``smp.gathered`` shows, and what becomes of changes in it."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Counting()
    wrapped = smp.DistributedModel(net)
    optim = smp.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=0.05))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(wrapped(x), y)
        wrapped.backward(loss)
        return loss

    data = batches(3, smp.rdp_rank())
    step(*data[0])
    optim.step()
    gradients = {name: p.grad for name, p in wrapped.local_named_parameters()}
    found: dict[str, Any] = {"before": wrapped.state_dict()}
    with smp.gathered(wrapped) as module:
        found["types"] = {type(p).__name__ for p in module.parameters()}
        found["inside"] = {key: value.clone() for key, value in module.state_dict().items()}
        found["output"] = module.eval()(data[0][0]).detach()
        module.train()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2.0)
    assert all(p.grad is gradients[name] for name, p in wrapped.local_named_parameters())
    found["after"] = wrapped.state_dict()
    try:
        with smp.gathered(wrapped, rank=0) as module:
            if smp.rank() == 0:
                with torch.no_grad():
                    module.embed.weight.zero_()
        found["told"] = ""
    except smp.SMPError as error:
        found["told"] = str(error)
    optim.zero_grad()
    step(*data[1])
    optim.step()
    found["memory"] = sum(p.untyped_storage().nbytes() for p in _storages(list(wrapped.local_parameters())))
    found["loss"] = step(*data[2]).reduce_mean().item()
    return found
