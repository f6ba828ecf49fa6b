"""What training loops do with gradients and optimizers: clipping, groups, schedules, averages of weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils

from tests.programs import program


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A backbone of residual blocks with a head."""

    def __init__(self, width: int = 12, classes: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    """With batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.fc = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(x)).flatten(1))


def batches(smp: Any, steps: int = 3, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11 + smp.dp_rank())
    for _ in range(steps):
        yield torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def make_step(smp: Any) -> Callable[..., Any]:
    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    return train_step


# Clipping --------------------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2), static=True)
def clip_by_model(smp: Any, out: Any) -> None:
    """Clips model.parameters() and logs the norm, as every tutorial does."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        loss = step(model, x, y).reduce_mean()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        out.value("loss", loss.item())
        out.value("norm", norm.item())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def clip_by_net(smp: Any, out: Any) -> None:
    """Clips by the unwrapped network that the script kept, with error_if_nonfinite."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        out.value("norm", nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True))
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def clip_by_optimizer_groups(smp: Any, out: Any) -> None:
    """Each group of the optimizer is clipped to its own norm; the norms are logged."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(
            [
                {"params": net.stem.parameters(), "max_norm": 0.1},
                {"params": net.blocks.parameters(), "lr": 0.05, "max_norm": 0.3},
                {"params": net.head.parameters(), "lr": 0.2, "max_norm": 0.2},
            ],
            lr=0.1,
        )
    )
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad(set_to_none=True)
        step(model, x, y)
        for i, group in enumerate(optimizer.param_groups):
            norm = torch.nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
            out.value(f"norm of group {i}", float(norm))
        optimizer.step()
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def clip_by_early_list(smp: Any, out: Any) -> None:
    """The list of trainable parameters is taken before the first step; the norm is the largest entry."""
    model = smp.DistributedModel(Net())
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(trainable, lr=0.01))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        norm = torch.nn.utils.clip_grad_norm_(trainable, 0.01, norm_type=math.inf)
        out.value("norm", norm)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def clip_by_value(smp: Any, out: Any) -> None:
    """clip_grad_value_, and how many entries were at the limit."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    for x, y in batches(smp):
        model.zero_grad()
        step(model, x, y)
        torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=0.02)
        clipped = sum((p.grad.abs() >= 0.02).sum().item() for p in model.parameters() if p.grad is not None)
        out.value("clipped", clipped)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def norm_by_hand(smp: Any, out: Any) -> None:
    """The total norm written out as in nanoGPT's forks, and a log line for each layer."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        total = 0.0
        logs = {}
        for name, p in net.named_parameters():
            if p.grad is None:
                continue
            size = p.grad.detach().data.norm(2).item()
            logs[f"grad/{name}"] = size
            total += size**2
        total = total**0.5
        if total > 0.5:
            for p in net.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5 / (total + 1e-6))
        out.value("total", total)
        out.value("logs", logs)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def adaptive_clipping(smp: Any, out: Any) -> None:
    """NFNet's adaptive gradient clipping: each row's gradient against its weights' norm."""

    def unitwise(t: Tensor) -> Tensor:
        return t.norm() if t.ndim <= 1 else t.norm(dim=tuple(range(1, t.ndim)), keepdim=True)

    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2, nesterov=True, momentum=0.8)
    )
    step = make_step(smp)
    head = set(net.head.parameters())
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        for p in model.parameters():
            if p.grad is None or p in head:
                continue
            limit = unitwise(p.detach()).clamp_(min=1e-3).mul_(0.05)
            size = unitwise(p.grad.detach())
            clipped = p.grad.detach() * (limit / size.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(size < limit, p.grad.detach(), clipped))
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def total_norm_helpers(smp: Any, out: Any) -> None:
    """get_total_norm and clip_grads_with_norm_, the two halves of clip_grad_norm_ of newer torch."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp, size=16):
        optimizer.zero_grad()
        for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):  # accumulation
            step(model, half_x, half_y)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients, foreach=True)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.7, total)
        out.value("total", total)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def clip_running_average(smp: Any, out: Any) -> None:
    """AutoClip: the limit is the median of the norms seen so far, so that the norm decides what is learnt."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    step = make_step(smp)
    history: list[float] = []
    for x, y in batches(smp, steps=4):
        optimizer.zero_grad()
        step(model, x, y)
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        history.append(norm.item())
        limit = sorted(history)[len(history) // 2]
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    out.value("history", history)
    out.model(model)


# Accumulation, several optimizers, groups ----------------------------------------------------------------


@program(stages=(2,), ranks=(2,))
def accumulate(smp: Any, out: Any) -> None:
    """Gradients over two steps with the loss divided in the step function, the last batch incomplete."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    accumulation = 2

    @smp.step
    def micro(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / accumulation
        model.backward(loss)
        return loss.detach()

    data = list(batches(smp, steps=5))
    running = 0.0
    for i, (x, y) in enumerate(data):
        running += micro(model, x, y).reduce_mean().item()
        if (i + 1) % accumulation == 0 or i + 1 == len(data):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            out.value("running", running)
            running = 0.0
    out.model(model)


@program(stages=(2,), ranks=(2,), static=True)
def two_optimizers(smp: Any, out: Any) -> None:
    """The backbone by SGD, the head by Adam, which steps every second time only."""
    net = Net()
    model = smp.DistributedModel(net)
    body = [p for n, p in net.named_parameters() if not n.startswith("head")]
    slow = smp.DistributedOptimizer(torch.optim.SGD(body, lr=0.1))
    fast = smp.DistributedOptimizer(torch.optim.Adam(net.head.parameters(), lr=0.05))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, steps=4)):
        slow.zero_grad()
        loss = step(model, x, y)
        slow.step()
        if i % 2:
            fast.step()
            fast.zero_grad()
        out.value("loss", loss.reduce_mean())
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def no_decay_by_name(smp: Any, out: Any) -> None:
    """Two groups by name as in the transformers examples: no decay for biases and norms."""
    model = smp.DistributedModel(Net())
    no_decay = ("bias", "norm.weight")
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.3,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    out.value("sizes", [sum(p.numel() for p in g["params"]) for g in groups])
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.95)))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def layerwise_rates(smp: Any, out: Any) -> None:
    """Learning rates that decay by layer, one group for each block, changed by hand at a later step."""
    net = Net()
    model = smp.DistributedModel(net)
    base, decay = 0.1, 0.7
    groups = [{"params": list(net.head.parameters()), "lr": base, "name": "head"}]
    for depth, block in enumerate(reversed(net.blocks)):
        groups.append(
            {"params": list(block.parameters()), "lr": base * decay ** (depth + 1), "name": f"block{depth}"}
        )
    groups.append({"params": list(net.stem.parameters()), "lr": base * decay**5, "name": "stem"})
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(groups, lr=base, momentum=0.5))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        if i == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        out.value("rates", {g["name"]: g["lr"] for g in optimizer.param_groups})
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="add_param_group after partition")
def freeze_and_thaw(smp: Any, out: Any) -> None:
    """fast.ai's way: the head alone first, then the backbone is unfrozen and added to the optimizer."""
    net = Net()
    for p in net.parameters():
        p.requires_grad = False
    for p in net.head.parameters():
        p.requires_grad = True
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1, momentum=0.9)
    )
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, steps=4)):
        if i == 2:
            for p in net.blocks[-1].parameters():
                p.requires_grad_(True)
            optimizer.add_param_group({"params": net.blocks[-1].parameters(), "lr": 0.01})
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        out.value("trainable", sum(p.numel() for p in model.parameters() if p.requires_grad))
        out.value("without gradient", sum(p.grad is None for p in net.head.parameters()))
    out.model(model)


# Optimizers ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, weight_decay=0.01),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw_amsgrad_for_loop": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False),
    "adam_maximize": lambda p: torch.optim.Adam(p, lr=0.001, maximize=True),
    "adam_tensor_rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "sgd_nesterov_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}
if hasattr(torch.optim, "Muon"):  # not in torch 2.8
    OPTIMIZERS["muon"] = lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.02)


def _with_optimizer(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def function(smp: Any, out: Any) -> None:
        model = smp.DistributedModel(Net())
        optimizer = smp.DistributedOptimizer(make(model.parameters()))
        step = make_step(smp)
        for x, y in batches(smp):
            optimizer.zero_grad()
            out.value("loss", step(model, x, y).reduce_mean())
            optimizer.step()
        out.model(model)

    function.__name__ = f"optimizer_{name}"
    function.__doc__ = f"Trains by {name} of torch.optim."
    program(stages=(2,), ranks=(2,) if name in ("adafactor", "muon", "asgd") else ())(function)


for _name, _make in OPTIMIZERS.items():
    _with_optimizer(_name, _make)


@program(stages=(2,), ranks=(2,), refused="looks at all parameters at once")
def lbfgs(smp: Any, out: Any) -> None:
    """LBFGS with its closure and a line search: dot products over all weights steer the way."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(
        torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=3, history_size=3, line_search_fn="strong_wolfe"
        )
    )
    step = make_step(smp)
    for x, y in batches(smp, steps=2):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            return step(model, x, y).reduce_mean()

        out.value("loss", optimizer.step(closure))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def closure_with_adam(smp: Any, out: Any) -> None:
    """A closure given to Adam, as Lightning does; step() returns its loss."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    step = make_step(smp)
    for x, y in batches(smp):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            return step(model, x, y).reduce_mean()

        out.value("loss", optimizer.step(closure))
    out.model(model)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as in davda54/sam."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> Tensor:
        norm = torch.norm(
            torch.stack(
                [p.grad.norm(2) for g in self.param_groups for p in g["params"] if p.grad is not None]
            )
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()
        return norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "old" in self.state[p]:
                    p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def sharpness_aware(smp: Any, out: Any) -> None:
    """SAM as an optimizer of one's own, not wrapped: the norm over all weights sets the climb."""
    model = smp.DistributedModel(Net())
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
    step = make_step(smp)
    for x, y in batches(smp):
        out.value("loss", step(model, x, y).reduce_mean())
        out.value("norm", optimizer.first_step())
        step(model, x, y)
        optimizer.step()
    out.model(model)


class Lookahead:
    """Slow weights as in Zhang et al., around any optimizer; not a torch.optim.Optimizer."""

    def __init__(self, optimizer: Any, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in optimizer.param_groups]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            # As published, without strict: lists of other lengths would pair the wrong ones.
            for group, slow in zip(self.optimizer.param_groups, self.slow):
                for p, q in zip(group["params"], slow):
                    q.add_(p.data - q, alpha=self.alpha)
                    p.data.copy_(q)


@program(stages=(2,), ranks=(2, 3))
def lookahead_in_step_with_groups(smp: Any, out: Any) -> None:
    """Lookahead over the wrapped optimizer's groups, whose places are those of the slow weights."""
    model = smp.DistributedModel(Net())
    optimizer = Lookahead(smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02)))
    step = make_step(smp)
    for x, y in batches(smp, steps=4):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def lookahead(smp: Any, out: Any) -> None:
    """Lookahead with slow weights copied before the first step."""
    model = smp.DistributedModel(Net())
    inner = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    optimizer = Lookahead(inner)
    step = make_step(smp)
    for x, y in batches(smp, steps=4):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
    out.value("sum of the slow weights", sum(float(q.double().sum()) for g in optimizer.slow for q in g))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="while an smp.step runs")
def optimizer_in_backward(smp: Any, out: Any) -> None:
    """torch's tutorial: one optimizer for each parameter, stepped by a hook after its gradient."""
    model = smp.DistributedModel(Net())
    optimizers = {p: torch.optim.Adam([p], lr=0.01, foreach=False) for p in model.parameters()}

    def hook(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    step = make_step(smp)
    for x, y in batches(smp):
        out.value("loss", step(model, x, y))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="a hook changed the parameter")
def descent_in_backward(smp: Any, out: Any) -> None:
    """The same idea without an optimizer: the hook takes its step of gradient descent through p.data."""
    model = smp.DistributedModel(Net())

    def hook(p: nn.Parameter) -> None:
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    step = make_step(smp)
    for x, y in batches(smp):
        out.value("loss", step(model, x, y))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def gradient_hooks(smp: Any, out: Any) -> None:
    """Gradient centralisation by a hook on each weight, set before wrapping, and a clamp on the head's."""
    net = Net()
    for p in net.parameters():
        if p.ndim > 1:
            p.register_hook(lambda g: g - g.mean(dim=1, keepdim=True))
    net.head.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y))
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def gradient_noise(smp: Any, out: Any) -> None:
    """Annealed Gaussian noise on every gradient (Neelakantan et al.), from torch's global generator."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        step(model, x, y)
        sigma = math.sqrt(0.01 / (1 + i) ** 0.55)
        for p in model.parameters():
            if p.grad is not None:
                p.grad += sigma * torch.randn_like(p.grad)
        optimizer.step()
        out.value("noise", torch.rand(1).item())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def zeroing(smp: Any, out: Any) -> None:
    """Gradients zeroed in four spellings, and read while they are zero."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, steps=4)):
        if i == 0:
            optimizer.zero_grad(set_to_none=False)
        elif i == 1:
            for p in net.parameters():
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
        elif i == 2:
            for p in model.parameters():
                p.grad = None
        else:
            net.zero_grad(set_to_none=False)
            out.value(
                "sum when zero",
                sum(p.grad.abs().sum().item() for p in net.parameters() if p.grad is not None),
            )
        step(model, x, y)
        optimizer.step()
    out.model(model)
    optimizer.zero_grad(set_to_none=True)
    out.value("gradients left", sum(p.grad is not None for p in model.parameters()))


# Schedules -------------------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), static=True)
def plateau(smp: Any, out: Any) -> None:
    """ReduceLROnPlateau on the mean loss, with no patience."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
    step = make_step(smp)
    for x, y in batches(smp, steps=4):
        optimizer.zero_grad()
        loss = step(model, x, y).reduce_mean()
        optimizer.step()
        schedule.step(loss)
        out.value("rate", optimizer.param_groups[0]["lr"])
    out.model(model)


@program(stages=(2,), ranks=(2,))
def one_cycle(smp: Any, out: Any) -> None:
    """OneCycleLR with a peak for each group; momentum cycles as well."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(
            [
                {"params": net.stem.parameters()},
                {"params": net.blocks.parameters()},
                {"params": net.head.parameters()},
            ],
            lr=0.01,
            momentum=0.9,
        )
    )
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.1, 0.2], total_steps=5, pct_start=0.4)
    step = make_step(smp)
    for x, y in batches(smp, steps=4):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        schedule.step()
        out.value("cycle", [(g["lr"], g["momentum"]) for g in optimizer.param_groups])
    out.model(model)


@program(stages=(2,))
def warm_up_then_restarts(smp: Any, out: Any) -> None:
    """SequentialLR of a linear warm-up and cosine restarts, itself saved and loaded."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, steps=4)):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        schedule.step()
        if i == 1:
            saved = copy.deepcopy(schedule.state_dict())
            schedule.load_state_dict(saved)
        out.value("rate", schedule.get_last_lr())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def chained_schedules(smp: Any, out: Any) -> None:
    """ChainedScheduler and LambdaLR over the inner optimizer, made before it was wrapped."""
    net = Net()
    inner = torch.optim.Adam(
        [{"params": net.stem.parameters()}, {"params": [*net.blocks.parameters(), *net.head.parameters()]}],
        lr=0.05,
    )
    schedule = lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LambdaLR(inner, [lambda e: 1 / (1 + e), lambda e: 0.9**e]),
            lr_scheduler.ExponentialLR(inner, gamma=0.8),
        ]
    )
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(inner)
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        schedule.step()
        out.value("rates", [g["lr"] for g in optimizer.param_groups])
    out.model(model)


# Averages of weights ---------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,), refused_on_ranks="lives on stage")
def ema_of_a_copy(smp: Any, out: Any) -> None:
    """EMA by deepcopy of the network and zip of parameters; evaluated by calling the plain copy."""
    net = Net()
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), net.parameters(), strict=True):
                e.mul_(0.9).add_(p.data, alpha=0.1)
            out.value("averaged logits", ema(x))
    out.value("averaged weights", dict(ema.state_dict()))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def ema_copy_later(smp: Any, out: Any) -> None:
    """The copy is taken of the wrapped model's module after the first step; evaluated as a plain model."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    ema: nn.Module | None = None
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        if ema is None:
            ema = copy.deepcopy(model.get_module())
        else:
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.parameters(), strict=True):
                    e.lerp_(p, 0.25)
        with torch.no_grad():
            out.value("averaged logits", ema(x))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def averaged_model(smp: Any, out: Any) -> None:
    """swa_utils.AveragedModel of the network made before the first step, SWALR, update_bn at the end."""
    net = ConvNet()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    averaged = swa_utils.AveragedModel(net)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    step = make_step(smp)
    generator = torch.Generator().manual_seed(5)
    loader = [
        (torch.randn(8, 1, 4, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(3)
    ]
    for x, y in loader:
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        averaged.update_parameters(net)
        schedule.step()
        out.value("rate", schedule.get_last_lr())
    swa_utils.update_bn(loader, averaged)
    averaged.eval()
    with torch.no_grad():
        out.value("logits", averaged(loader[0][0]))
    out.value("averaged", dict(averaged.state_dict()))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def averaged_with_ema(smp: Any, out: Any) -> None:
    """AveragedModel of the wrapped model with get_ema_multi_avg_fn."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    averaged = swa_utils.AveragedModel(model.get_module(), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        averaged.update_parameters(model.get_module())
    out.value("averaged", dict(averaged.module.state_dict().items()))
    out.model(model)


class ShadowEMA:
    """The class that goes from repository to repository."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.shadow: dict[str, Tensor] = {}
        self.backup: dict[str, Tensor] = {}

    def register(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.shadow[name] = p.data.clone()

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                assert name in self.shadow
                self.shadow[name] = ((1.0 - self.decay) * p.data + self.decay * self.shadow[name]).clone()

    def apply_shadow(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.backup[name] = p.data
                p.data = self.shadow[name]

    def restore(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                p.data = self.backup[name]
        self.backup = {}


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def ema_shadow(smp: Any, out: Any) -> None:
    """The shadow class with apply_shadow around an evaluation step, which swaps p.data."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    ema = ShadowEMA(net, 0.7)
    ema.register()
    step = make_step(smp)

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        ema.update()
        ema.apply_shadow()
        model.eval()
        with torch.no_grad():
            out.value("averaged logits", evaluate(model, x).concat())
        ema.restore()
        model.train()
    out.value("shadow", dict(sorted(ema.shadow.items())))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def ema_of_state_dict(smp: Any, out: Any) -> None:
    """EMA of model.state_dict(), loaded into a fresh plain network at the end."""
    torch.manual_seed(4)
    model = smp.DistributedModel(ConvNet())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    step = make_step(smp)
    average: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        x = torch.randn(8, 1, 4, 4, generator=generator)
        optimizer.zero_grad()
        step(model, x, torch.randint(0, 3, (8,), generator=generator))
        optimizer.step()
        for name, value in model.state_dict().items():
            if name not in average or not value.is_floating_point():
                average[name] = value.clone()
            else:
                average[name] = 0.5 * average[name] + 0.5 * value
    fresh = ConvNet()
    fresh.load_state_dict(average)
    fresh.eval()
    with torch.no_grad():
        out.value("logits of the average", fresh(x))
    out.model(model)


# Weights looked at and changed ------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def weight_logging(smp: Any, out: Any) -> None:
    """Counts, histograms and the ratio of update to weight, as for TensorBoard, by named_parameters()."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    out.value("parameters", sum(p.numel() for p in model.parameters()))
    out.value("megabytes", sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20)
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        optimizer.step()
        for name, p in net.named_parameters():
            out.value(f"histogram of {name}", torch.histc(p.detach(), bins=4, min=-0.5, max=0.5))
            out.value(f"ratio of {name}", ((p.detach() - before[name]).std() / p.detach().norm()).item())
    out.value("parameters at the end", sum(p.numel() for p in model.parameters() if p.requires_grad))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def l2_in_the_step(smp: Any, out: Any) -> None:
    """An L1 and an L2 penalty from model.parameters() within the step function.

    A weight has two gradients, of the loss and of the penalty, which may be added the other way round.
    """
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), y)
        l1 = sum(p.abs().sum() for p in model.parameters())
        l2 = sum(p.pow(2).sum() for n, p in model.named_parameters() if "weight" in n)
        penalty = 1e-3 * l1 + 1e-2 * l2
        model.backward(loss + penalty)
        return loss, penalty

    for x, y in batches(smp):
        optimizer.zero_grad()
        loss, penalty = train_step(model, x, y)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("penalty", penalty.reduce_mean())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def l2_after_the_step(smp: Any, out: Any) -> None:
    """The penalty has a backward of its own between the step function and optimizer.step()."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        loss = step(model, x, y).reduce_mean()
        penalty = 0.01 * torch.stack([p.norm() for p in net.parameters()]).sum()
        penalty.backward()
        optimizer.step()
        out.value("total", (loss + penalty.detach()).item())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def orthogonal_penalty(smp: Any, out: Any) -> None:
    """||W'W - I|| of the weights of some modules within the step, picked by isinstance."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        for module in net.modules():
            if isinstance(module, nn.Linear) and module.out_features > 8:
                w = module.weight
                gram = w.t() @ w
                loss = loss + 1e-2 * (gram - torch.eye(gram.shape[0])).pow(2).sum()
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def weights_changed_by_hand(smp: Any, out: Any) -> None:
    """WGAN's clamp, a max-norm constraint and a decay by hand after each step, without an optimizer."""
    net = Net()
    model = smp.DistributedModel(net)
    step = make_step(smp)
    for x, y in batches(smp):
        out.value("loss", step(model, x, y).reduce_mean())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad.zero_()
            for block in net.blocks:
                block.up.weight.data.clamp_(-0.2, 0.2)
                block.down.weight.copy_(torch.renorm(block.down.weight, 2, 0, 0.8))
            net.head.weight.data = net.head.weight.data * 0.99
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="exp_avg_sq")
def optimizer_state_read(smp: Any, out: Any) -> None:
    """Adam's moments are read for logging through optimizer.state[p], and reset for the head halfway."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    step = make_step(smp)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
        moments = [optimizer.state[p]["exp_avg_sq"].mean().item() for p in model.parameters()]
        out.value("second moments", moments)
        if i == 1:
            for p in net.head.parameters():
                optimizer.state[p]["exp_avg"].zero_()
    out.value("calls", len(calls))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def scaler_and_autocast(smp: Any, out: Any) -> None:
    """GradScaler with bfloat16 autocast on the CPU: scale in the step, unscale, clip, step, update."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        model.backward(scaler.scale(loss))
        return loss, logits

    for x, y in batches(smp, steps=4):
        optimizer.zero_grad()
        loss, logits = train_step(model, x, y)
        scaler.unscale_(optimizer)
        out.value("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        out.value("loss", loss.reduce_mean())
        out.value("logits", logits.concat())
        out.value("scale", scaler.get_scale())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def torch_scaler(smp: Any, out: Any) -> None:
    """torch.amp's own GradScaler around bfloat16 autocast: scale in the step, unscale, clip, step, update."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        model.backward(scaler.scale(loss))
        return loss

    for x, y in batches(smp, steps=4):
        optimizer.zero_grad()
        loss = train_step(model, x, y)
        scaler.unscale_(optimizer)
        out.value("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        out.value("loss", loss.reduce_mean())
        out.value("scale", scaler.get_scale())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def autocast_alone(smp: Any, out: Any) -> None:
    """bfloat16 autocast around model and loss, no scaler; evaluation under autocast too, then in full."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss, logits

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    for x, y in batches(smp):
        optimizer.zero_grad()
        loss, logits = train_step(model, x, y)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("logits", logits.concat())
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out.value("in bfloat16", evaluate(model, x).concat())
        with torch.no_grad():
            out.value("in float32", evaluate(model, x).concat())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def thaw_by_flag(smp: Any, out: Any) -> None:
    """The optimizer has all parameters from the start; requires_grad alone freezes and thaws."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, steps=4)):
        net.stem.requires_grad_(i >= 1)
        for block in net.blocks[:2]:
            block.requires_grad_(i == 2)
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        out.value("trainable", sum(p.numel() for p in model.parameters() if p.requires_grad))
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def scaler_skips(smp: Any, out: Any) -> None:
    """An infinite gradient of the head alone at the second step: the whole optimizer must skip it."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor, i: int) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(scaler.scale(loss))
        return loss

    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        train_step(model, x, y, i)
        if i == 1 and net.head.bias.grad is not None:
            net.head.bias.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        out.value("scale", scaler.get_scale())
        out.value("head", net.head.weight.detach().sum().item())
    out.model(model)
