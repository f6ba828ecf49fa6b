"""Modules with odd signatures, insides, layouts and regions."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.programs import program
from tests.programs.themes.side_state import Block, Stack, batches, fit

# Odd signatures and insides -----------------------------------------------------------------------------


@dataclass
class Output:
    """Like transformers' ModelOutput, as a plain dataclass."""

    logits: Tensor
    hidden: Tensor | None = None
    loss: Tensor | None = None
    depth: int = 0


class Heads(NamedTuple):
    classes: Tensor
    boxes: Tensor


class _Rectified(nn.Module):
    """Changes its argument in place and returns a view of it."""

    def __init__(self, view_first: bool) -> None:
        super().__init__()
        self.rectify, self.flatten = nn.ReLU(inplace=True), nn.Flatten(1)
        self.view_first = view_first

    def forward(self, x: Tensor) -> Tensor:
        if not self.view_first:
            return self.flatten(self.rectify(x))
        view = x.flatten(1)
        self.rectify(x)
        return view


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0).flatten(1)


class _Convolved(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.spread = nn.Linear(8, 8)
        self.convolve = nn.Conv2d(1, 4, 3, padding=1)
        self.flat = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(1))
        if kind.startswith("module"):
            self.flat = _Rectified(kind == "module_view_first")  # type: ignore[assignment]
        if kind == "changed_again":
            self.flat = _Doubled()  # type: ignore[assignment]
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolve(self.spread(x).view(-1, 1, 2, 4))
        flat = self.flat(x)
        if self.kind == "argument_too":
            flat = self.norm(flat) + x.mean(1).repeat(1, 2, 2).flatten(1)
        if self.kind == "changed_again":
            flat.mul_(0.5)  # the argument too
            flat = self.norm(flat) + x.flatten(1)
        return self.head(flat)


class _Sum(nn.Module):
    def __init__(self, *nets: nn.Module) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([net(x) for net in self.nets]).sum(0)


@program(stages=(2, 3), ranks=(2,), static=True, pipelines=("interleaved", "simple"))
def in_place_and_flat(smp: Any, out: Any) -> None:
    """``nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(1))`` after a convolution."""
    fit(smp, out, _Convolved("plain"))


@program(stages=(2, 3), static=True)
def in_place_and_flat_in_one_module(smp: Any, out: Any) -> None:
    """The same as one module, which may make the view before it changes what it shows."""
    fit(smp, out, _Sum(_Convolved("module"), _Convolved("module_view_first")))


@program(stages=(2, 3), ranks=(3,), static=True)
def in_place_and_flat_used_again(smp: Any, out: Any) -> None:
    """What was changed, and its view, both have further uses; the view may be changed again."""
    fit(smp, out, _Sum(_Convolved("argument_too"), _Convolved("changed_again")))


@program(stages=(2,), ranks=(2,), refused="returns a sparse or nested tensor")
def sparse_between_modules(smp: Any, out: Any) -> None:
    class Sparse(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu().to_sparse()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse, self.head = Sparse(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.sparse(x).to_dense())

    fit(smp, out, Net())


@program(stages=(2,), ranks=(2,), static=True)
def outputs_of_all_kinds(smp: Any, out: Any) -> None:
    """Blocks give namedtuples, dicts, tuples with None and Python numbers; the model a dataclass."""
    point = namedtuple("point", ["x", "scale"])

    class AsTuple(Block):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return point(super().forward(x), 0.5)

    class AsDict(Block):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            return {"x": super().forward(x.x * x.scale), "mask": None, "depth": 2, "name": "dict"}

    class AsOptional(Block):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            return super().forward(x["x"] * x["depth"]), None, x["mask"]

    class AsHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 2)

        def forward(self, x: Any) -> Heads:
            return Heads(self.a(x[0]), self.b(x[0]))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([AsTuple(), AsDict(), AsOptional(), AsHeads()])

        def forward(self, x: Tensor, y: Tensor | None = None) -> Output:
            for layer in self.layers:
                x = layer(x)
            loss = F.cross_entropy(x.classes, y) + x.boxes.square().mean()
            return Output(x.classes, hidden=x.boxes, loss=loss, depth=len(self.layers))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        result = model(x, y=y)
        assert isinstance(result, Output) and result.depth == 4
        return result.loss

    fit(smp, out, Model(), loss)


@program(stages=(2,), ranks=(2,))
def anything_passed_on(smp: Any, out: Any) -> None:
    """*args and **kwargs wrappers, a scalar loss scale, None and strings on the way; a positional default."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    class Flexible(Block):
        def forward(
            self, x: Tensor, scale: float = 1.0, /, *more: Any, act: str = "", mask: Any = None
        ) -> Any:
            y = getattr(F, act)(self.up(self.norm(x)))
            y = x + scale * self.down(y)
            for extra in more:
                y = y + extra
            return y if mask is None else y * mask

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = x
            for i, block in enumerate(self.blocks):
                more = [first, first.mean(0)][:i]
                x = block(
                    x, 1 / (i + 1), *more, act=["relu", "gelu"][i % 2], mask=(x > -2) if i == 2 else None
                )
            return self.head(x)

    fit(smp, out, Model(lambda: Wrapper(Wrapper(Flexible()))))


@program(stages=(2, 3), ranks=(2,))
def callables_as_attributes(smp: Any, out: Any) -> None:
    """Lambdas, functools.partial and closures over tensors and parameters kept as attributes."""
    table = torch.linspace(0.5, 1.5, 8)

    class Callables(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))
            self.act = functools.partial(F.leaky_relu, negative_slope=0.2)
            self.scale = lambda x: x * table
            self.residual = self._with(self.gamma)

        @staticmethod
        def _with(gamma: Tensor) -> Any:
            def apply(x: Tensor, y: Tensor) -> Tensor:
                return x + gamma * y

            return apply

        def forward(self, x: Tensor) -> Tensor:
            return self.residual(x, self.down(self.act(self.up(self.scale(self.norm(x))))))

    fit(smp, out, Stack(Callables))


@program(stages=(2,), ranks=(2,))
def parameters_of_another_module(smp: Any, out: Any) -> None:
    """A closure in one block holds the parameter of another: cosine heads tied without tying."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.blocks = nn.Sequential(Block(), Block(), Block())
            self.back = lambda h: F.linear(h, self.first.weight.t())
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.blocks(self.first(x))
            return self.head(h), self.back(h)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, back = model(x)
        return F.cross_entropy(logits, y) + 0.1 * F.mse_loss(back, x)

    fit(smp, out, Tied(), loss)


@program(stages=(2,), ranks=(2,))
def copies_of_its_own_modules(smp: Any, out: Any) -> None:
    """The root copies a module and a parameter in its forward: no gradient flows through the copies."""

    class Copies(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            x = x + copy.deepcopy(self.blocks[0])(self.blocks[1](x))
            x = self.blocks[2](x) * copy.deepcopy(self.blocks[0].norm.weight)
            return self.head(x)

    fit(smp, out, Copies())


@program(stages=(2,), ranks=(2,))
def lazy_modules(smp: Any, out: Any) -> None:
    """LazyLinear and LazyBatchNorm1d, made real by a dry run before wrapping, as the docs tell."""
    net = nn.Sequential(
        nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4)
    )
    net(torch.zeros(2, 8))
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,))
def lazy_modules_at_the_first_step(smp: Any, out: Any) -> None:
    """LazyLinear is still uninitialised when it is wrapped; the first step would make it real."""
    net = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 8), nn.LazyLinear(4)
    )
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,))
def layer_built_in_the_first_call(smp: Any, out: Any) -> None:
    """A frozen projection is built when a block is first called, its size taken from the input."""

    class Built(Block):
        def __init__(self) -> None:
            super().__init__()
            self.projection: nn.Module | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.projection is None:
                linear = nn.utils.skip_init(nn.Linear, x.shape[-1], 8, bias=False)
                self.projection = linear.requires_grad_(False)
                nn.init.eye_(self.projection.weight)
            return super().forward(self.projection(x))

    fit(smp, out, Stack(Built))


@program(stages=(2, 3), ranks=(2,))
def wrapper_with_getattr(smp: Any, out: Any) -> None:
    """A wrapper (as peft's) hands unknown attributes to the wrapped model, and changes its outputs."""

    class Wrapped(nn.Module):
        def __init__(self, base: nn.Module, name: str) -> None:
            super().__init__()
            self.base = base
            self.register_parameter(name, nn.Parameter(torch.zeros(4)))
            self.name = name

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("base"), name)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x) + getattr(self, self.name)

    net = Wrapped(Wrapped(Stack(), "inner_bias"), "outer_bias")
    fit(smp, out, net)
    out.value("depth", len(net.blocks))


@program(stages=(2,), ranks=(2,))
def copies_of_itself(smp: Any, out: Any) -> None:
    """The model deep-copies a part of itself each call as a frozen target, as target networks do."""

    class Model(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = super().forward(x)
            with torch.no_grad():
                target = copy.deepcopy(self.blocks[0])(x)
            return logits, target

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, target = model(x)
        return F.cross_entropy(logits, y) + 0.1 * (logits - target[:, :4]).square().mean()

    fit(smp, out, Model(), loss)


# Regions ------------------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), static=True)
def gradient_modes(smp: Any, out: Any) -> None:
    """no_grad round frozen blocks, enable_grad in no_grad, set_grad_enabled by layer, detach in between."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.probe = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            with torch.no_grad():
                x = self.blocks[0](x)
                with torch.enable_grad():
                    probed = self.probe(x)
            for i, block in enumerate(self.blocks[1:]):
                with torch.set_grad_enabled(i != 0):
                    x = block(x)
            return self.head(x), probed

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, probed = model(x)
        return F.cross_entropy(logits, y) + F.cross_entropy(probed, y)

    fit(smp, out, Model(), loss)


@program(stages=(2,), ranks=(2,))
def inference_mode_evaluation(smp: Any, out: Any) -> None:
    """Evaluation under torch.inference_mode() inside the step and by decorator, training goes on after."""
    model = smp.DistributedModel(Stack())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(x).argmax(-1)

    @torch.inference_mode()
    def score(x: Tensor) -> Tensor:
        return evaluate(model, x).concat().float().mean()

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        out.value("score", score(x))
        out.value("classes", evaluate(model, x).concat())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def autocast_regions(smp: Any, out: Any) -> None:
    """bfloat16 autocast round the model, switched off within a block; one block casts by itself."""

    class Careful(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    class Half(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    kinds = iter([Block, Careful, Half, Block])
    net = Stack(lambda: next(kinds)())

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        return F.cross_entropy(logits.float(), y)

    fit(smp, out, net, loss)


@program(stages=(2,), ranks=(2,))
def double_precision_in_blocks(smp: Any, out: Any) -> None:
    """set_default_dtype(float64) round the model; blocks make tensors without a dtype."""

    class Doubled(Block):
        def forward(self, x: Tensor) -> Tensor:
            steps = torch.linspace(0, 1, 8)
            small = torch.finfo(steps.dtype).eps ** 0.125
            return (super().forward(x) + small * steps).to(x.dtype)

    @contextlib.contextmanager
    def default_dtype() -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(before)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with default_dtype():
            logits = model(x)
        return F.cross_entropy(logits, y)

    fit(smp, out, Stack(Doubled), loss)


@program(stages=(2,), ranks=(2,))
def attention_kernel_picked(smp: Any, out: Any) -> None:
    """with sdpa_kernel(SDPBackend.MATH): in the step; F.scaled_dot_product_attention in blocks."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            b, n, d = x.shape
            q, k, v = self.qkv(x).view(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.proj(y.transpose(1, 2).reshape(b, n, d))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Attention() for _ in range(4)))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(x.unsqueeze(1) * torch.linspace(0.2, 1, 5)[:, None]).mean(1))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.cross_entropy(model(x), y)

    fit(smp, out, Model(), loss)


@program(stages=(2,), ranks=(2,))
def checkpointing_both_ways(smp: Any, out: Any) -> None:
    """torch.utils.checkpoint in the container, reentrant for some blocks only, and within a block."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(lambda h: self.down(F.gelu(self.up(h))), self.norm(x), use_reentrant=False)

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for i, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=bool(i % 2)) if self.training else block(x)
            return self.head(x)

    kinds = iter([Block, Inner, Block, Inner])
    fit(smp, out, Model(lambda: next(kinds)()))


# In place, layouts, dtypes ------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,), static=True, refused_static="static_mode: True")
def in_place_on_inputs_and_views(smp: Any, out: Any) -> None:
    """Blocks change their input in place, the container changes slices of what blocks give, x += block(x)."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x[:, 4:] *= 0.5
            y = F.silu(self.linear(x))
            y[:, 0].add_(1)
            return y

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            for block in self.blocks:
                y = block(x.clone())
                y[:, :2] = x[:, 2:4]
                y[y < -1] = -1
                y.masked_fill_(y > 3, 3).mul_(0.9)
                x = x + y
                x += 0.1
            return self.head(x)

    fit(smp, out, Model(InPlace))


@program(stages=(2,), ranks=(2,))
def input_changed_by_a_block(smp: Any, out: Any) -> None:
    """A block writes into the very tensor that the container goes on with (normalisation in place)."""

    class Normalising(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x.sub_(x.mean(-1, keepdim=True))
            return super().forward(x)

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            total = 0
            for block in self.blocks:
                y = block(x)
                total = total + x * y
                x = y.detach().clone()
            return self.head(total)

    fit(smp, out, Model(Normalising))


@program(stages=(2,), ranks=(2,))
def batch_changed_in_place(smp: Any, out: Any) -> None:
    """The first module writes into the batch itself; the script looks at its batch after the step."""

    class Standardise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sub_(x.mean(0)).div_(x.std(0) + 1e-3)

    model = smp.DistributedModel(nn.Sequential(Standardise(), Block(), Block(), Block(), nn.Linear(8, 4)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        out.value("batch", x)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def spectra_of_complex_numbers(smp: Any, out: Any) -> None:
    """FNet and a global filter: rfft, complex parameters, view_as_complex, abs; complex between blocks."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 2) * 0.2)
            self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64) * 0.2)

        def forward(self, z: Tensor) -> Tensor:
            return z + z * torch.view_as_complex(self.weight) + self.phase * z.abs()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Filter() for _ in range(4)))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.irfft(self.blocks(torch.fft.rfft(x)), n=8))

    fit(smp, out, Model())


@program(stages=(2,), ranks=(2,))
def layouts_kept(smp: Any, out: Any) -> None:
    """channels_last images and transposed values between blocks; blocks insist on their strides."""

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            assert x.stride() == (8, 1, 2, 4), x.stride()
            return x + self.conv(x).relu()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.Sequential(*(Conv() for _ in range(4)))
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
            x = self.convs(x.transpose(2, 3))
            assert x.stride(1) == 1
            x = x.flatten(2).transpose(1, 2)
            return self.mix(x.contiguous().view(x.shape[0], -1)[:, ::2])

    net = Model().to(memory_format=torch.channels_last)
    fit(smp, out, net)


@program(stages=(2,), ranks=(2,))
def einsum_everywhere(smp: Any, out: Any) -> None:
    """Container code in einsum, between blocks of bare parameters (four gradients of each x meet)."""

    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 4, 4) / 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bhi,hij->bhj", x, self.w).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Bilinear() for _ in range(4))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.unflatten(-1, (2, 4))
            for layer in self.layers:
                scores = torch.einsum("bhi,bgi->bhg", x, layer(x)).softmax(-1)
                x = x + torch.einsum("bhg,bgi->bhi", scores, x)
            return self.head(x.movedim(1, 2).reshape(x.shape[0], -1))

    fit(smp, out, Model())


class Reverse(torch.autograd.Function):
    """Gradient reversal, with saved tensors and plain attributes on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return -ctx.scale * grad * (x.abs() < 2), None


@program(stages=(2,), ranks=(2,))
def gradient_reversal(smp: Any, out: Any) -> None:
    """DANN: an autograd.Function in the container and one in a block, its strength set from step to step."""

    class Straight(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Reverse.apply(x, -1.0))

    class DANN(Stack):
        def __init__(self) -> None:
            super().__init__(Straight)
            self.domain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
            self.strength = 0.0

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            for block in self.blocks:
                x = block(x)
            return self.head(x), self.domain(Reverse.apply(x, self.strength))

    net = DANN()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, domain = model(x)
        loss = F.cross_entropy(logits, y) + F.cross_entropy(domain, y % 2)
        model.backward(loss)
        return loss

    for i, (x, y) in enumerate(batches(smp)):
        net.strength = 0.5 * i
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def weights_set_to_data(smp: Any, out: Any) -> None:
    """A block normalises its weights in place under no_grad at each call in training (max-norm)."""

    class MaxNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.linear.weight.data.renorm_(2, 0, 0.5)
            return x + torch.tanh(self.linear(x))

    fit(smp, out, Stack(MaxNorm), lr=0.5)


@program(
    stages=(2, 4),
    ranks=(2,),
    parameters={"auto_partition": False, "default_partition": 0},
)
def one_module_at_many_places(smp: Any, out: Any) -> None:
    """Universal transformer: a block for all depths, told its depth, between placed ones (gradients meet)."""

    class Deep(Block):
        def __init__(self) -> None:
            super().__init__()
            self.depths = nn.Embedding(4, 8)

        def forward(self, x: Tensor, depth: int) -> Tensor:  # type: ignore[override]
            return super().forward(x + self.depths(torch.tensor(depth)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            with smp.partition(1):
                self.shared = Deep()
            self.mixers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for depth, mixer in enumerate(self.mixers):
                x = mixer(self.shared(x, depth=depth))
            return self.head(x)

    fit(smp, out, Model())
