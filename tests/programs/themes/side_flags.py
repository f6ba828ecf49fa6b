"""Flags that change what a module does, caches, and state that lives over steps."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program
from tests.programs.themes.side_state import Block, Stack, fit

# Flags --------------------------------------------------------------------------------------------------


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


@program(stages=(2,), ranks=(2,))
def global_flag_by_context(smp: Any, out: Any) -> None:
    """A module-level global that a context manager sets round one of three passes (three gradients)."""

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


@program(stages=(2,), ranks=(2,))
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


@program(stages=(2,), ranks=(2,))
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


@program(stages=(2,), ranks=(2,))
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


@program(stages=(2,), ranks=(2,))
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


@program(stages=(2,), ranks=(2,))
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


# Caches -------------------------------------------------------------------------------------------------


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
    """A layer memoises a softmax of its weights till the container says they changed (once a forward)."""

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


# State over steps ---------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), static=True, refused_static="static_mode: True")
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


@program(stages=(2,), ranks=(2,), static=True, refused_static="static_mode: True")
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


@program(stages=(2,), ranks=(2,), static=True, refused_static="static_mode: True")
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
