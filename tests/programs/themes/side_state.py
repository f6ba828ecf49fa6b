"""Modules that keep things: counters, auxiliary losses, flags, caches and objects that forward changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program


class Block(nn.Module):
    """A residual block of a perceptron."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks of a given kind, and a head."""

    def __init__(self, make: Callable[[], nn.Module] = Block, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(smp: Any, steps: int = 3, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed + smp.dp_rank())
    for _ in range(steps):
        yield torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def fit(smp: Any, out: Any, net: nn.Module, forward: Any = None, steps: int = 3, lr: float = 0.05) -> Any:
    """Trains a classifier; ``forward`` gives the loss of (model, x, y)."""
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y) if forward is None else forward(model, x, y)
        model.backward(loss)
        return loss

    for x, y in batches(smp, steps):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)
    return model


# Auxiliary losses ---------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A soft mixture that keeps its balance loss on itself, as Switch layers do."""

    def __init__(self, width: int = 8, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.aux_loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.aux_loss = weights.mean(0).square().sum() * weights.shape[-1]
        return x + sum(w.unsqueeze(-1) * torch.tanh(e(x)) for w, e in zip(weights.unbind(-1), self.experts))


@program(
    stages=(2, 3),
    ranks=(2,),
    replicas=(1, 2),
    pipelines=("interleaved", "simple"),
    static=True,
    refused_static="static_mode: True",
)
def aux_loss_on_the_module(smp: Any, out: Any) -> None:
    """Each layer keeps its balance loss on itself; the step function sums them over model.modules()."""
    net = Stack(Gated)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        main = F.cross_entropy(model(x), y)
        return main + 0.1 * sum(m.aux_loss for m in net.modules() if hasattr(m, "aux_loss"))

    fit(smp, out, net, loss)


@program(stages=(2,), ranks=(2,))
def aux_loss_summed_in_forward(smp: Any, out: Any) -> None:
    """The model's own forward adds the layers' stored losses to what it returns."""

    class Model(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = super().forward(x)
            return logits, torch.stack([b.aux_loss for b in self.blocks]).mean()

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, aux = model(x)
        return F.cross_entropy(logits, y) + 0.05 * aux

    fit(smp, out, Model(Gated), loss)


_LOSSES: dict[str, Tensor] = {}


@program(stages=(2,), ranks=(2,))
def losses_in_a_global_dict(smp: Any, out: Any) -> None:
    """Layers put penalties in a dict of the script's, as TensorFlow did; the step empties it."""

    class Penalised(Block):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.up(self.norm(x)))
            _LOSSES[self.name] = h.abs().mean()
            return x + self.down(h)

    names = (f"block{i}" for i in itertools.count())
    net = Stack(lambda: Penalised(next(names)))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        _LOSSES.clear()
        total = F.cross_entropy(model(x), y)
        for value in _LOSSES.values():
            total = total + 0.01 * value
        return total

    fit(smp, out, net, loss)
    out.value("names", sorted(_LOSSES))


@program(stages=(2,), ranks=(2,))
def losses_appended_to_a_list(smp: Any, out: Any) -> None:
    """All layers share one list, in which each appends its KL term; forward of the model clears it."""

    class Bottleneck(nn.Module):
        def __init__(self, kls: list[Tensor]) -> None:
            super().__init__()
            self.kls = kls
            self.mu = nn.Linear(8, 8)
            self.logvar = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mu, logvar = self.mu(x), self.logvar(x)
            self.kls.append(-0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(-1).mean())
            return x + mu * torch.exp(-0.5 * logvar)

    class Model(Stack):
        def __init__(self) -> None:
            kls: list[Tensor] = []
            super().__init__(lambda: Bottleneck(kls))
            self.kls = kls

        def forward(self, x: Tensor) -> Tensor:
            self.kls.clear()
            return super().forward(x)

    net = Model()
    fit(smp, out, net, lambda m, x, y: F.cross_entropy(m(x), y) + 1e-2 * sum(net.kls))
    out.value("kept", len(net.kls))


# Counters -----------------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), static=True, refused_static="static_mode: True")
def blocks_count_their_calls(smp: Any, out: Any) -> None:
    """Each block counts its calls in a Python number, which is printed at the end."""

    class Counted(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    net = Stack(Counted)
    fit(smp, out, net)
    out.value("calls", [b.calls for b in net.blocks])


@program(stages=(2,), ranks=(2,), static=True, refused_static="static_mode: True")
def warm_up_by_a_counter(smp: Any, out: Any) -> None:
    """A block's scale grows with the number of its calls in training, as annealed gates do."""

    class Annealed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += 1
            scale = min(1.0, self.seen / 4)
            return x + scale * self.down(F.relu(self.up(self.norm(x))))

    fit(smp, out, Stack(Annealed), steps=4)


@program(stages=(2,), ranks=(2,), static=True, refused_static="static_mode: True")
def model_counts_microbatches(smp: Any, out: Any) -> None:
    """The model's top-level forward counts its calls and picks the loss' temperature by them."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.iteration = 0

        def forward(self, x: Tensor) -> Tensor:
            self.iteration += 1
            return super().forward(x) / (1 + 0.1 * self.iteration)

    net = Model()
    fit(smp, out, net)
    out.value("iteration", net.iteration)


@program(stages=(2,), ranks=(2,))
def activation_statistics_as_floats(smp: Any, out: Any) -> None:
    """Blocks append x.std().item() to a list of theirs, for a plot after training."""

    class Watched(Block):
        def __init__(self) -> None:
            super().__init__()
            self.stds: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.stds.append(y.std().item())
            return y

    net = Stack(Watched)
    fit(smp, out, net)
    out.value("standard deviations", [b.stds for b in net.blocks])


@program(stages=(2,), ranks=(2,))
def activations_kept_for_a_picture(smp: Any, out: Any) -> None:
    """self.attention = weights.detach() in attention; read after the step, outside of it."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.proj = nn.Linear(4, 4)
            self.attention: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(x.shape[0], 2, 4)
            q, k, v = self.qkv(x).chunk(3, -1)
            weights = (q @ k.transpose(1, 2) / 2).softmax(-1)
            self.attention = weights.detach()
            return (x + self.proj(weights @ v)).flatten(1)

    net = Stack(Attention)
    fit(smp, out, net)
    for i, block in enumerate(net.blocks):
        out.value(f"map {i}", block.attention)


@program(stages=(2,), ranks=(2,))
def maps_read_in_the_step(smp: Any, out: Any) -> None:
    """The step function returns what the layers kept, along with the loss."""

    class Kept(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = F.gelu(self.up(self.norm(x)))
            return x + self.down(self.hidden)

    net = Stack(Kept)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss, [b.hidden.detach() for b in net.blocks]

    for x, y in batches(smp):
        optimizer.zero_grad()
        loss, hidden = train_step(model, x, y)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("hidden", [h.concat() for h in hidden])
    out.model(model)


# Objects that blocks change ----------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,))
def skips_in_a_dict(smp: Any, out: Any) -> None:
    """A dict goes through all blocks: encoders leave their outputs in it, decoders take them out."""

    class Encoder(Block):
        def forward(self, x: Tensor, ctx: dict[str, Any]) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            ctx.setdefault("skips", []).append(x)
            return x

    class Decoder(Block):
        def forward(self, x: Tensor, ctx: dict[str, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(x + ctx["skips"].pop())

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([Encoder(), Encoder()])
            self.up = nn.ModuleList([Decoder(), Decoder()])
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            ctx: dict[str, Any] = {}
            for block in [*self.down, *self.up]:
                x = block(x, ctx)
            assert not ctx["skips"]
            return self.head(x)

    fit(smp, out, UNet())


@dataclass
class Memory:
    """What one forward gathers."""

    hidden: Tensor
    norms: list[Tensor] = field(default_factory=list)
    depth: int = 0


@program(stages=(2,), ranks=(2,))
def state_object_through_blocks(smp: Any, out: Any) -> None:
    """Blocks take a dataclass, change its fields and return nothing."""

    class Cell(Block):
        def forward(self, state: Memory) -> None:  # type: ignore[override]
            state.hidden = super().forward(state.hidden)
            state.norms.append(state.hidden.norm())
            state.depth += 1

    class Model(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, Memory]:  # type: ignore[override]
            state = Memory(x)
            for block in self.blocks:
                block(state)
            return self.head(state.hidden / state.depth), state

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, state = model(x)
        return F.cross_entropy(logits, y) + 1e-3 * sum(state.norms)

    fit(smp, out, Model(Cell), loss)


@program(stages=(2,), ranks=(2,))
def output_list_passed_in(smp: Any, out: Any) -> None:
    """all_hidden_states: blocks append to a list that the container passes, and return the rest."""

    class Collecting(Block):
        def forward(self, x: Tensor, states: list[Tensor] | None = None) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            if states is not None:
                states.append(x)
            return x

    class Model(Stack):
        def forward(self, x: Tensor, every: bool = False) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
            states: list[Tensor] = []
            for block in self.blocks:
                x = block(x, states=states if every else None)
            return self.head(x), states

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, states = model(x, every=True)
        return F.cross_entropy(logits, y) + 0.01 * torch.stack(states).square().mean()

    fit(smp, out, Model(Collecting), loss)
