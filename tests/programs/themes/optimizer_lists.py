"""Loops that lay lists of parameters, gradients and optimizer state side by side, before and after the first
step."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program
from tests.programs.small import NormNet as Net
from tests.programs.small import batches, make_step


class Lookahead:
    """The wrapper of many Kaggle kernels, with slow weights in its own state."""

    def __init__(self, optimizer: Any, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = optimizer.param_groups
        self.state: dict[Any, dict[str, Tensor]] = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def step(self) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    state = self.state[fast]
                    if "slow" not in state:
                        state["slow"] = torch.zeros_like(fast.data)
                        state["slow"].copy_(fast.data)
                    slow = state["slow"]
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % self.k


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def lookahead_kernel(smp: Any, out: Any) -> None:
    """Lookahead with counters in the groups and slow weights made at its first step."""
    model = smp.DistributedModel(Net())
    inner = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    optimizer = Lookahead(inner)
    step = make_step(smp)
    for x, y in batches(smp, 4):
        inner.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean().item())
        optimizer.step()
    out.value("counters", [g["counter"] for g in inner.param_groups])
    out.value("slow weights", len(optimizer.state))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def accumulated_in_lists(smp: Any, out: Any) -> None:
    """Zeros like all parameters, made before the first step, take up the gradients; then they become .grad.
    Zeros like all parameters, made before the first step, take up the gradients; then they become .grad."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    total = [torch.zeros_like(p) for p in model.parameters()]
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        for p in model.parameters():
            p.grad = None
        out.value("loss", step(model, x, y).reduce_mean())
        for t, p in zip(total, model.parameters()):
            if p.grad is not None:
                t += p.grad.data
        if i % 2:
            for t, p in zip(total, model.parameters()):
                p.grad = t.clone() / 2
                t.zero_()
            optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def accumulated_by_name_later(smp: Any, out: Any) -> None:
    """Gradients are cloned into a dict by name at the first micro-step, added in the others."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.02))
    step = make_step(smp)
    kept: dict[str, Tensor] = {}
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        step(model, x, y)
        for name, p in net.named_parameters():
            kept[name] = kept[name] + p.grad if name in kept else p.grad.clone()
        if i % 2:
            for name, p in net.named_parameters():
                p.grad.copy_(kept.pop(name) * 0.5)
            optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def perturbed_by_layer(smp: Any, out: Any) -> None:
    """A sharpness-aware step for each tensor alone (its own norm), the old weights in optimizer.state[p]."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("first", step(model, x, y).reduce_mean())
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                optimizer.state[p]["old_p"] = p.data.clone()
                p.data.add_(p.grad * (0.05 / (p.grad.norm() + 1e-12)))
        optimizer.zero_grad()
        out.value("second", step(model, x, y).reduce_mean())
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = optimizer.state[p]["old_p"]
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def centralised(smp: Any, out: Any) -> None:
    """Gradient centralisation, and a count of what was centralised by the number of dimensions."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.RMSprop(model.parameters(), lr=0.01))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        step(model, x, y)
        count = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad.dim() > 1:
                    p.grad.data.add_(-p.grad.data.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))
                    count += 1
        out.value("centralised", count)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def layers_reset_after_a_step(smp: Any, out: Any) -> None:
    """The last blocks' layers draw new weights by reset_parameters, as in warm restarts with fresh heads."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 0:
            for m in net.blocks[2:].modules():
                if hasattr(m, "reset_parameters"):
                    m.reset_parameters()
            net.head.reset_parameters()
        if i == 1:
            net.stem[0].reset_parameters()
        out.value("drawn", torch.rand(2))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def shrink_and_perturb(smp: Any, out: Any) -> None:
    """Weights shrink and get noise like them; initialisers of three kinds are used for the noise."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() > 1:
                    noise = torch.empty_like(p)
                    if "up" in name:
                        nn.init.orthogonal_(noise)
                    elif "down" in name:
                        nn.init.trunc_normal_(noise, std=0.1)
                    else:
                        nn.init.kaiming_uniform_(noise, nonlinearity="relu")
                    p.mul_(0.8).add_(noise, alpha=0.1)
                else:
                    p.add_(torch.randn_like(p) * 0.01)
        out.value("drawn", torch.rand(1).item())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="is on stage")
def rows_shuffled(smp: Any, out: Any) -> None:
    """Hidden units of each block are permuted between steps: weights of two layers by one permutation."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            for block in net.blocks:
                order = torch.randperm(block.up.out_features)
                block.up.weight.copy_(block.up.weight[order])
                block.up.bias.data = block.up.bias.data[order]
                block.down.weight[:, :] = block.down.weight[:, order]
                for p, dim in ((block.up.weight, 0), (block.up.bias, 0), (block.down.weight, 1)):
                    for key in ("exp_avg", "exp_avg_sq"):
                        optimizer.state[p][key] = optimizer.state[p][key].index_select(dim, order)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def masks_by_magnitude(smp: Any, out: Any) -> None:
    """Masks from each layer's own quantile, made after the first step, hold for weights and gradients."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    step = make_step(smp)
    masks: dict[int, Tensor] = {}
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        for j, p in enumerate(model.parameters()):
            if j in masks:
                p.grad.mul_(masks[j])
        optimizer.step()
        if i == 1:
            for j, p in enumerate(model.parameters()):
                if p.ndim > 1:
                    limit = torch.quantile(p.detach().abs().flatten(), 0.4)
                    masks[j] = (p.detach().abs() > limit).to(p.dtype)
        with torch.no_grad():
            for j, p in enumerate(model.parameters()):
                if j in masks:
                    p *= masks[j]
    out.value("masks", sorted(masks))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def lottery_ticket(smp: Any, out: Any) -> None:
    """Weights kept before training come back under masks found after it."""
    net = Net()
    early = copy.deepcopy(net.state_dict())
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
    step = make_step(smp)
    data = list(batches(smp, 4))
    for x, y in data[:2]:
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
    masks = {}
    for name, p in net.named_parameters():
        if name.endswith("weight") and p.dim() == 2:
            k = p.numel() // 3
            limit = p.detach().abs().flatten().kthvalue(k).values
            masks[name] = p.detach().abs().gt(limit)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(early[name])
            if name in masks:
                p[~masks[name]] = 0
    for x, y in data[2:]:
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        for name, p in net.named_parameters():
            if name in masks:
                p.grad[~masks[name]] = 0
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def power_iteration_by_hand(smp: Any, out: Any) -> None:
    """Vectors kept by name estimate each weight's largest singular value, by which it is divided."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    step = make_step(smp)
    vectors = {
        n: F.normalize(torch.randn(p.shape[0]), dim=0) for n, p in net.named_parameters() if p.dim() == 2
    }
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            for n, p in net.named_parameters():
                if n in vectors:
                    v = F.normalize(p.t() @ vectors[n], dim=0)
                    vectors[n] = F.normalize(p @ v, dim=0)
                    sigma = torch.dot(vectors[n], p @ v)
                    p.div_(torch.clamp(sigma, min=1.0))
    out.model(model)


class Newton(torch.optim.Optimizer):
    """Muon: momentum, then five Newton-Schulz iterations; vectors by plain descent; a step count of its own.
    Muon: momentum, then five Newton-Schulz iterations; vectors by plain descent; a step count of its own."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buffer"] = torch.zeros_like(p.grad)
                    state["at"] = i
                buffer = state["buffer"].mul_(0.9).add_(p.grad)
                if p.ndim != 2:
                    p.sub_(buffer, alpha=group["lr"] / (1 + state["at"]))
                    continue
                x = buffer / (buffer.norm() + 1e-7)
                x = x.T if x.size(0) > x.size(1) else x
                for _ in range(3):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                x = x.T if p.size(0) > p.size(1) else x
                p.add_(x, alpha=-group["lr"] * (1 + 0.1 * self.calls))


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2), refused="looks at all parameters at once")
def muon_with_places(smp: Any, out: Any) -> None:
    """Muon whose state remembers the place of its parameter in the group, by which vectors are slowed down.
    Muon whose state remembers the place of its parameter in the group, by which vectors are slowed down."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(Newton(model.parameters()))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def rates_by_place(smp: Any, out: Any) -> None:
    """After the first step the one group is split into one for each tensor, the rate falling with the place.
    After the first step the one group is split into one for each tensor, the rate falling with the place."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 0:
            group = optimizer.param_groups.pop()
            for place, p in enumerate(group["params"]):
                one = {k: v for k, v in group.items() if k != "params"}
                one["lr"] = 0.1 * 0.9**place
                one["params"] = [p]
                optimizer.param_groups.append(one)
    out.value("rates", [g["lr"] for g in optimizer.param_groups])
    out.model(model)


@program(stages=(2,), ranks=(2,))
def frozen_by_filtering_groups(smp: Any, out: Any) -> None:
    """Parameters are taken out of the group's list after the second step, by their place, and put back later.
    Parameters are taken out of the group's list after the second step, by their place, and put back later."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1))
    step = make_step(smp)
    everything: list[nn.Parameter] = []
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        group = optimizer.param_groups[0]
        if i == 1:
            everything = group["params"]
            group["params"] = [p for j, p in enumerate(everything) if j % 3 != 1]
        if i == 3:
            group["params"] = everything
        optimizer.step()
        out.value("trained", len(group["params"]))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def moved_between_groups(smp: Any, out: Any) -> None:
    """Every parameter moves from the fast group to the slow one when its turn comes, a list popped at a time.
    Every parameter moves from the fast group to the slow one when its turn comes, a list popped at a time."""
    net = Net()
    model = smp.DistributedModel(net)
    params = list(net.parameters())
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(
            [{"params": params[:-1], "lr": 0.2}, {"params": params[-1:], "lr": 0.01}], momentum=0.9
        )
    )
    step = make_step(smp)
    for x, y in batches(smp, 4):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        fast, slow = optimizer.param_groups
        for _ in range(5):
            slow["params"].append(fast["params"].pop())
    out.value("sizes", [len(g["params"]) for g in optimizer.param_groups])
    out.model(model)


@program(stages=(2,), ranks=(2,))
def state_forgotten(smp: Any, out: Any) -> None:
    """Three ways to forget momentum: one tensor's state popped, a layer's zeroed, all of it bound anew."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.02))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 5)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 0:
            optimizer.state.pop(net.head.weight, None)
            optimizer.state.pop(net.stem[0].weight, None)
        elif i == 1:
            for block in (net.blocks[0], net.blocks[3]):
                for p in block.parameters():
                    for value in optimizer.state[p].values():
                        value.zero_()
        elif i == 2:
            optimizer.state = defaultdict(dict)
        elif i == 3:
            for p in net.blocks.parameters():
                optimizer.state[p] = {}
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def swapped_for_evaluation(smp: Any, out: Any) -> None:
    """EMA weights take the place of the model's by .data for an evaluation step and go back after it."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.3))
    step = make_step(smp)
    shadow = {n: p.data.clone() for n, p in net.named_parameters()}

    @smp.step
    def evaluate(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(x), y)

    for x, y in batches(smp):
        net.train()
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        for n, p in net.named_parameters():
            shadow[n] = 0.7 * shadow[n] + 0.3 * p.data
        for n, p in net.named_parameters():
            p.data, shadow[n] = shadow[n], p.data
        net.eval()
        out.value("averaged", evaluate(model, x, y).reduce_mean())
        for n, p in net.named_parameters():
            p.data, shadow[n] = shadow[n], p.data
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def weights_copied_between_blocks(smp: Any, out: Any) -> None:
    """The first block takes the last block's weights by load_state_dict, as when a network is grown."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 1:
            net.blocks[0].load_state_dict(net.blocks[-1].state_dict())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="over stages")
def averaged_across_blocks(smp: Any, out: Any) -> None:
    """The outer blocks meet in the middle: both get the mean of their weights, by zip of parameters."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(net.blocks[0].parameters(), net.blocks[3].parameters(), strict=True):
                mean = (a + b) / 2
                a.copy_(mean)
                b.copy_(mean)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def changed_while_gathered(smp: Any, out: Any) -> None:
    """Weights and a buffer are edited in smp.gathered(model), and training goes on with them."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        if i == 0:
            with smp.gathered(model) as whole, torch.no_grad():
                for p in whole.parameters():
                    p.mul_(0.5)
                whole.stem[1].running_mean.add_(1.0)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def calibrated_while_gathered(smp: Any, out: Any) -> None:
    """Batch norm's statistics are estimated again by plain forwards of the gathered model in train mode."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        with smp.gathered(model) as whole, torch.no_grad():
            whole.stem[1].reset_running_stats()
            whole.train()
            whole(x * 2)
            whole.eval()
            out.value("evaluated", F.cross_entropy(whole(x), y))
        out.value("modes", [m.training for m in net.modules()])
        net.train()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def rolled_back_in_memory(smp: Any, out: Any) -> None:
    """Model and optimizer are kept by deepcopy of their state dicts; a bad step is undone, and tried slower.
    Model and optimizer are kept by deepcopy of their state dicts; a bad step is undone, and tried slower."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    step = make_step(smp)
    kept: Any = None
    best = float("inf")
    for i, (x, y) in enumerate(batches(smp, 5)):
        optimizer.zero_grad()
        loss = step(model, x, y).reduce_mean().item()
        out.value("loss", loss)
        if i == 3 and kept is not None:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
            continue
        optimizer.step()
        if loss < best or i == 1:
            best = loss
            kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def stacked_by_shape(smp: Any, out: Any) -> None:
    """Tensors of one shape are decayed together by torch._foreach_ calls, shapes found after the first step.
    Tensors of one shape are decayed together by torch._foreach_ calls, shapes found after the first step."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        shapes: dict[Any, list[nn.Parameter]] = OrderedDict()
        for p in sorted(model.parameters(), key=lambda p: (p.shape, p.numel())):
            shapes.setdefault(tuple(p.shape), []).append(p)
        with torch.no_grad():
            for k, group in enumerate(shapes.values()):
                torch._foreach_mul_(group, 1 - 0.01 * k)
                torch._foreach_add_([p.grad for p in group], group, alpha=0.1)
        out.value("shapes", [(list(s), len(g)) for s, g in shapes.items()])
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def gradients_kept_of_last_step(smp: Any, out: Any) -> None:
    """Extragradient: the step goes by twice this gradient less the last one, kept in a list of clones or
    None."""
    model = smp.DistributedModel(Net())
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(params, lr=0.05))
    step = make_step(smp)
    last: list[Tensor | None] = [None] * len(params)
    for x, y in batches(smp, 4):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        now = [p.grad.clone() for p in params]
        for p, g, before in zip(params, now, last):
            if before is not None:
                p.grad = 2 * g - before
        last = list(now)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2), always_on_ranks=True)
def layers_change_places_before_the_first_step(smp: Any, out: Any) -> None:
    """Blocks of groups with other rates change places in the model when the optimizer has them already."""
    net = Net()
    model = smp.DistributedModel(net)
    groups = [{"params": list(block.parameters()), "lr": 0.01 * 4**i} for i, block in enumerate(net.blocks)]
    groups += [{"params": [*net.stem.parameters(), *net.head.parameters()]}]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    net.blocks[0], net.blocks[3] = net.blocks[3], net.blocks[0]
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.value("momentum", [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()])
    out.model(model)
