"""Buffers that forward changes or binds anew, and parts of them that other modules read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program
from tests.programs.themes.side_state import Block, Stack, batches, fit


class ConvBlock(nn.Module):
    """Convolution, a given norm, ReLU, and a residual."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 4, 1)
        self.blocks = nn.Sequential(*(ConvBlock(norm) for norm in norms))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x.view(-1, 2, 4))).mean(-1))


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2), pipelines=("interleaved", "simple"), static=True)
def batch_norms_of_three_kinds(smp: Any, out: Any) -> None:
    """Batch norms with a momentum, a cumulative one and one without statistics; then eval() in a step."""
    net = ConvNet(
        nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4, track_running_stats=False),
        nn.InstanceNorm1d(4, track_running_stats=True, affine=True), nn.BatchNorm1d(4, affine=False),
    )  # fmt: skip
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    for x, y in batches(smp):
        model.train()
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        model.eval()
        # Buffers of another replica may differ: here each replica has its own batches.
        out.value("logits", evaluate(model, torch.ones(4, 8)).concat() if smp.dp_size() == 1 else None)
    if smp.dp_size() == 1:
        out.model(model)


@program(stages=(2,), ranks=(2,))
def siamese_batch_norm(smp: Any, out: Any) -> None:
    """SimSiam: the same encoder with batch norms is called twice a microbatch (two gradients meet)."""

    class SimSiam(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)
            )
            self.predictor = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            za, zb = self.encoder(a), self.encoder(b)
            return self.predictor(za), self.predictor(zb), za.detach(), zb.detach()

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        pa, pb, za, zb = model(x, x + 0.1 * x.flip(0))
        return -(F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean()) / 2

    fit(smp, out, SimSiam(), loss)


@program(stages=(2,), ranks=(2,))
def statistics_read_by_the_loss(smp: Any, out: Any) -> None:
    """DeepInversion: the step's loss compares the running statistics of all batch norms with a target."""
    net = ConvNet(*(nn.BatchNorm1d(4) for _ in range(4)))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(model(x), y)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                value = value + 0.1 * (module.running_var - 1).square().mean()
        return value

    fit(smp, out, net, loss)


@program(stages=(2,), ranks=(2,))
def statistics_of_the_neighbour(smp: Any, out: Any) -> None:
    """A block normalises by the running mean of the block before it (a reference, not a submodule)."""

    class Follower(nn.Module):
        def __init__(self, before: Any) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.linear = nn.Linear(8, 8)
            self.__dict__["before"] = before

        def forward(self, x: Tensor) -> Tensor:
            if self.before is not None:
                x = x - self.before.norm.running_mean
            return x + torch.tanh(self.linear(self.norm(x)))

    made: list[Any] = [None]

    def make() -> nn.Module:
        made.append(Follower(made[-1]))
        return made[-1]

    fit(smp, out, Stack(make))


@program(stages=(2,), ranks=(2,), static=True)
def codebook_by_moving_average(smp: Any, out: Any) -> None:
    """VQ-VAE: the codebook is a buffer, updated in place by what each microbatch assigns; dead codes too."""

    class Quantizer(nn.Module):
        def __init__(self, size: int = 6, width: int = 8) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(size, width))
            self.register_buffer("counts", torch.ones(size))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            index = torch.cdist(z, self.codes).argmin(-1)
            hot = F.one_hot(index, len(self.codes)).to(z.dtype)
            quantized = self.codes[index]
            if self.training:
                with torch.no_grad():
                    self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.sums.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                    self.codes.copy_(self.sums / self.counts.clamp(min=0.1)[:, None])
            commitment = F.mse_loss(z, quantized.detach())
            return z + (quantized - z).detach(), commitment, index

    class VQ(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(Block(), Block())
            self.quantizer = Quantizer()
            self.decoder = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            z, commitment, index = self.quantizer(self.encoder(x))
            return self.decoder(z), commitment, index

    model = smp.DistributedModel(VQ())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, commitment, index = model(x)
        loss = F.mse_loss(y, x) + 0.25 * commitment
        model.backward(loss)
        return loss, index

    for x, _ in batches(smp, steps=4):
        optimizer.zero_grad()
        loss, index = train_step(model, x)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("codes used", index.concat().unique().numel())
    out.model(model)


@program(stages=(2,), ranks=(2,), static=True)
def buffers_bound_anew(smp: Any, out: Any) -> None:
    """self.step = self.step + 1 and self.mean = 0.9 * self.mean + ...: new tensors under the same names."""

    class Normalizer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.count = self.count + 1
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x - self.mean / (1 - 0.9**self.count))

    fit(smp, out, Stack(Normalizer))


@program(stages=(2,), ranks=(2,))
def buffer_registered_in_the_first_call(smp: Any, out: Any) -> None:
    """ActNorm: scale and shift come from the first batch, a flag says that they are set."""

    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(8))
            self.shift = nn.Parameter(torch.zeros(8))
            self.linear = nn.Linear(8, 8)
            self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training and self.ready.item() == 0:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.log_scale.copy_(-x.std(0).log())
                    self.ready.fill_(1)
            return x + torch.tanh(self.linear((x + self.shift) * self.log_scale.exp()))

    fit(smp, out, Stack(ActNorm))


@program(stages=(2,), ranks=(2,))
def ema_teacher_in_the_model(smp: Any, out: Any) -> None:
    """BYOL: the model's forward moves its teacher towards the student before it calls it."""

    class BYOL(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(Block(), Block())
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.predictor = Block()

        @torch.no_grad()
        def move(self) -> None:
            for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                t.mul_(0.9).add_(s, alpha=0.1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            student = self.predictor(self.student(x))
            with torch.no_grad():
                self.move()
                teacher = self.teacher(x.roll(1, -1))
            return student, teacher

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        student, teacher = model(x)
        return 2 - 2 * F.cosine_similarity(student, teacher).mean()

    fit(smp, out, BYOL(), loss)


@program(stages=(2,), ranks=(2,), refused_on_ranks="takes a tensor of stage")
def ema_teacher_between_steps(smp: Any, out: Any) -> None:
    """Mean teacher: within the model, but moved by the script after optimizer.step(), data.lerp_."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = Stack(depth=2)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                soft = self.teacher(x)
            return self.student(x), soft

    net = Pair()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.student.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, soft = model(x)
        loss = F.cross_entropy(logits, y) + F.mse_loss(logits, soft)
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        for t, s in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
            t.data.lerp_(s.data, 0.5)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def balance_bias_of_a_router(smp: Any, out: Any) -> None:
    """DeepSeek: a bias buffer steers top-k routing; layers count loads, the script moves the bias."""

    class MoE(nn.Module):
        def __init__(self, experts: int = 4) -> None:
            super().__init__()
            self.router = nn.Linear(8, experts, bias=False)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
            self.register_buffer("bias", torch.zeros(experts))
            self.register_buffer("load", torch.zeros(experts), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.router(x).sigmoid()
            index = (scores + self.bias).topk(2, -1).indices
            weights = scores.gather(-1, index)
            weights = weights / weights.sum(-1, keepdim=True)
            y = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows, slots = (index == i).nonzero(as_tuple=True)
                self.load[i] += rows.numel()
                y.index_add_(0, rows, weights[rows, slots, None] * expert(x[rows]))
            return x + y

    net = Stack(MoE)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for x, y in batches(smp, steps=4):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            for block in net.blocks:
                block.bias += 0.1 * torch.sign(block.load.mean() - block.load)
                block.load.zero_()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def queue_in_the_top_level(smp: Any, out: Any) -> None:
    """MoCo: a queue buffer and its pointer, written in place by the model's own forward."""

    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(Block(), Block(), Block(), Block())
            self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def enqueue(self, keys: Tensor) -> None:
            start = int(self.pointer)
            self.queue[:, start : start + keys.shape[0]] = keys.t()
            self.pointer[0] = (start + keys.shape[0]) % 16

        def forward(self, x: Tensor) -> Tensor:
            q = F.normalize(self.encoder(x), dim=1)
            with torch.no_grad():
                k = F.normalize(self.encoder(x.flip(-1)), dim=1)
            positive = (q * k).sum(1, keepdim=True)
            negative = q @ self.queue.clone().detach()
            self.enqueue(k)
            return torch.cat([positive, negative], 1) / 0.2

    fit(smp, out, MoCo(), lambda m, x, y: F.cross_entropy(m(x), torch.zeros_like(y)))


@program(stages=(2,), ranks=(2,))
def centre_in_the_loss_module(smp: Any, out: Any) -> None:
    """DINO: the loss is a module outside the model, whose centre buffer the step updates."""

    class DINOLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1, 4))

        def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
            soft = ((teacher - self.center) / 0.5).softmax(-1).detach()
            self.center = 0.8 * self.center + 0.2 * teacher.detach().mean(0, keepdim=True)
            return -(soft * student.log_softmax(-1)).sum(-1).mean()

    criterion = DINOLoss()

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return criterion(model(x), model(x.flip(-1)).detach())

    fit(smp, out, Stack(), loss)
    out.value("centre", criterion.center)


@program(stages=(2,), ranks=(2,), static=True)
def buffer_replaced_between_steps(smp: Any, out: Any) -> None:
    """The script sets block.mask to a new tensor, then changes another in place, then adds a buffer."""

    class Masked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) * self.mask
            return y + self.extra if hasattr(self, "extra") else y

    net = Stack(Masked)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for i, (x, y) in enumerate(batches(smp, steps=4)):
        if i == 1:
            net.blocks[1].mask = torch.linspace(0, 1, 8)
        if i == 2:
            net.blocks[3].mask[::2] = 0.5
        if i == 3:
            net.blocks[2].register_buffer("extra", torch.full((8,), 0.25))
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def masks_grown_on_demand(smp: Any, out: Any) -> None:
    """A non-persistent causal mask of a shared attention base is made larger when a longer input comes."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.proj = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tril(torch.ones(2, 2)).bool(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            if n > self.mask.shape[0]:
                self.register_buffer("mask", torch.tril(torch.ones(n, n)).bool(), persistent=False)
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = (q @ k.mT / 2).masked_fill(~self.mask[:n, :n], float("-inf"))
            return x + self.proj(scores.softmax(-1) @ v)

    model = smp.DistributedModel(nn.Sequential(*(Causal() for _ in range(4))))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x)[:, :-1], x[:, 1:])
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(4)
    for length in (2, 5, 3, 7):
        optimizer.zero_grad()
        out.value("loss", train_step(model, torch.randn(4, length, 4, generator=generator)).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def batch_norm_frozen_after_a_step(smp: Any, out: Any) -> None:
    """Detectors: train() is overridden: it freezes batch norms, after the first step."""

    class Frozen(ConvNet):
        freeze = False

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            if self.freeze:
                for module in self.modules():
                    if isinstance(module, nn.BatchNorm1d):
                        module.eval()
                        module.requires_grad_(False)
            return self

    net = Frozen(*(nn.BatchNorm1d(4) for _ in range(4)))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for x, y in batches(smp, steps=4):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        net.freeze = True
    out.model(model)


@program(stages=(2,), ranks=(2,))
def batch_renorm_with_branches(smp: Any, out: Any) -> None:
    """Batch renormalisation: limits grow with num_batches_tracked.item(), statistics move by lerp_."""

    class BatchRenorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.bias = nn.Parameter(torch.zeros(4))
            self.register_buffer("mean", torch.zeros(4, 1))
            self.register_buffer("std", torch.ones(4, 1))
            self.register_buffer("num_batches_tracked", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return (x - self.mean) / self.std * self.weight[:, None] + self.bias[:, None]
            mean = x.mean((0, 2))[:, None]
            std = x.std((0, 2), unbiased=False)[:, None] + 1e-5
            limit = 1 + min(self.num_batches_tracked.item(), 4) / 2
            r = (std.detach() / self.std).clamp(1 / limit, limit)
            d = ((mean.detach() - self.mean) / self.std).clamp(-limit, limit)
            self.mean.lerp_(mean.detach(), 0.3)
            self.std.lerp_(std.detach(), 0.3)
            self.num_batches_tracked += 1
            return ((x - mean) / std * r + d) * self.weight[:, None] + self.bias[:, None]

    fit(smp, out, ConvNet(*(BatchRenorm() for _ in range(4))))


@program(stages=(2,), ranks=(2,), microbatches=2)
def buffers_looked_at_in_all_ways(smp: Any, out: Any) -> None:
    """Step functions count, copy, save and compare buffers of all stages, before and after the call."""
    net = ConvNet(*(nn.BatchNorm1d(4) for _ in range(4)))
    for index, block in enumerate(net.blocks):
        block.register_buffer("scale", torch.full((4, 1), 1.0 + index))
    log: list[Any] = []

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        counts = [int(block.norm.num_batches_tracked) for block in net.blocks]
        before = [block.norm.running_mean.clone() for block in net.blocks]
        value = F.cross_entropy(model(x), y)
        moved = [float((block.norm.running_mean - old).abs().sum()) for block, old in zip(net.blocks, before)]
        saved = {name: tensor.double().sum().item() for name, tensor in net.named_buffers()}
        log.append((counts, moved, saved, net.blocks[3].norm.running_var.dtype, list(before[0].shape)))
        value = value * sum(block.scale.mean() for block in net.blocks) / 10
        return value + sum(block.norm.running_var.mean() for block in net.blocks) / 4

    fit(smp, out, net, loss)
    out.value("log", repr(log))


@program(stages=(2,), ranks=(2,))
def buffers_set_in_the_step(smp: Any, out: Any) -> None:
    """A step function resets statistics of one stage by those of the other, every second time."""
    net = ConvNet(*(nn.BatchNorm1d(4) for _ in range(4)))
    times = [0]

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        times[0] += 1
        if times[0] % 2 == 0:
            net.blocks[3].norm.running_mean.copy_(net.blocks[0].norm.running_mean * 0.5)
            net.blocks[0].norm.running_var.mul_(0.9)
            net.blocks[1].norm.num_batches_tracked.zero_()
        return F.cross_entropy(model(x), y)

    fit(smp, out, net, loss)


@program(stages=(2,), ranks=(2,), pipelines=("interleaved", "zero_bubble"), static=True)
def steps_that_do_not_use_the_model(smp: Any, out: Any) -> None:
    """A second step function computes statistics of the batch alone, between steps that train."""

    @smp.step
    def of_the_batch(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.double().sum()

    net = ConvNet(nn.BatchNorm1d(4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for _ in range(3):
        for x, y in batches(smp):
            doubled, total = of_the_batch(x)
            out.value("doubled", doubled.concat())
            out.value("total", total.reduce_mean())
            optimizer.zero_grad()
            out.value("loss", train_step(model, x, y).reduce_mean())
            optimizer.step()
    out.model(model)


class Changing(Stack):
    """After a placed call has read ``scale``, which is made anew each time, a function changes it."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__(Block)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1.5, 8)
        x = self.blocks[0](x) + scale
        self.change(scale)
        return super().forward(x * scale)


def _sorts(scale: Tensor) -> None:
    torch.sort(torch.cos(scale), out=(scale, torch.empty(8, dtype=torch.long)))


def _normalizes(scale: Tensor) -> None:
    F.batch_norm(torch.ones(4, 8).cumsum(0), scale, torch.ones(8), training=True)


def _normalizes_instances(scale: Tensor) -> None:
    values = torch.ones(4, 8, 3).cumsum(0)
    F.instance_norm(values, running_mean=scale, running_var=torch.ones(8), use_input_stats=True)


def _multiplies_lists(scale: Tensor) -> None:
    torch._foreach_mul_([scale], 2.0)


@program(stages=(2,), ranks=(2,))
def sorted_into_what_was_read(smp: Any, out: Any) -> None:
    """Several results by ``out``."""
    fit(smp, out, Changing(_sorts))


@program(stages=(2,), ranks=(2,))
def normalized_into_what_was_read(smp: Any, out: Any) -> None:
    """Running statistics that are an ordinary tensor."""
    fit(smp, out, Changing(_normalizes))


@program(stages=(2,), ranks=(2,))
def instances_normalized_into_what_was_read(smp: Any, out: Any) -> None:
    """The same of instance norm."""
    fit(smp, out, Changing(_normalizes_instances))


@program(stages=(2,), ranks=(2,))
def lists_multiplied_in_place(smp: Any, out: Any) -> None:
    """A function that takes lists of tensors, of which it changes the first."""
    fit(smp, out, Changing(_multiplies_lists))
