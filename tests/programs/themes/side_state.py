"""Modules that keep things: counters, auxiliary losses, flags, caches and objects that forward changes."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
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


# Auxiliary losses ---------------------------------------------------------------------------------------------


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


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2), pipelines=("interleaved", "simple"), static=True)
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
    """Layers put penalties in a dict of the script's, as TensorFlow's collections did; the step empties it."""

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


# Counters -----------------------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), static=True)
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


@program(stages=(2,), ranks=(2,), static=True)
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


@program(stages=(2,), ranks=(2,), static=True)
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


# Objects that blocks change -----------------------------------------------------------------------------------


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


# Flags --------------------------------------------------------------------------------------------------------


class Flagged(Block):
    """Reads a flag while it runs."""

    read: Callable[[], float]

    def forward(self, x: Tensor) -> Tensor:
        return x + type(self).read() * self.down(torch.tanh(self.up(self.norm(x))))


def two_passes(smp: Any, out: Any, net: nn.Module, strong: Callable[[], Any]) -> None:
    """A consistency loss: one pass as is, one with the flag set."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        plain = model(x)
        with strong():
            changed = model(x)
        again = model(x)
        return F.cross_entropy(plain, y) + F.mse_loss(changed, plain) + 0.5 * again.square().mean()

    fit(smp, out, net, loss)


_SCALE = 1.0


@program(stages=(2,), ranks=(2,), tolerance=1e-6)
def global_flag_by_context(smp: Any, out: Any) -> None:
    """A module-level global that a context manager sets round one of three passes (sums of three gradients)."""

    class Global(Flagged):
        read = staticmethod(lambda: _SCALE)

    @contextlib.contextmanager
    def scaled() -> Iterator[None]:
        global _SCALE
        before, _SCALE = _SCALE, 0.25
        try:
            yield
        finally:
            _SCALE = before

    two_passes(smp, out, Stack(Global), scaled)


_VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@program(stages=(2,), ranks=(2,), tolerance=1e-6)
def contextvar_flag(smp: Any, out: Any) -> None:
    """The same by a context variable (sums of three gradients)."""

    class Variable(Flagged):
        read = staticmethod(_VARIABLE.get)

    @contextlib.contextmanager
    def scaled() -> Iterator[None]:
        token = _VARIABLE.set(2.0)
        yield
        _VARIABLE.reset(token)

    two_passes(smp, out, Stack(Variable), scaled)


_LOCAL = threading.local()


@program(stages=(2,), ranks=(2,), tolerance=1e-6)
def thread_local_flag(smp: Any, out: Any) -> None:
    """The same by an attribute of a threading.local (sums of three gradients)."""

    class Local(Flagged):
        read = staticmethod(lambda: getattr(_LOCAL, "scale", 1.0))

    @contextlib.contextmanager
    def scaled() -> Iterator[None]:
        _LOCAL.scale = 0.5
        yield
        del _LOCAL.scale

    two_passes(smp, out, Stack(Local), scaled)


@program(stages=(2,), ranks=(2,), tolerance=1e-6)
def class_attribute_flag(smp: Any, out: Any) -> None:
    """The same by an attribute of the class (sums of three gradients)."""

    class Switched(Block):
        causal = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(self.norm(x))
            return x + self.down(h.cumsum(-1) / 8 if self.causal else F.relu(h))

    @contextlib.contextmanager
    def causal() -> Iterator[None]:
        Switched.causal = True
        yield
        Switched.causal = False

    two_passes(smp, out, Stack(Switched), causal)


@program(stages=(2,), ranks=(2,), tolerance=1e-6)
def config_object_flag(smp: Any, out: Any) -> None:
    """All blocks share one config, a field of which is changed between two passes (sums of gradients)."""
    config = SimpleNamespace(temperature=1.0, act=F.gelu)

    class Configured(Block):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.config.act(self.up(self.norm(x)) / self.config.temperature))

    @contextlib.contextmanager
    def hot() -> Iterator[None]:
        config.temperature, config.act = 3.0, torch.sigmoid
        yield
        config.temperature, config.act = 1.0, F.gelu

    two_passes(smp, out, Stack(Configured), hot)


class LoRA(nn.Module):
    """A linear layer with named adapters, of which one is active."""

    def __init__(self, base: nn.Linear, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.ModuleDict({n: nn.Linear(base.in_features, 2, bias=False) for n in names})
        self.b = nn.ModuleDict({n: nn.Linear(2, base.out_features, bias=False) for n in names})
        self.active: str | None = names[0]

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.active is None else y + self.b[self.active](self.a[self.active](x))


@program(stages=(2, 3), ranks=(2,), static=True)
def adapters_switched_between_passes(smp: Any, out: Any) -> None:
    """DPO with adapters: the reference pass with them off, under no_grad, then the policy's pass."""
    net = Stack()
    for block in net.blocks:
        block.up = LoRA(block.up, ("policy", "other"))
    adapters = [m for m in net.modules() if isinstance(m, LoRA)]

    @contextlib.contextmanager
    def use(name: str | None) -> Iterator[None]:
        for adapter in adapters:
            adapter.active = name
        yield
        for adapter in adapters:
            adapter.active = "policy"

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad(), use(None):
            reference = model(x).log_softmax(-1).gather(1, y[:, None])
        policy = model(x).log_softmax(-1).gather(1, y[:, None])
        with use("other"):
            other = model(x).log_softmax(-1).gather(1, y[:, None])
        return -F.logsigmoid(0.5 * (policy - reference)).mean() - 0.1 * other.mean()

    fit(smp, out, net, loss)


@program(stages=(2,), ranks=(2,), tolerance=1e-6)
def mode_set_between_two_calls_of_a_block(smp: Any, out: Any) -> None:
    """The container sets block.direction before each of two calls of it (two gradients meet)."""

    class Scan(Block):
        direction = 1

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.direction > 0 else x.flip(-1))

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                block.direction = 1
                ahead = block(x)
                block.direction = -1
                x = ahead + block(x)
            return self.head(x)

    fit(smp, out, Model(Scan))


# Caches -------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Tables made when a longer sequence comes, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}
        self.misses = 0

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.cache:
            self.misses += 1
            self.cache[length] = torch.cos(
                torch.arange(length, dtype=x.dtype)[:, None] / (1 + torch.arange(4))
            )
        return x * self.cache[length]


class Mixer(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.mix(self.rotary(x))))


@program(stages=(2,), ranks=(2,))
def table_cache_in_a_dict(smp: Any, out: Any) -> None:
    """Blocks share one module with a dict of tables by length; lengths vary from step to step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary()
            self.blocks = nn.ModuleList(Mixer(self.rotary) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.mean(1)

    net = Model()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(5)
    for length in (6, 3, 6, 8):
        x = torch.randn(4, length, 4, generator=generator)
        optimizer.zero_grad(set_to_none=True)
        out.value("loss", train_step(model, x, torch.tensor([0, 1, 2, 3])).reduce_mean())
        optimizer.step()
    out.value("misses", net.rotary.misses)
    out.value("lengths", sorted(net.rotary.cache))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def lru_cache_on_a_method(smp: Any, out: Any) -> None:
    """functools.lru_cache on a method that makes a bias table out of a parameter-free function."""

    class Biased(Block):
        @functools.lru_cache(maxsize=4)  # noqa: B019
        def table(self, width: int) -> Tensor:
            return -torch.arange(width, dtype=torch.float32) / width

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.table(x.shape[-1]))

    net = Stack(Biased)
    fit(smp, out, net)
    info = Biased.table.cache_info()
    out.value("cache", [info.hits, info.misses])


@program(stages=(2,), ranks=(2,))
def reparametrised_weight_memo(smp: Any, out: Any) -> None:
    """A layer memoises a softmax of its weights till the container says that they changed (once a forward)."""

    class Memo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raw = nn.Parameter(torch.randn(8, 8) / 3)
            self.memo: Tensor | None = None

        @property
        def weight(self) -> Tensor:
            if self.memo is None:
                self.memo = self.raw.softmax(-1)
            return self.memo

        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                block.memo = None
            return super().forward(x)

    fit(smp, out, Model(Memo))


class Cache:
    """Keys and values by layer."""

    def __init__(self) -> None:
        self.store: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.store:
            k = torch.cat([self.store[layer][0], k], 1)
            v = torch.cat([self.store[layer][1], v], 1)
        self.store[layer] = (k, v)
        return k, v


class CachedAttention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        q, k, v = self.qkv(x).split(8, -1)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(CachedAttention(i) for i in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)


@program(stages=(2,), ranks=(2,), static=False)
def own_key_value_cache(smp: Any, out: Any) -> None:
    """Training without a cache, then greedy decoding in a step with one's own cache object."""
    model = smp.DistributedModel(Decoder())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, ids: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        model.backward(loss)
        return loss

    @smp.step
    def generate(model: Any, ids: Tensor) -> Tensor:
        cache = Cache()
        with torch.no_grad():
            step = ids
            for _ in range(4):
                token = model(step, cache)[:, -1:].argmax(-1)
                ids = torch.cat([ids, token], 1)
                step = token
        return ids

    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        ids = torch.randint(0, 11, (4, 6), generator=generator)
        optimizer.zero_grad()
        out.value("loss", train_step(model, ids).reduce_mean())
        optimizer.step()
    out.value("text", generate(model, ids[:, :3]).concat())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def tuple_key_values_returned(smp: Any, out: Any) -> None:
    """past_key_values as tuples that layers take and give back, in training over two halves of a sequence."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.proj = nn.Linear(8, 8)

        def forward(self, x: Tensor, past: Any = None) -> Any:
            q, k, v = self.qkv(x).split(8, -1)
            if past is not None:
                k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
            return x + self.proj(F.scaled_dot_product_attention(q, k, v)), (k, v)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Tensor, past: Any = None) -> Any:
            presents = []
            for layer, old in zip(self.layers, past or [None] * len(self.layers)):
                x, present = layer(x, old)
                presents.append(present)
            return x, tuple(presents)

    model = smp.DistributedModel(Model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        first, past = model(x[:, :3])
        past = tuple((k.detach(), v.detach()) for k, v in past)
        second, _ = model(x[:, 3:], past)
        loss = first.square().mean() + (second - x[:, 3:].roll(1, 1)).square().mean()
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(model, torch.randn(4, 6, 8, generator=generator)).reduce_mean())
        optimizer.step()
    out.model(model)


# State over steps ---------------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), static=True)
def hidden_state_kept_over_steps(smp: Any, out: Any) -> None:
    """Stateful recurrent layers: self.hidden of one call starts the next, detached."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 8)
            self.hidden: Tensor | None = None

        def reset(self) -> None:
            self.hidden = None

        def forward(self, x: Tensor) -> Tensor:
            if self.hidden is None:
                self.hidden = x.new_zeros(x.shape[0], 8)
            self.hidden = self.cell(x, self.hidden.detach())
            return x + self.hidden

    net = Stack(Stateful, depth=3)
    model = fit(smp, out, net)
    for block in net.blocks:
        block.reset()

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    out.value("after reset", evaluate(model, torch.ones(8, 8)).concat())
    out.value("hidden", [b.hidden for b in net.blocks])


@program(stages=(2,), ranks=(2,), static=True)
def hidden_state_on_the_model(smp: Any, out: Any) -> None:
    """The model's top-level forward keeps the last features and mixes them into the next call."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.last is not None:
                x = 0.8 * x + 0.2 * self.last
            for block in self.blocks:
                x = block(x)
            self.last = x.detach()
            return self.head(x)

    net = Model()
    fit(smp, out, net)
    out.value("last", net.last)


@program(stages=(2,), ranks=(2,), static=True)
def iterator_as_attribute(smp: Any, out: Any) -> None:
    """A block takes its scale from an itertools.cycle, another from a generator of its own."""

    class Cycled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([1.0, 0.5, 0.25])

        def forward(self, x: Tensor) -> Tensor:
            return x + next(self.scales) * self.down(F.relu(self.up(self.norm(x))))

    fit(smp, out, Stack(Cycled))


@program(stages=(2,), ranks=(2,))
def property_with_a_side_effect(smp: Any, out: Any) -> None:
    """Reading block.scale counts and decays; the container reads it, too."""

    class Decaying(Block):
        def __init__(self) -> None:
            super().__init__()
            self.reads = 0

        @property
        def scale(self) -> float:
            self.reads += 1
            return 0.9**self.reads

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * self.down(self.up(self.norm(x)))

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) * block.scale
            return self.head(x)

    net = Model(Decaying)
    fit(smp, out, net)
    out.value("reads", [b.reads for b in net.blocks])


@program(stages=(2,), ranks=(2,))
def meters_in_a_defaultdict(smp: Any, out: Any) -> None:
    """The step function fills a defaultdict of lists by loss.item() and per-layer norms that layers left."""
    meters: dict[str, list[float]] = defaultdict(list)

    class Normed(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.ratio = (y.norm() / x.norm()).item()
            return y

    net = Stack(Normed)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(model(x), y)
        meters["loss"].append(value.item())
        for i, block in enumerate(net.blocks):
            meters[f"ratio{i}"].append(block.ratio)
        return value

    fit(smp, out, net, loss)
    out.value("meters", OrderedDict(sorted(meters.items())))
