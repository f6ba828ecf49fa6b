"""Groups edited, numbers of several stages mixed, gradients that are None."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program
from tests.programs.small import Net, batches, make_step


class TwoHeads(Net):
    """A head for each of two tasks, of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 5)

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.other(x) if which else self.head(x)


@program(stages=(2,), ranks=(2,))
def noise_where_gradients_are(smp: Any, out: Any) -> None:
    """Gradient noise is drawn for tensors that have gradients; which head has one alternates."""
    model = smp.DistributedModel(TwoHeads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, which: int) -> Tensor:
        loss = F.cross_entropy(model(x, which), y)
        model.backward(loss)
        return loss

    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", train(model, x, y, i % 2).reduce_mean())
        for p in model.parameters():
            if p.grad is not None:
                p.grad += 0.05 * torch.randn(p.shape)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="takes a tensor of stage")
def norm_without_item(smp: Any, out: Any) -> None:
    """The squared norm is summed into a zero in place, and gradients are scaled by it as a tensor."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        total = torch.zeros(())
        for p in model.parameters():
            total += p.grad.pow(2).sum()
        scale = (0.1 / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="assign a gradient")
def norm_bound_anew(smp: Any, out: Any) -> None:
    """The same with gradients bound anew, on .data, from lists."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        grads = [p.grad.data.clone() for p in model.parameters()]
        total = torch.tensor(0.0)
        for g in grads:
            total = total + (g * g).sum()
        for g, p in zip(grads, model.parameters()):
            p.grad = g / (1 + 10 * total)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def largest_gradient(smp: Any, out: Any) -> None:
    """Each gradient is divided by the largest entry of all, found by torch.maximum over the loop."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        largest = torch.zeros(())
        for p in model.parameters():
            torch.maximum(largest, p.grad.abs().max(), out=largest)
        torch._foreach_div_([p.grad for p in model.parameters()], largest + 1e-3)
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="takes a tensor of stage")
def descent_by_hand_with_global_rate(smp: Any, out: Any) -> None:
    """Normalised descent without an optimizer step: p.data -= lr * grad / total, total a buffer of one entry.
    Normalised descent without an optimizer step: p.data -= lr * grad / total, total a buffer of one entry."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05))
    step = make_step(smp)
    total = torch.zeros(1)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        total.zero_()
        for p in net.parameters():
            total[0] += p.grad.abs().sum()
        for p in net.parameters():
            p.data -= 0.1 * p.grad.data / total
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="over stages")
def flat_gradient_buffer(smp: Any, out: Any) -> None:
    """Gradients are copied into one flat tensor by offsets, which is normalised, and copied back."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    step = make_step(smp)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        offset = 0
        for p in model.parameters():
            flat[offset : offset + p.numel()] = p.grad.flatten()
            offset += p.numel()
        flat /= flat.norm()
        offset = 0
        for p in model.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def running_mean_over_blocks(smp: Any, out: Any) -> None:
    """A running mean of the blocks' norms goes along the loop; each block is pulled to the mean up to it."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        running = torch.zeros(8)
        with torch.no_grad():
            for block in net.blocks:
                running.mul_(0.5).add_(block.norm.weight, alpha=0.5)
                block.norm.weight.lerp_(running, 0.1)
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="param_groups.0...lr")
def rate_as_a_tensor(smp: Any, out: Any) -> None:
    """The group's rate is a tensor computed of the first layer's gradient."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1)))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + net.stem.weight.grad.norm())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="param_groups.0...lr")
def rate_filled_in_place(smp: Any, out: Any) -> None:
    """The rate tensor of the group is filled in place by the last layer's gradient norm."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1)))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.param_groups[0]["lr"].copy_(0.1 / (1 + net.head.weight.grad.norm()))
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="is on stage|len")
def inner_optimizer_used(smp: Any, out: Any) -> None:
    """The script keeps the optimizer it wrapped, and sets rates, clears and steps by that one."""
    model = smp.DistributedModel(Net())
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    smp.DistributedOptimizer(inner)
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        inner.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        inner.param_groups[0]["lr"] = 0.1 / (i + 1)
        inner.step()
        out.value("state", len(inner.state))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def group_replaced_by_a_copy(smp: Any, out: Any) -> None:
    """param_groups[0] becomes a new dict with another rate (a scheduler that copies)."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.1 * 0.5**i}
        optimizer.step()
    out.value("rate", optimizer.param_groups[0]["lr"])
    out.model(model)


@program(stages=(2,), ranks=(2,))
def groups_reversed_and_dropped(smp: Any, out: Any) -> None:
    """Groups are put in another order, rates dealt by enumerate, and the last one dropped later."""
    net = Net()
    model = smp.DistributedModel(net)
    groups = [{"params": list(m.parameters())} for m in (net.stem, *net.blocks, net.head)]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        if i == 1:
            optimizer.param_groups.reverse()
            for j, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.05 * (j + 1)
        if i == 2:
            del optimizer.param_groups[-1]
        optimizer.step()
        out.value("rates", [g["lr"] for g in optimizer.param_groups])
    out.model(model)


@program(stages=(2,), ranks=(2,))
def groups_edited_before_the_first_step(smp: Any, out: Any) -> None:
    """Parameters are taken out of the group between wrapping and the first step."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p.ndim > 1]
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def momentum_popped_and_zeroed(smp: Any, out: Any) -> None:
    """State of some tensors is popped, of others zeroed, of others cleared; counts of steps are set back."""
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
            optimizer.state.pop(net.stem.weight, None)
        elif i == 1:
            for block in (net.blocks[0], net.blocks[3]):
                for p in block.parameters():
                    for value in optimizer.state[p].values():
                        value.zero_()
        elif i == 2:
            for p in net.blocks.parameters():
                optimizer.state[p] = {}
        else:
            optimizer.state.clear()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def state_bound_anew(smp: Any, out: Any) -> None:
    """All optimizer state is thrown away by binding an empty dict."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        optimizer.state = defaultdict(dict)
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="is on stage|len")
def first_seen_by_state(smp: Any, out: Any) -> None:
    """Noise is drawn for tensors whose state is new: 'p not in optimizer.state' and 'not optimizer.state[p]'.
    Noise is drawn for tensors whose state is new: 'p not in optimizer.state' and 'not optimizer.state[p]'."""
    model = smp.DistributedModel(TwoHeads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        for p in model.parameters():
            if p not in optimizer.state and p.grad is not None:
                p.grad.add_(torch.randn(p.shape), alpha=0.01)
        optimizer.step()
        out.value("with state", sum("momentum_buffer" in optimizer.state[p] for p in model.parameters()))
    out.model(model)


CALLS = 0


def counted(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x / CALLS


class Twice(torch.autograd.Function):
    """Forward reads and writes a class attribute."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Twice.scale *= 0.9
        return x * Twice.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Half(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return x + (counted(y) if self.kind else Twice.apply(y))


def _trained(smp: Any, out: Any, kind: int) -> None:
    net = Net()
    net.blocks = nn.ModuleList(Half(kind) for _ in range(4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = make_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def helper_counts_in_a_global(smp: Any, out: Any) -> None:
    """A helper function of the blocks divides by how often it was called."""
    global CALLS
    CALLS = 0
    _trained(smp, out, 1)
    out.value("calls", CALLS)


@program(stages=(2,), ranks=(2,), refused="keeps state of its own")
def function_with_a_class_attribute(smp: Any, out: Any) -> None:
    """An autograd function's forward keeps a scale in its class, which falls with each call."""
    Twice.scale = 1.0
    _trained(smp, out, 0)
    out.value("scale", Twice.scale)


def _alternating(smp: Any, out: Any, first: bool, to_none: bool, read: bool) -> None:
    model = smp.DistributedModel(TwoHeads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor, y: Tensor, which: int) -> Tensor:
        loss = F.cross_entropy(model(x, which), y)
        model.backward(loss)
        return loss

    for i, (x, y) in enumerate(batches(smp, 4)):
        if first:
            optimizer.zero_grad(set_to_none=to_none)
        out.value("loss", train(model, x, y, i % 2).reduce_mean())
        out.value("have one", [p.grad is not None for p in model.parameters()])
        for p in model.parameters():
            if read and p.grad is not None:
                p.grad += 0.05 * torch.randn(p.shape)
        optimizer.step()
        if not first:
            optimizer.zero_grad(set_to_none=to_none)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def noise_where_gradients_are_after_the_step(smp: Any, out: Any) -> None:
    """The same with zero_grad at the end of the loop."""
    _alternating(smp, out, first=False, to_none=True, read=True)


@program(stages=(2,), ranks=(2,))
def noise_where_gradients_are_zeroed(smp: Any, out: Any) -> None:
    """The same with gradients that become zeros, first in the loop."""
    _alternating(smp, out, first=True, to_none=False, read=True)


@program(stages=(2,), ranks=(2,))
def gradients_looked_for(smp: Any, out: Any) -> None:
    """Only whether there is a gradient is asked, which head has one alternates."""
    _alternating(smp, out, first=True, to_none=True, read=False)


@program(stages=(2,), ranks=(2,), refused_on_ranks="is on stage")
def noise_for_tensors_without_state(smp: Any, out: Any) -> None:
    """Tensors that have no optimizer state yet get noise: so at the first step, and after it is cleared."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        with torch.no_grad():
            for p in model.parameters():
                if p not in optimizer.state:
                    p.add_(torch.randn(p.shape), alpha=0.01)
        optimizer.step()
        if i == 2:
            optimizer.state.clear()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks=r"len\(optimizer.state\)")
def noise_by_the_count_of_state(smp: Any, out: Any) -> None:
    """The rate falls with the number of tensors that have state."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = make_step(smp)
    for x, y in batches(smp, 3):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + len(optimizer.state))
        optimizer.step()
    out.model(model)
