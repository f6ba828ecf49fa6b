"""Ways to train: distillation, adversaries, contrast, momentum encoders, several tasks, carried states."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches(smp: Any, steps: int = 3, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(31 + smp.dp_rank())
    for _ in range(steps):
        yield torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


# Distillation ----------------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def teacher_outside(smp: Any, out: Any) -> None:
    """A plain teacher runs under no_grad within the step function; its logits are softened."""
    teacher = mlp(8, 32, 4).eval()
    model = smp.DistributedModel(mlp(8, 12, 12, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    temperature = 3.0

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            soft = F.softmax(teacher(x) / temperature, dim=-1)
        logits = model(x)
        kd = (
            F.kl_div(F.log_softmax(logits / temperature, dim=-1), soft, reduction="batchmean")
            * temperature**2
        )
        ce = F.cross_entropy(logits, y)
        model.backward(0.7 * kd + 0.3 * ce)
        return kd, ce

    for x, y in batches(smp):
        optimizer.zero_grad()
        kd, ce = train_step(model, x, y)
        optimizer.step()
        out.value("kd", kd.reduce_mean())
        out.value("ce", ce.reduce_mean())
    out.model(model)


class Distiller(nn.Module):
    """Holds both, and a projection between their hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher_body, self.teacher_head = mlp(8, 20, 20), nn.Linear(20, 4)
        self.student_body, self.student_head = mlp(8, 10, 10), nn.Linear(10, 4)
        self.projection = nn.Linear(10, 20, bias=False)
        for p in [*self.teacher_body.parameters(), *self.teacher_head.parameters()]:
            p.requires_grad_(False)

    def train(self, mode: bool = True) -> Distiller:
        super().train(mode)
        self.teacher_body.eval()
        self.teacher_head.eval()
        return self

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            th = self.teacher_body(x)
            tl = self.teacher_head(th)
        sh = self.student_body(x)
        return {"student": self.student_head(sh), "teacher": tl, "hidden": self.projection(sh), "target": th}


@program(stages=(2, 3), ranks=(2,), static=True)
def teacher_inside(smp: Any, out: Any) -> None:
    """A frozen teacher is part of the module, called under no_grad in its forward."""
    model = smp.DistributedModel(Distiller())
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(trainable, lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        o = model(x)
        loss = (
            F.cross_entropy(o["student"], y)
            + F.mse_loss(o["hidden"], o["target"])
            + F.kl_div(o["student"].log_softmax(-1), o["teacher"].log_softmax(-1), log_target=True)
        )
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        model.train()
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="takes a tensor of stage")
def mean_teacher(smp: Any, out: Any) -> None:
    """The teacher is an EMA of the student kept inside the module, updated by zip of parameters."""

    class MeanTeacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = mlp(8, 12, 12, 4)
            self.teacher = copy.deepcopy(self.student)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(noisy), target

        @torch.no_grad()
        def update(self) -> None:
            for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                t.data.mul_(0.9).add_(s.data, alpha=0.1)

    net = MeanTeacher()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.student.parameters(), lr=0.2))

    @smp.step
    def train_step(model: Any, x: Tensor, noisy: Tensor, y: Tensor) -> Tensor:
        logits, target = model(x, noisy)
        loss = F.cross_entropy(logits, y) + F.mse_loss(logits.softmax(-1), target.softmax(-1))
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, x + 0.1 * torch.randn_like(x), y).reduce_mean())
        optimizer.step()
        net.update()
    out.model(model)


# Contrast --------------------------------------------------------------------------------------------------


class MoCo(nn.Module):
    """Momentum contrast with a queue, shortened from the authors' repository."""

    def __init__(self, dim: int = 6, k: int = 16, m: float = 0.9, t: float = 0.2) -> None:
        super().__init__()
        self.k, self.m, self.t = k, m, t
        self.encoder_q = mlp(8, 12, 12, dim)
        self.encoder_k = mlp(8, 12, 12, dim)
        for q, p in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            p.data.copy_(q.data)
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, k), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self) -> None:
        for q, p in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            p.data = p.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        at = int(self.queue_ptr)
        self.queue[:, at : at + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (at + keys.shape[0]) % self.k

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([pos, neg], dim=1) / self.t
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._enqueue(k)
        return logits, labels


@program(stages=(2,), ranks=(2,), refused="cannot be recorded")
def momentum_contrast(smp: Any, out: Any) -> None:
    """MoCo: the momentum update and the queue happen within forward, with p.data assigned."""
    model = smp.DistributedModel(MoCo())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4))

    @smp.step
    def train_step(model: Any, a: Tensor, b: Tensor) -> Tensor:
        logits, labels = model(a, b)
        loss = F.cross_entropy(logits, labels)
        model.backward(loss)
        return loss

    for x, _ in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, x + 0.05 * torch.randn_like(x)))
        optimizer.step()
    out.model(model)


class QueueOnly(nn.Module):
    """The queue is filled in forward; the momentum update is left to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = mlp(8, 12, 6), mlp(8, 12, 6)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, 6))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.query(a), dim=-1)
        with torch.no_grad():
            k = F.normalize(self.key(b), dim=-1)
        pos = (q * k).sum(-1, keepdim=True)
        logits = torch.cat([pos, q @ self.queue.clone().t()], 1) / 0.1
        with torch.no_grad():
            rows = (self.at + torch.arange(len(k))) % 16
            self.queue[rows] = k
            self.at.add_(len(k)).remainder_(16)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@program(
    stages=(2,),
    ranks=(2,),
    static=True,
    refused_static="static_mode: True",
    refused_on_ranks="lives on stage",
)
def queue_of_keys(smp: Any, out: Any) -> None:
    """A memory bank in the container's buffers, written in forward for each microbatch."""
    net = QueueOnly()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.query.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, a: Tensor, b: Tensor) -> Tensor:
        loss = model(a, b)
        model.backward(loss)
        return loss

    for x, _ in batches(smp, 4):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, x + 0.1))
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(net.query.parameters(), net.key.parameters(), strict=True):
                k.lerp_(q, 0.1)
    out.model(model)


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def simsiam(smp: Any, out: Any) -> None:
    """Both views go through the same encoder, with a stop of the gradient on one side; BatchNorm."""

    class SimSiam(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12))
            self.predictor = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 12))

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            za, zb = self.encoder(a), self.encoder(b)
            return self.predictor(za), self.predictor(zb), za.detach(), zb.detach()

    model = smp.DistributedModel(SimSiam())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    criterion = nn.CosineSimilarity(dim=1)

    @smp.step
    def train_step(model: Any, a: Tensor, b: Tensor) -> Tensor:
        pa, pb, za, zb = model(a, b)
        loss = -(criterion(pa, zb).mean() + criterion(pb, za).mean()) * 0.5
        model.backward(loss)
        return loss

    for x, _ in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, x.flip(1)).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def clip_style(smp: Any, out: Any) -> None:
    """Two towers and a learned temperature that is clamped after each step; the symmetric loss."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = mlp(8, 16, 6), mlp(5, 16, 6)
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            i, t = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
            logits = self.logit_scale.exp() * i @ t.t()
            return logits, logits.t()

    net = Towers()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))

    @smp.step
    def train_step(model: Any, image: Tensor, text: Tensor) -> Tensor:
        a, b = model(image, text)
        labels = torch.arange(len(a))
        loss = (F.cross_entropy(a, labels) + F.cross_entropy(b, labels)) / 2
        model.backward(loss)
        return loss

    for x, _ in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, x[:, :5] * 2).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            net.logit_scale.clamp_(0, 2.6)
        out.value("scale", net.logit_scale.exp().item())
    out.model(model)


# Generative ------------------------------------------------------------------------------------------------


class GAN(nn.Module):
    """Generator and discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(4, 12, 12, 8)
        self.discriminator = nn.Sequential(
            nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.generator(x) if which == "g" else self.discriminator(x)


@program(stages=(2, 3), ranks=(2,))
def gan(smp: Any, out: Any) -> None:
    """The DCGAN tutorial: two step functions, two optimizers over parts, noise drawn in the loop."""
    net = GAN()
    model = smp.DistributedModel(net)
    opt_d = smp.DistributedOptimizer(
        torch.optim.Adam(net.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
    )
    opt_g = smp.DistributedOptimizer(
        torch.optim.Adam(net.generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    )
    criterion = nn.BCEWithLogitsLoss()

    @smp.step
    def d_step(model: Any, real: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        r = model(real, "d")
        real_loss = criterion(r, torch.ones_like(r))
        fake = model(z, "g").detach()
        f = model(fake, "d")
        fake_loss = criterion(f, torch.zeros_like(f))
        model.backward(real_loss + fake_loss)
        return real_loss, fake_loss

    @smp.step
    def g_step(model: Any, z: Tensor) -> Tensor:
        f = model(model(z, "g"), "d")
        loss = criterion(f, torch.ones_like(f))
        model.backward(loss)
        return loss

    for x, _ in batches(smp):
        opt_d.zero_grad()
        losses = d_step(model, x, torch.randn(len(x), 4))
        opt_d.step()
        opt_g.zero_grad()
        out.value("g", g_step(model, torch.randn(len(x), 4)).reduce_mean())
        opt_g.step()
        out.value("d", [loss.reduce_mean() for loss in losses])
    out.model(model)


@program(stages=(2,), ranks=(2,))
def gan_with_frozen_critic(smp: Any, out: Any) -> None:
    """One step function with a flag; the critic is frozen by requires_grad for the generator."""
    net = GAN()
    model = smp.DistributedModel(net)
    optimizers = {
        "d": smp.DistributedOptimizer(torch.optim.RMSprop(net.discriminator.parameters(), lr=0.01)),
        "g": smp.DistributedOptimizer(torch.optim.RMSprop(net.generator.parameters(), lr=0.01)),
    }

    @smp.step
    def step(model: Any, x: Tensor, z: Tensor, which: str) -> Tensor:
        if which == "d":
            with torch.no_grad():
                fake = model(z, "g")
            loss = model(fake, "d").mean() - model(x, "d").mean()
        else:
            loss = -model(model(z, "g"), "d").mean()
        model.backward(loss)
        return loss

    for i, (x, _) in enumerate(batches(smp, 4)):
        which = "g" if i % 3 == 2 else "d"
        net.discriminator.requires_grad_(which == "d")
        model.zero_grad()
        out.value(which, step(model, x, torch.randn(8, 4), which).reduce_mean())
        optimizers[which].step()
        for p in net.discriminator.parameters():
            p.data.clamp_(-0.3, 0.3)
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="is the only backward")
def gradient_penalty(smp: Any, out: Any) -> None:
    """WGAN-GP: the gradient of the critic by its input, with create_graph."""
    net = GAN()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.discriminator.parameters(), lr=0.01))

    @smp.step
    def step(model: Any, real: Tensor, fake: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = model(mixed, "d")
        gradients = torch.autograd.grad(
            score, mixed, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
        )[0]
        penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
        loss = model(fake, "d").mean() - model(real, "d").mean() + 10 * penalty
        model.backward(loss)
        return loss, penalty

    for x, _ in batches(smp, 2):
        optimizer.zero_grad()
        loss, penalty = step(model, x, x.roll(1, 0), torch.rand(8, 1))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("penalty", penalty.reduce_mean())
    out.model(model)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(8, 16, 12)
        self.mu, self.logvar = nn.Linear(12, 3), nn.Linear(12, 3)
        self.decoder = mlp(3, 12, 16, 8)

    def reparameterize(self, mu: Tensor, logvar: Tensor, eps: Tensor | None) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + std * (torch.randn_like(std) if eps is None else eps)

    def forward(self, x: Tensor, eps: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(self.reparameterize(mu, logvar, eps)), mu, logvar


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def vae(smp: Any, out: Any) -> None:
    """The noise is drawn by the container or passed in; beta warms up."""
    torch.manual_seed(70)
    model = smp.DistributedModel(VAE())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))

    @smp.step
    def train_step(model: Any, x: Tensor, beta: float, eps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        recon, mu, logvar = model(x, eps)
        bce = F.mse_loss(recon, x, reduction="sum") / x.size(0)
        kld = -0.5 * torch.mean(torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1))
        model.backward(bce + beta * kld)
        return bce, kld

    for i, (x, _) in enumerate(batches(smp, 4)):
        optimizer.zero_grad()
        eps = torch.randn(8, 3) if i % 2 else None
        bce, kld = train_step(model, x, min(1.0, i / 3), eps)
        optimizer.step()
        out.value("losses", (bce.reduce_mean(), kld.reduce_mean()))
    out.model(model)


@program(stages=(2,), ranks=(2,), static=True, refused_static="static_mode: True")
def diffusion(smp: Any, out: Any) -> None:
    """DDPM: time steps and noise drawn in the step function, the table outside; then sampling."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Embedding(10, 12)
            self.inp, self.mid, self.out = nn.Linear(8, 12), mlp(12, 12, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.out(self.mid(F.silu(self.inp(x) + self.time(t))))

    betas = torch.linspace(1e-2, 0.2, 10)
    abar = torch.cumprod(1 - betas, 0)
    model = smp.DistributedModel(Denoiser())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn_like(x)
        a = abar[t][:, None]
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        model.backward(loss)
        return loss

    @smp.step
    def denoise(model: Any, x: Tensor, t: Tensor) -> Tensor:
        return model(x, t)

    for x, _ in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x))
        optimizer.step()
    x = torch.randn(4, 8)
    with torch.no_grad():
        for i in reversed(range(8, 10)):
            eps = denoise(model, x, torch.full((4,), i)).concat()
            x = (x - betas[i] / (1 - abar[i]).sqrt() * eps) / (1 - betas[i]).sqrt() + betas[
                i
            ].sqrt() * torch.randn(4, 8)
    out.value("sample", x)
    out.model(model)


# Adversarial inputs -----------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,))
def fgsm(smp: Any, out: Any) -> None:
    """FGSM by x.requires_grad before the step and x.grad after it; then training on the adversarial batch."""
    model = smp.DistributedModel(mlp(8, 16, 12, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        x.requires_grad_(True)
        optimizer.zero_grad()
        out.value("clean", step(model, x, y).reduce_mean())
        out.value("input gradient", x.grad)
        adversarial = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        out.value("adversarial", step(model, adversarial, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def free_perturbation(smp: Any, out: Any) -> None:
    """FreeLB: a perturbation that is a leaf made in the loop, passed in, and ascends by its gradient."""
    model = smp.DistributedModel(mlp(8, 16, 12, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    @smp.step
    def step(model: Any, x: Tensor, delta: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x + delta), y)
        model.backward(loss)
        return loss

    for x, y in batches(smp, 2):
        delta = torch.zeros_like(x).uniform_(-0.05, 0.05).requires_grad_()
        optimizer.zero_grad()
        for _ in range(2):
            out.value("loss", step(model, x, delta, y).reduce_mean())
            g = delta.grad.detach()
            delta.data = (delta.data + 0.1 * g / g.norm()).clamp(-0.2, 0.2)
            delta.grad.zero_()
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="is the only backward")
def virtual_adversarial(smp: Any, out: Any) -> None:
    """VAT: torch.autograd.grad of a KL divergence by the noise, within the step function."""
    model = smp.DistributedModel(mlp(8, 16, 12, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        target = logits.detach().softmax(-1)
        d = F.normalize(torch.randn_like(x), dim=1).requires_grad_()
        kl = F.kl_div(model(x + 0.1 * d).log_softmax(-1), target, reduction="batchmean")
        (g,) = torch.autograd.grad(kl, d)
        r = F.normalize(g, dim=1)
        lds = F.kl_div(model(x + 0.3 * r).log_softmax(-1), target, reduction="batchmean")
        loss = F.cross_entropy(logits, y) + lds
        model.backward(loss)
        return loss

    for x, y in batches(smp, 2):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="was not called in this step")
def maml(smp: Any, out: Any) -> None:
    """An inner loop by functional_call with adapted weights, second order."""
    net = mlp(8, 12, 12, 4)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(net.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(net, weights, (x[:2],)), y[:2])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(net, fast, (x[2:],)), y[2:])
        model.backward(loss)
        return loss

    for x, y in batches(smp, 2):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def reptile(smp: Any, out: Any) -> None:
    """Reptile: weights saved by state_dict, two inner steps, then interpolated and loaded back."""
    model = smp.DistributedModel(mlp(8, 12, 12, 4))
    inner = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for task in range(2):
        before = copy.deepcopy(model.state_dict())
        for x, y in batches(smp, 2):
            inner.zero_grad()
            out.value("loss", step(model, x + task, y).reduce_mean())
            inner.step()
        after = model.state_dict()
        model.load_state_dict({n: before[n] + (after[n] - before[n]) * 0.5 for n in before})
    out.model(model)


# Several tasks ----------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 16, 12)
        self.classify, self.regress = mlp(12, 12, 4), mlp(12, 12, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.classify(h), self.regress(h).squeeze(-1)


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def uncertainty_inside(smp: Any, out: Any) -> None:
    """Kendall's learned weights of losses are a parameter of the model, used in the step function."""
    net = TwoHeads()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = model(x)
        losses = torch.stack([F.cross_entropy(logits, y), F.huber_loss(value, z)])
        total = (torch.exp(-net.log_vars) * losses + net.log_vars).sum()
        model.backward(total)
        return total, losses

    for x, y in batches(smp):
        optimizer.zero_grad()
        total, losses = step(model, x, y, x.sum(1))
        optimizer.step()
        out.value("total", total.reduce_mean())
        out.value("losses", losses.stack().mean(0) if hasattr(losses, "stack") else losses)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def uncertainty_outside(smp: Any, out: Any) -> None:
    """The weights of the losses are parameters outside of the model, with a plain optimizer of their own."""
    log_vars = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])
    model = smp.DistributedModel(TwoHeads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    other = torch.optim.SGD(log_vars.parameters(), lr=0.1)

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        logits, value = model(x)
        loss = F.cross_entropy(logits, y) * (-log_vars[0]).exp() + log_vars[0]
        loss = loss + F.mse_loss(value, z) * (-log_vars[1]).exp() + log_vars[1]
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        other.zero_grad()
        out.value("loss", step(model, x, y, x.sum(1)).reduce_mean())
        out.value("outer gradients", [p.grad for p in log_vars])
        optimizer.step()
        other.step()
    out.value("log_vars", list(log_vars.parameters()))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def outside_in_one_optimizer(smp: Any, out: Any) -> None:
    """A prompt outside of the model shares the model's optimizer, as [*model.parameters(), prompt]."""
    prompt = nn.Parameter(torch.zeros(8))
    head = nn.Linear(4, 4)
    model = smp.DistributedModel(mlp(8, 16, 12, 4))
    optimizer = smp.DistributedOptimizer(
        torch.optim.Adam([*model.parameters(), prompt, *head.parameters()], lr=0.05)
    )

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(head(model(x + prompt)), y)
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, y).reduce_mean())
        optimizer.step()
        out.value("prompt", prompt)
        out.value("head", (head.weight, head.weight.grad))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def gradient_surgery(smp: Any, out: Any) -> None:
    """PCGrad: two step functions, gradients taken from p.grad, projected where they conflict."""
    model = smp.DistributedModel(TwoHeads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor, z: Tensor, task: int) -> Tensor:
        logits, value = model(x)
        loss = F.cross_entropy(logits, y) if task == 0 else F.mse_loss(value, z)
        model.backward(loss)
        return loss

    def flat(parameters: list[nn.Parameter]) -> Tensor:
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])

    parameters = list(model.parameters())
    for x, y in batches(smp):
        gradients = []
        for task in range(2):
            optimizer.zero_grad()
            out.value(f"loss {task}", step(model, x, y, x.sum(1), task).reduce_mean())
            gradients.append(flat(parameters))
        a, b = gradients
        dot = torch.dot(a, b)
        out.value("dot", dot.item())
        if dot < 0:
            a = a - dot / b.norm() ** 2 * b
        merged, at = a + b, 0
        for p in parameters:
            p.grad = merged[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def weighted_samples(smp: Any, out: Any) -> None:
    """Losses with reduction none, focal weights, hard examples by topk."""
    model = smp.DistributedModel(mlp(8, 16, 12, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ce = F.cross_entropy(model(x), y, reduction="none")
        focal = (1 - torch.exp(-ce)) ** 2 * ce * w
        hard, _ = focal.topk(3)
        model.backward(hard.mean())
        return hard.mean(), ce

    weights = torch.ones(8)
    for x, y in batches(smp):
        optimizer.zero_grad()
        loss, ce = step(model, x, y, weights)
        optimizer.step()
        weights = weights * 0.5 + 0.5 * ce.concat().detach().softmax(0) * 8
        out.value("loss", loss.reduce_mean())
        out.value("weights", weights)
    out.model(model)


# Carried states and decoding --------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """word_language_model of pytorch/examples, batch first."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Embedding(11, 12)
        self.rnn1 = nn.LSTM(12, 12, batch_first=True)
        self.rnn2 = nn.LSTM(12, 12, batch_first=True)
        self.decoder = nn.Linear(12, 11)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        x = self.encoder(tokens)
        x, h1 = self.rnn1(x, hidden[0])
        x, h2 = self.rnn2(x, hidden[1])
        return self.decoder(x), (h1, h2)

    def init_hidden(self, batch: int) -> Any:
        weight = next(self.parameters())
        return tuple((weight.new_zeros(1, batch, 12), weight.new_zeros(1, batch, 12)) for _ in range(2))


def _merge(outputs: Any) -> Any:
    """Hidden states of the microbatches side by side: their batch axis is 1."""
    if isinstance(outputs, tuple):
        return tuple(_merge(o) for o in outputs)
    return torch.cat([o.detach() for o in outputs.outputs], dim=1)


def _batch_first(hidden: Any) -> Any:
    if isinstance(hidden, Tensor):
        return hidden.transpose(0, 1).contiguous()
    return tuple(_batch_first(h) for h in hidden)


@program(stages=(2,), ranks=(2,))
def truncated_bptt(smp: Any, out: Any) -> None:
    """Hidden states are returned by the step, detached, and passed to the next; tied weights."""
    net = LanguageModel(tied=True)
    hidden = _batch_first(net.init_hidden(4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    text = torch.randint(0, 11, (4, 13), generator=torch.Generator().manual_seed(2))

    @smp.step
    def step(model: Any, tokens: Tensor, targets: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        logits, hidden = model(tokens, _batch_first(hidden))
        loss = F.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1))
        model.backward(loss)
        return loss, hidden

    for i in range(0, 12, 4):
        model.zero_grad()
        loss, carried = step(model, text[:, i : i + 4], text[:, i + 1 : i + 5], hidden)
        hidden = _batch_first(_merge(carried))
        optimizer.step()
        out.value("perplexity", math.exp(loss.reduce_mean().item()))
    out.value("hidden", hidden)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def state_kept_by_the_module(smp: Any, out: Any) -> None:
    """A stateful RNN: the module keeps its hidden state, detaches it; the loop resets it."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 12)
            self.cell = nn.GRU(12, 12, batch_first=True)
            self.out = nn.Linear(12, 11)
            self.state: dict[int, Tensor] = {}

        def forward(self, tokens: Tensor, part: int) -> Tensor:
            x, h = self.cell(self.embed(tokens), self.state.get(part))
            self.state[part] = h.detach()
            return self.out(x)

    net = Stateful()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    text = torch.randint(0, 11, (4, 13), generator=torch.Generator().manual_seed(2))
    which = iter(range(100))

    @smp.step
    def step(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens, next(which) % 2)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        model.backward(loss)
        return loss

    for i in range(0, 12, 4):
        if i == 8:
            net.state.clear()
        optimizer.zero_grad()
        out.value("loss", step(model, text[:, i : i + 4], text[:, i + 1 : i + 5]))
        optimizer.step()
    out.model(model)


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(13, 12), nn.Embedding(16, 12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        x = self.tok(tokens) + self.pos(torch.arange(n))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2), tolerance=1e-6)
def decoding(smp: Any, out: Any) -> None:
    """Greedy decoding, sampling and a beam of two between epochs, through a step function.

    The tolerance: in evaluation torch computes a layer by one kernel, but not one that is split over stages.
    """
    torch.manual_seed(60)
    model = smp.DistributedModel(TinyGPT())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02))

    @smp.step
    def train_step(model: Any, tokens: Tensor) -> Tensor:
        logits = model(tokens)[:, :-1, :].contiguous().view(-1, 13)
        loss = F.cross_entropy(logits, tokens[:, 1:].contiguous().view(-1))
        model.backward(loss)
        return loss

    @smp.step
    def logits_of(model: Any, tokens: Tensor) -> Tensor:
        return model(tokens)[:, -1]

    generator = torch.Generator().manual_seed(4 + smp.dp_rank())
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        out.value("loss", train_step(model, torch.randint(0, 13, (4, 7), generator=generator)).reduce_mean())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            tokens = torch.tensor([[1], [2]])
            sampled = tokens
            for _ in range(3):
                tokens = torch.cat([tokens, logits_of(model, tokens).concat().argmax(-1, keepdim=True)], 1)
                p = (logits_of(model, sampled).concat() / 0.8).softmax(-1)
                sampled = torch.cat([sampled, torch.multinomial(p, 1)], 1)
            beams, scores = torch.tensor([[3], [3]]), torch.tensor([0.0, -1e9])
            for _ in range(3):
                logp = logits_of(model, beams).concat().log_softmax(-1) + scores[:, None]
                scores, best = logp.flatten().topk(2)
                beams = torch.cat([beams[best // 13], (best % 13)[:, None]], 1)
        out.value("decoded", (tokens, sampled, beams, scores))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def actor_critic(smp: Any, out: Any) -> None:
    """Actions sampled within the step function by torch.distributions; returns by item(); entropy bonus."""
    model = smp.DistributedModel(TwoHeads())
    optimizer = smp.DistributedOptimizer(torch.optim.RMSprop(model.parameters(), lr=0.01))

    @smp.step
    def step(model: Any, x: Tensor) -> tuple[Tensor, Tensor, float]:
        logits, value = model(x)
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample()
        reward = (action == x.argmax(-1) % 4).float() - 0.5
        advantage = reward - value.detach()
        actor = -(policy.log_prob(action) * advantage).mean()
        critic = F.smooth_l1_loss(value, reward)
        model.backward(actor + 0.5 * critic - 0.01 * policy.entropy().mean())
        return actor, action, reward.mean().item()

    for x, _ in batches(smp):
        optimizer.zero_grad()
        actor, action, reward = step(model, x)
        optimizer.step()
        out.value("actor", actor)
        out.value("action", action.concat())
        out.value("reward", [float(r) for r in reward])
    out.model(model)


@program(
    stages=(2,),
    ranks=(2,),
    replicas=(1, 2),
    parameters={"auto_partition": False, "default_partition": 0},
    refused_on_ranks="lives on stage",
)
def ema_target_by_hand_placed(smp: Any, out: Any) -> None:
    """BYOL with the online network and its target on the stages that the script says."""

    class BYOL(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = mlp(8, 12, 12)
            with smp.partition(1):
                self.predictor = mlp(12, 8, 12)
                self.target = copy.deepcopy(self.online)
            self.target.requires_grad_(False)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            p = F.normalize(self.predictor(self.online(a)), dim=-1)
            with torch.no_grad():
                t = F.normalize(self.target(b), dim=-1)
            return (2 - 2 * (p * t).sum(-1)).mean()

    net = BYOL()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD([*net.online.parameters(), *net.predictor.parameters()], lr=0.2)
    )

    @smp.step
    def step(model: Any, a: Tensor, b: Tensor) -> Tensor:
        loss = model(a, b)
        model.backward(loss)
        return loss

    for x, _ in batches(smp):
        optimizer.zero_grad()
        out.value("loss", step(model, x, -x).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            state = net.online.state_dict()
            for name, p in net.target.named_parameters():
                p.copy_(0.8 * p + 0.2 * state[name])
    out.model(model)
