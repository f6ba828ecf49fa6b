"""Hooks of all kinds, forwards replaced, and weights that are computed when they are read."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, parametrize, prune

from tests.programs import program
from tests.programs.themes.side_state import Block, Stack, batches, fit


def cross_entropy_step(smp: Any, after: Any = None) -> Any:
    """A step function that trains; ``after(model, logits)`` is added to the loss."""

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        if after is not None:
            loss = loss + after()
        model.backward(loss)
        return loss

    return train_step


# Forward hooks ------------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,), static=True, refused_static="static_mode: True")
def features_for_a_loss(smp: Any, out: Any) -> None:
    """Hooks put on before training keep the features of two blocks; the step adds a loss on them."""
    net = Stack()
    features: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            features[name] = output

        return hook

    for i in (0, 2):
        net.blocks[i].register_forward_hook(keep(f"block{i}"))
    fit(
        smp,
        out,
        net,
        lambda m, x, y: (
            F.cross_entropy(m(x), y) + 0.1 * (features["block2"] - features["block0"]).abs().mean()
        ),
    )


@program(stages=(2,), ranks=(2,))
def features_detached_and_read_outside(smp: Any, out: Any) -> None:
    """A feature extractor: hooks keep detached clones in a list that is read after each step."""
    net = Stack()
    kept: list[Tensor] = []
    handles = [b.register_forward_hook(lambda m, i, o: kept.append(o.detach().clone())) for b in net.blocks]
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step = cross_entropy_step(smp)
    for x, y in batches(smp):
        kept.clear()
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        out.value("number", len(kept))
        out.value("norms", [k.norm() for k in kept])
    for handle in handles:
        handle.remove()
    train_step(model, x, y)
    out.value("number at the end", len(kept))
    out.model(model)


@program(stages=(2,), ranks=(2,), static=True, refused_static="static_mode: True")
def steering_between_steps(smp: Any, out: Any) -> None:
    """A hook that adds a vector to a block's output is put on for the second of four steps only."""
    net = Stack()
    vector = torch.linspace(-1, 1, 8)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step = cross_entropy_step(smp)
    for i, (x, y) in enumerate(batches(smp, steps=4)):
        handle = net.blocks[2].register_forward_hook(lambda m, i, o: o + vector) if i == 1 else None
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        if handle is not None:
            handle.remove()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def hook_on_and_off_within_the_step(smp: Any, out: Any) -> None:
    """Within the step a with-statement puts an ablating hook on for a second pass (two gradients meet)."""
    net = Stack()

    def ablate(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        mask = torch.ones(8)
        mask[::2] = 0
        return output * mask

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        plain = model(x)
        with net.blocks[1].register_forward_hook(ablate):
            ablated = model(x)
        return F.cross_entropy(plain, y) + 0.5 * F.mse_loss(ablated, plain.detach())

    fit(smp, out, net, loss)


@program(stages=(2,), ranks=(2,))
def hook_put_on_in_the_models_forward(smp: Any, out: Any) -> None:
    """The model's forward hooks a block of its own backbone for the time of a call, as extractors do."""

    class Extractor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = Stack()
            self.probe = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kept: list[Tensor] = []
            handle = self.backbone.blocks[1].register_forward_hook(lambda m, i, o: kept.append(o))
            try:
                logits = self.backbone(x)
            finally:
                handle.remove()
            return logits, self.probe(kept[0].detach())

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, probed = model(x)
        return F.cross_entropy(logits, y) + F.cross_entropy(probed, y)

    fit(smp, out, Extractor(), loss)


@program(stages=(2,), ranks=(2,))
def pre_hooks_with_kwargs(smp: Any, out: Any) -> None:
    """A pre-hook changes a keyword argument, a forward hook with kwargs reads it."""

    class Conditioned(Block):
        def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x if shift is None else x + shift)

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, shift=x.mean(-1, keepdim=True))
            return self.head(x)

    def double(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "shift": 2 * kwargs["shift"]}

    def undo(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return output - 0.5 * kwargs["shift"]

    net = Model(Conditioned)
    net.blocks[0].register_forward_pre_hook(double, with_kwargs=True)
    net.blocks[2].register_forward_hook(undo, with_kwargs=True)
    net.blocks[3].register_forward_pre_hook(lambda m, a: (a[0].clamp(-1, 1),))
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,))
def global_hooks(smp: Any, out: Any) -> None:
    """register_module_forward_hook: a monitor counts the calls of all Linears and sums their outputs."""
    counts: dict[str, int] = {}
    totals: list[float] = []

    def count(module: nn.Module, args: Any) -> None:
        counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1

    def total(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.Linear):
            totals.append(output.detach().sum().item())

    net = Stack()
    with register_module_forward_pre_hook(count), register_module_forward_hook(total):
        fit(smp, out, net)
    out.value("counts", {n: counts[n] for n in ("Linear", "LayerNorm", "Block")})
    out.value("totals", totals)


@program(stages=(2,), ranks=(2,))
def global_hook_that_changes(smp: Any, out: Any) -> None:
    """A global forward hook clamps what every Linear gives (activation quantisation, simulated)."""

    def quantise(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(module, nn.Linear):
            return output + ((output * 16).round() / 16 - output).detach()
        return None

    with register_module_forward_hook(quantise):
        fit(smp, out, Stack())


@program(stages=(2, 3), ranks=(2,), static=True, refused_static="static_mode: True")
def hook_on_a_split_container(smp: Any, out: Any) -> None:
    """Hooks on the Sequential that is cut in two: one halves the input, one keeps and scales the output."""
    net = nn.Sequential(OrderedDict(body=nn.Sequential(*(Block() for _ in range(4))), head=nn.Linear(8, 4)))
    shapes: list[Any] = []

    def post(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        shapes.append((tuple(args[0].shape), output.dtype, output.requires_grad))
        return output * 1.5

    net.body.register_forward_pre_hook(lambda m, a: (a[0] / 2,))
    net.body.register_forward_hook(post)
    fit(smp, out, net)
    out.value("shapes", [str(s) for s in shapes])


class StopForward(Exception):
    """Thrown by a hook when the features are there."""


@program(stages=(2,), ranks=(2,))
def features_by_exception(smp: Any, out: Any) -> None:
    """A hook throws as soon as the wanted layer has run, so that the rest is not computed (DINO probes)."""
    net = Stack()
    found: list[Tensor] = []

    def stop(module: nn.Module, args: Any, output: Tensor) -> None:
        found.append(output)
        raise StopForward

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        main = F.cross_entropy(model(x), y)
        handle = net.blocks[2].register_forward_hook(stop)
        try:
            model(x.flip(0))
        except StopForward:
            pass
        handle.remove()
        return main + 0.1 * found.pop().square().mean()

    fit(smp, out, net, loss)


# Backward hooks -----------------------------------------------------------------------------------------


@program(stages=(2,), static=True)
def gradient_norms_by_backward_hook(smp: Any, out: Any) -> None:
    """register_full_backward_hook on each block keeps the norm of the gradient that leaves it."""
    net = Stack()
    norms: dict[int, list[float]] = {i: [] for i in range(4)}
    for i, block in enumerate(net.blocks):
        block.register_full_backward_hook(lambda m, gi, go, i=i: norms[i].append(go[0].norm().item()))
    fit(smp, out, net)
    out.value("norms", [norms[i] for i in range(4)])


@program(stages=(2,))
def grad_cam(smp: Any, out: Any) -> None:
    """Grad-CAM: a forward hook keeps activations, a tensor hook on them keeps gradients; read outside."""
    net = nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 6, 3, padding=1),
        nn.ReLU(), nn.Conv1d(6, 4, 3, padding=1), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
    )  # fmt: skip
    seen: dict[str, list[Tensor]] = {"activations": [], "gradients": []}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["activations"].append(output.detach())
        output.register_hook(lambda g: seen["gradients"].append(g.detach()))

    net[3].register_forward_hook(keep)
    fit(smp, out, net)
    cams = [
        F.relu((g.mean(-1, keepdim=True) * a).sum(1))
        for a, g in zip(seen["activations"], seen["gradients"], strict=True)
    ]
    out.value("maps", cams)


@program(stages=(2,), ranks=(2,))
def backward_hook_that_scales(smp: Any, out: Any) -> None:
    """A full backward hook halves the gradient that a block gives to those before it."""
    net = Stack()
    net.blocks[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    net.blocks[3].register_full_backward_pre_hook(lambda m, go: (go[0].clamp(-0.1, 0.1),))
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,))
def tensor_hook_in_forward(smp: Any, out: Any) -> None:
    """Muesli's trick: h.register_hook(lambda g: g / 2) inside the container and inside a block."""

    class Halving(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(self.norm(x))
            if h.requires_grad:
                h.register_hook(lambda g: g * 0.5)
            return x + self.down(F.relu(h))

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i == 1 and x.requires_grad:
                    x.register_hook(lambda g: g.clamp(-0.02, 0.02))
            return self.head(x)

    fit(smp, out, Model(Halving))


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def parameter_hooks(smp: Any, out: Any) -> None:
    """Gradients of some rows are masked by Parameter.register_hook, as one freezes old tokens."""
    net = Stack()
    mask = torch.ones(16, 1)
    mask[:8] = 0
    for block in net.blocks:
        block.up.weight.register_hook(lambda g: g * mask)
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def post_accumulate_hooks(smp: Any, out: Any) -> None:
    """register_post_accumulate_grad_hook clips each parameter's gradient where it is."""
    net = Stack()

    def clip(parameter: nn.Parameter) -> None:
        parameter.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]

    for parameter in net.blocks.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    fit(smp, out, net)


# Forwards replaced --------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,))
def forward_replaced_on_instances(smp: Any, out: Any) -> None:
    """block.forward = types.MethodType(...) before wrapping, with a call of the old one in it."""
    net = Stack()

    def scaled(self: Any, x: Tensor) -> Tensor:
        return 0.5 * x + 0.5 * self.original(x)

    for block in net.blocks[1:]:
        block.original = block.forward
        block.forward = types.MethodType(scaled, block)
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,), static=True)
def forward_replaced_between_steps(smp: Any, out: Any) -> None:
    """A block's forward is wrapped by a closure after the first step and given back after the second."""
    net = Stack()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step = cross_entropy_step(smp)
    for i, (x, y) in enumerate(batches(smp, steps=4)):
        if i == 1:
            for block in net.blocks:
                block.forward = (lambda old: lambda x: old(x).tanh())(block.forward)
        if i == 2:
            for block in net.blocks:
                del block.forward
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def forward_patched_on_a_class(smp: Any, out: Any) -> None:
    """mock.patch.object(nn.Linear, "forward", ...) around training counts multiplications."""
    flops = {"linear": 0}
    original = nn.Linear.forward

    @functools.wraps(original)
    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        flops["linear"] += x.numel() // x.shape[-1] * self.weight.numel()
        return original(self, x)

    net = Stack()
    with mock.patch.object(nn.Linear, "forward", counted):
        fit(smp, out, net)
    out.value("flops", flops)


@program(stages=(2,), ranks=(2,))
def class_patched_within_the_step(smp: Any, out: Any) -> None:
    """A with-statement in the step swaps the block class' activation for one pass (two gradients meet)."""

    class Swapped(Block):
        def act(self, x: Tensor) -> Tensor:
            return F.relu(x)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(self.norm(x))))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        first = model(x)
        with mock.patch.object(Swapped, "act", lambda self, x: torch.sigmoid(x)):
            second = model(x)
        return F.cross_entropy(first, y) + F.cross_entropy(second, y)

    fit(smp, out, Stack(Swapped), loss)


# Weights that are computed ------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,))
def functional_call_with_noisy_weights(smp: Any, out: Any) -> None:
    """torch.func.functional_call of a block within the container, with weights shrunk (weight averaging)."""

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                shrunk = {name: p * 0.9 for name, p in block.named_parameters()}
                x = 0.5 * block(x) + 0.5 * functional_call(block, shrunk, (x,))
            return self.head(x)

    fit(smp, out, Model())


@program(stages=(2,), ranks=(2,))
def hypernetwork_by_functional_call(smp: Any, out: Any) -> None:
    """A small network makes the weights of a bare layer, called by functional_call inside a block."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Linear(3, 64)
            self.code = nn.Parameter(torch.randn(3))
            self.norm = nn.LayerNorm(8)
            # Not a submodule: its weights come from the maker.
            self.__dict__["target"] = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.maker(self.code).view(8, 8)
            return x + torch.tanh(functional_call(self.target, {"weight": weight}, (self.norm(x),)))

    fit(smp, out, Stack(Hyper))


class Symmetric(nn.Module):
    """As in the tutorial on parametrizations."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, a: Tensor) -> Tensor:
        return a.triu()


@program(stages=(2,), ranks=(2,), static=True)
def parametrized_weights(smp: Any, out: Any) -> None:
    """parametrize.register_parametrization by an own class, orthogonal() and the new weight_norm()."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 4))
    for i in (0, 3):
        parametrize.register_parametrization(net[i], "weight", Symmetric())
    for i in (1, 4):
        parametrizations.orthogonal(net[i])
    for i in (2, 5):
        parametrizations.weight_norm(net[i])
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,), tolerance=1e-6)
def parametrizations_cached_over_two_calls(smp: Any, out: Any) -> None:
    """with parametrize.cached(): in the step, so that both passes share the weights.

    The tolerance: each call makes its own weight, so gradients are added behind it instead of before.
    """
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4))
    for i in range(4):
        parametrizations.orthogonal(net[i])

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            return F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), y)

    fit(smp, out, net, loss)


@program(stages=(2,), ranks=(2,))
def old_weight_norm(smp: Any, out: Any) -> None:
    """torch.nn.utils.weight_norm, the one by pre-hooks, as in vocoders; removed for evaluation."""
    layers = [torch.nn.utils.weight_norm(nn.Conv1d(2, 2, 3, padding=1)) for _ in range(6)]
    net = nn.Sequential(nn.Unflatten(1, (2, 4)), *layers, nn.Flatten(), nn.Linear(8, 4))
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,))
def spectral_norms(smp: Any, out: Any) -> None:
    """A discriminator with the old spectral_norm, and one with the new: power iteration in each forward."""

    class Discriminators(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            old, new = torch.nn.utils.spectral_norm, parametrizations.spectral_norm
            self.old = nn.Sequential(*(old(nn.Linear(8, 8)) for _ in range(3)))
            self.new = nn.Sequential(*(new(nn.Linear(8, 8)) for _ in range(3)))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for a, b in zip(self.old, self.new, strict=True):
                x = F.leaky_relu(b(F.leaky_relu(a(x), 0.2)), 0.2)
            return self.head(x)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + model(x.roll(1, 0).detach()).relu().mean()

    fit(smp, out, Discriminators(), loss)


@program(stages=(2,), ranks=(2,))
def pruned_layers(smp: Any, out: Any) -> None:
    """prune.l1_unstructured before training and the zeros counted in the state dict at the end."""
    net = Stack()
    targets = [block.up for block in net.blocks]
    for layer in targets:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step = cross_entropy_step(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)
    state = model.state_dict()
    weights = [state[f"blocks.{i}.up.weight_orig"] * state[f"blocks.{i}.up.weight_mask"] for i in range(4)]
    out.value("zeros", [int((w == 0).sum()) for w in weights])
