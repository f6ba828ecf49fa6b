"""Networks whose data does not flow in a straight line: skips, twins, flows, fixed points, generated
weights.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# Images -----------------------------------------------------------------------------------------------------


class DoubleConv(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Up(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(before, before // 2, 2, stride=2)
        self.conv = DoubleConv(before, after)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        rows, columns = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
        x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.conv(torch.cat([skip, x], dim=1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(1, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
        self.up1 = Up(16, 8)
        self.up2 = Up(8, 4)
        self.outc = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.inc(x)]
        skips.append(self.down1(skips[-1]))
        x = self.down2(skips[-1])
        x = self.up1(x, skips.pop())
        x = self.up2(x, skips.pop())
        return self.outc(x)


@program(stages=(2, 3, 4), ranks=(2,), pipelines=("interleaved", "simple"), static=True)
def unet(smp: Any, out: Any) -> None:
    """A U-Net with skips popped from a list, padding of odd sizes, batch norm, and a dice loss."""
    model = smp.DistributedModel(UNet())
    optimizer = smp.DistributedOptimizer(torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9))

    @smp.step
    def train_step(model: Any, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        masks = model(image)
        truth = F.one_hot(mask, 2).permute(0, 3, 1, 2).float()
        soft = F.softmax(masks, dim=1)
        inter = 2 * (soft * truth).sum(dim=(-1, -2))
        sets = soft.sum(dim=(-1, -2)) + truth.sum(dim=(-1, -2))
        sets = torch.where(sets == 0, inter, sets)
        loss = F.cross_entropy(masks, mask) + 1 - ((inter + 1e-6) / (sets + 1e-6)).mean()
        model.backward(loss)
        return loss, masks.argmax(1)

    g = numbers(1)
    for _ in range(3):
        image = torch.randn(4, 1, 11, 9, generator=g)
        mask = (image[:, 0] > 0.3).long()
        optimizer.zero_grad(set_to_none=True)
        loss, guess = train_step(model, image, mask)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("iou", (guess.concat() == mask).float().mean().item())
    out.model(model)


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.conv = nn.Conv2d(before, growth, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleDict({f"denselayer{i}": DenseLayer(8 + 4 * i, 4) for i in range(4)})
        self.norm = nn.BatchNorm2d(24)
        self.classifier = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for _, layer in self.layers.items():
            features.append(layer(features))
        x = F.relu(self.norm(torch.cat(features, 1)))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


@program(stages=(2, 3))
def densenet(smp: Any, out: Any) -> None:
    """A DenseNet as in torchvision: a list of features is the argument. (Each feature has several
    consumers.)
    """
    model = smp.DistributedModel(DenseNet())
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    )

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        logits = model(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        model.backward(loss)
        return loss, (logits.argmax(1) == y).sum().item()

    @smp.step
    def test_step(model: Any, x: Tensor) -> Tensor:
        return model(x).softmax(-1)

    g = numbers(2)
    for _ in range(3):
        x, y = torch.randn(4, 3, 6, 6, generator=g), torch.randint(0, 3, (4,), generator=g)
        model.train()
        optimizer.zero_grad()
        loss, correct = train_step(model, x, y)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("correct", sum(correct))
        model.eval()
        with torch.no_grad():
            out.value("test", test_step(model, x).concat())
    out.model(model)


class WSConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        std = self.weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5
        return F.conv2d(
            x, (self.weight - mean) / std, self.bias, self.stride, self.padding, groups=self.groups
        )


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(channels, 4), nn.SiLU(), nn.Linear(4, channels), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean((2, 3)))[:, :, None, None]


class ManyNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = WSConv2d(3, 8, 3, padding=1)
        self.gn = nn.GroupNorm(4, 8)
        self.depthwise = WSConv2d(8, 8, 3, padding=1, groups=8)
        self.inorm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.se = SqueezeExcite(8)
        self.lrn = nn.LocalResponseNorm(3)
        self.up = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2), nn.PReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.gn(self.stem(x)))
        x = x + self.se(self.inorm(self.depthwise(x)))
        return self.up(self.lrn(x)).clamp(-2, 2)


@program(stages=(2, 3), ranks=(2,), static=True)
def super_resolution(smp: Any, out: Any) -> None:
    """Weight-standardised, depthwise and sub-pixel convolutions, every norm; x + f(x) in the container
    code.
    """
    model = smp.DistributedModel(ManyNorms())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step()
    def train_step(model: Any, small: Tensor, large: Tensor) -> dict[str, Any]:
        guess = model(small)
        mse = F.mse_loss(guess, large)
        model.backward(F.smooth_l1_loss(guess, large))
        return {"mse": mse, "psnr": -10 * torch.log10(mse), "shape": tuple(guess.shape)}

    g = numbers(3)
    for _ in range(3):
        large = torch.rand(4, 3, 8, 8, generator=g)
        optimizer.zero_grad()
        stats = train_step(model, F.interpolate(large, scale_factor=0.5, mode="bilinear"), large)
        optimizer.step()
        out.value("psnr", stats["psnr"].reduce_mean())
        out.value("mse", stats["mse"])
        out.value("shape", stats["shape"])
    out.model(model)


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
        self.fc_loc = nn.Sequential(nn.Linear(4 * 3 * 3, 16), nn.ReLU(), nn.Linear(16, 6))
        self.fc_loc[2].weight.data.zero_()
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.conv = nn.Conv2d(1, 6, 3, stride=2)
        self.fc = nn.Linear(6 * 3 * 3, 5)

    def stn(self, x: Tensor) -> Tensor:
        theta = self.fc_loc(self.localization(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stn(x)
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)


@program(stages=(2, 3), pipelines=("simple",), microbatches=4, parameters={"active_microbatches": 1})
def spatial_transformer(smp: Any, out: Any) -> None:
    """PyTorch's tutorial: grid_sample in a helper method of the model; one microbatch in flight."""
    model = smp.DistributedModel(SpatialTransformer())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    @smp.step
    def train_step(data: Tensor, target: Tensor) -> Tensor:
        loss = F.nll_loss(model(data), target)
        model.backward(loss)
        return loss

    g = numbers(4)
    for batch in range(3):
        data, target = torch.randn(8, 1, 8, 8, generator=g), torch.randint(0, 5, (8,), generator=g)
        optimizer.zero_grad()
        loss = train_step(data, target)
        optimizer.step()
        out.value("line", f"Train [{batch}/3]\tLoss: {loss.reduce_mean().item():.6f}")
    out.model(model)


# Twins ------------------------------------------------------------------------------------------------------


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(6, 16, 16, 16, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.encoder(a), self.encoder(b)
        return a, b, self.head(torch.abs(a - b)).squeeze(-1)


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def siamese(smp: Any, out: Any) -> None:
    """Twin towers of shared weights: the encoder is called twice, its two gradients meet."""
    model = smp.DistributedModel(Siamese())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, pair: tuple[Tensor, Tensor], same: Tensor) -> tuple[Tensor, Tensor]:
        a, b, logit = model(*pair)
        distance = F.pairwise_distance(a, b)
        contrastive = (same * distance.pow(2) + (1 - same) * F.relu(1.0 - distance).pow(2)).mean()
        loss = contrastive + F.binary_cross_entropy_with_logits(logit, same)
        model.backward(loss)
        return loss, distance

    g = numbers(5 + smp.dp_rank())
    for _ in range(3):
        a = torch.randn(4, 6, generator=g)
        same = torch.randint(0, 2, (4,), generator=g).float()
        b = torch.where(same[:, None] > 0, a + 0.1, -a)
        optimizer.zero_grad()
        loss, distance = train_step(model, (a, b), same)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("distance", distance.concat())
    out.model(model)


@program(stages=(2,))
def triplets(smp: Any, out: Any) -> None:
    """The wrapped model itself is called three times in the step, and the hardest negative mined by
    argmin.
    """
    model = smp.DistributedModel(mlp(6, 16, 16, 16, 8))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    criterion = nn.TripletMarginLoss(margin=0.5)

    @smp.step
    def train_step(anchor: Tensor, positive: Tensor, negatives: Tensor) -> Tensor:
        a, p = F.normalize(model(anchor), dim=1), F.normalize(model(positive), dim=1)
        n = F.normalize(model(negatives.flatten(0, 1)), dim=1).unflatten(0, negatives.shape[:2])
        hardest = (a.unsqueeze(1) - n).norm(dim=-1).argmin(dim=1)
        loss = criterion(a, p, n[torch.arange(len(a)), hardest])
        model.backward(loss)
        return loss

    g = numbers(6)
    for _ in range(3):
        x = torch.randn(4, 6, generator=g)
        optimizer.zero_grad()
        loss = train_step(x, x + 0.1 * torch.randn(4, 6, generator=g), torch.randn(4, 3, 6, generator=g))
        optimizer.step()
        out.value("loss", loss.reduce_mean().item())
    out.model(model)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = mlp(8, 16, 16, 6)
        self.text = nn.Sequential(nn.EmbeddingBag(20, 16, mode="mean"), nn.Linear(16, 16), nn.GELU())
        self.project = nn.Linear(16, 6, bias=False)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            F.normalize(self.image(image), dim=-1),
            F.normalize(self.project(self.text(text)), dim=-1),
            self.logit_scale.exp(),
        )


@program(stages=(2, 3), ranks=(2,), pipelines=("interleaved", "simple"))
def clip(smp: Any, out: Any) -> None:
    """In-batch negatives over the microbatch; the temperature is a parameter of the container, clamped
    after each step.
    """
    model = smp.DistributedModel(Clip())
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.2}], lr=0.01
        )
    )

    @smp.step
    def train_step(model: Any, image: Tensor, text: Tensor) -> tuple[Tensor, float]:
        image_features, text_features, scale = model(image, text)
        logits = scale * image_features @ text_features.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        model.backward(loss)
        return loss, scale.item()

    g = numbers(7)
    for _ in range(4):
        optimizer.zero_grad()
        loss, scale = train_step(
            model, torch.randn(8, 8, generator=g), torch.randint(0, 20, (8, 3), generator=g)
        )
        optimizer.step()
        with torch.no_grad():
            model.get_module().logit_scale.clamp_(0, math.log(14.0))
        out.value("loss", loss.reduce_mean().item())
        out.value("scale", scale)
    out.model(model)


# Sets, flows, fixed points ----------------------------------------------------------------------------------


class TNet(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.conv = nn.Sequential(nn.Conv1d(k, 8, 1, bias=False), nn.BatchNorm1d(8), nn.ReLU())
        self.fc = nn.Linear(8, k * k)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(torch.max(self.conv(x), 2)[0])
        return x.view(-1, self.k, self.k) + torch.eye(self.k)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_transform = TNet(3)
        self.conv1 = nn.Conv1d(3, 6, 1)
        self.feature_transform = TNet(6)
        self.conv2 = nn.Sequential(nn.Conv1d(6, 16, 1, bias=False), nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 4)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t3 = self.input_transform(points)
        x = F.relu(self.conv1(torch.bmm(t3, points)))
        t6 = self.feature_transform(x)
        x = self.conv2(torch.bmm(t6, x))
        x, critical = torch.max(x, 2)
        return self.head(x), t6, critical


@program(stages=(2, 3, 4))
def pointnet(smp: Any, out: Any) -> None:
    """Learnt 3x3 matrices multiply the points in the container; their orthogonality is a second loss term."""
    model = smp.DistributedModel(PointNet())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5))

    def feature_transform_regularizer(trans: Tensor) -> Tensor:
        eye = torch.eye(trans.size()[1])[None, :, :]
        return torch.mean(torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - eye, dim=(1, 2)))

    @smp.step
    def train_step(points: Tensor, target: Tensor) -> tuple[Tensor, int]:
        points = points.transpose(2, 1)
        logits, trans, critical = model(points)
        loss = F.cross_entropy(logits, target) + 0.001 * feature_transform_regularizer(trans)
        model.backward(loss)
        return loss, len(critical.unique())

    g = numbers(8)
    for _ in range(3):
        optimizer.zero_grad()
        loss, critical = train_step(
            torch.randn(4, 10, 3, generator=g), torch.randint(0, 4, (4,), generator=g)
        )
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("critical points", critical)
    out.model(model)


class Coupling(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.s, self.t = mlp(4, 12, 4), mlp(4, 12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x * self.mask
        s, t = torch.tanh(self.s(kept)) * (1 - self.mask), self.t(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (x * s.exp() + t), s.sum(-1)

    def inverse(self, z: Tensor) -> Tensor:
        kept = z * self.mask
        s, t = torch.tanh(self.s(kept)) * (1 - self.mask), self.t(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (z - t) * (-s).exp()


class RealNVP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        masks = [torch.tensor([0.0, 1, 0, 1]), torch.tensor([1.0, 0, 1, 0])] * 2
        self.flows = nn.ModuleList(Coupling(m) for m in masks)
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))

    def log_prob(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(x.shape[0])
        for flow in self.flows:
            x, ld = flow(x)
            logdet += ld
        return self.prior.log_prob(x) + logdet

    def forward(self, x: Tensor, reverse: bool = False) -> Tensor:
        if reverse:
            for flow in reversed(self.flows):
                x = flow.inverse(x)
            return x
        return self.log_prob(x)


@program(stages=(2, 4), ranks=(2,))
def realnvp(smp: Any, out: Any) -> None:
    """log-dets are added in place over the stages; samples go backwards by a second method of each block."""
    model = smp.DistributedModel(RealNVP())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        loss = -model(x).mean()
        model.backward(loss)
        return loss

    @smp.step
    def sample(model: Any, z: Tensor) -> Tensor:
        return model(z, reverse=True)

    g = numbers(9)
    for _ in range(3):
        optimizer.zero_grad()
        loss = train_step(model, torch.randn(8, 4, generator=g) * 0.5 + 1)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
    with torch.no_grad():
        out.value("samples", sample(model, torch.randn(8, 4, generator=g)).concat())
    out.model(model)


class MaskedLinear(nn.Linear):
    def __init__(self, degrees_in: Tensor, degrees_out: Tensor, strict: bool = False) -> None:
        super().__init__(len(degrees_in), len(degrees_out))
        allowed = degrees_out[:, None] > degrees_in if strict else degrees_out[:, None] >= degrees_in
        self.register_buffer("mask", allowed)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight, self.bias)


@program(stages=(2, 3), static=True)
def made(smp: Any, out: Any) -> None:
    """Autoregressive boolean masks; each pixel's probability is checked not to depend on itself."""
    order, hidden = torch.arange(1, 9), torch.arange(16) % 7 + 1
    net = nn.Sequential(
        MaskedLinear(order, hidden),
        nn.ReLU(),
        MaskedLinear(hidden, hidden),
        nn.ReLU(),
        MaskedLinear(hidden, order, strict=True),
    )
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(-1).mean()
        model.backward(loss)
        return loss

    @smp.step
    def probabilities(x: Tensor) -> Tensor:
        return torch.sigmoid(model(x))

    g = numbers(10)
    x = torch.rand(8, 8, generator=g).bernoulli(generator=g)
    for _ in range(3):
        optimizer.zero_grad()
        out.value("nll", train_step(x).reduce_mean())
        optimizer.step()
    with torch.no_grad():
        before = probabilities(x).concat()
        flipped = x.clone()
        flipped[:, 4] = 1 - flipped[:, 4]
        after = probabilities(flipped).concat()
    out.value("unchanged", torch.equal(before[:, :5], after[:, :5]))
    out.model(model)


class ODEFunc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nfe", torch.zeros((), dtype=torch.long))
        self.net = mlp(5, 16, 4)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.net(torch.cat([y, t.expand(y.shape[0], 1)], dim=-1))


class NeuralODE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.func, self.decoder = nn.Linear(3, 4), ODEFunc(), nn.Linear(4, 3)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        y = self.encoder(x)
        path = [y]
        for t0, t1 in zip(times[:-1], times[1:]):  # noqa: RUF007 -- as torchdiffeq does
            h = t1 - t0
            k1 = self.func(t0, y)
            k2 = self.func(t0 + h / 2, y + h / 2 * k1)
            y = y + h * k2
            path.append(y)
        return self.decoder(torch.stack(path, 1))


@program(stages=(2, 3), ranks=(2,), parameters={"optimize": "speed"})
def neural_ode(smp: Any, out: Any) -> None:
    """A midpoint loop calls one block many times; it counts its own calls in an integer buffer."""
    model = smp.DistributedModel(NeuralODE())
    optimizer = smp.DistributedOptimizer(torch.optim.RMSprop(model.parameters(), lr=0.01))

    @smp.step(non_split_inputs=["times"])
    def train_step(model: Any, x: Tensor, path: Tensor, times: Tensor) -> Tensor:
        loss = torch.mean(torch.abs(model(x, times) - path))
        model.backward(loss)
        return loss

    g = numbers(11)
    for length in (3, 4, 3):
        x = torch.randn(4, 3, generator=g)
        times = torch.linspace(0, 1, length)
        optimizer.zero_grad()
        loss = train_step(model, x, x[:, None] * torch.exp(-times)[None, :, None], times)
        optimizer.step()
        out.value("loss", loss.reduce_mean().item())
    out.value("evaluations", int(model.state_dict()["func.nfe"]))
    out.model(model)


class DEQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inject = nn.Linear(5, 12)
        self.cell = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.out = nn.Linear(12, 2)
        self.iterations: list[int] = []
        for p in self.cell.parameters():
            p.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        injected = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(injected)
            for n in range(30):  # noqa: B007 -- it is read after the loop
                new = torch.tanh(self.cell(z) + injected)
                residual = ((new - z).norm() / (new.norm() + 1e-8)).item()
                z = new
                if residual < 1e-2:
                    break
        self.iterations.append(n)
        z = torch.tanh(self.cell(z) + injected)
        return self.out(z)


@program(stages=(2, 3), ranks=(2,))
def deep_equilibrium(smp: Any, out: Any) -> None:
    """The number of iterations depends on the data; they run without gradients, the last one with."""
    net = DEQ()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    g = numbers(12)
    for _ in range(3):
        x = torch.randn(4, 5, generator=g)
        optimizer.zero_grad()
        out.value("loss", train_step(x, (x.sum(1) > 0).long()).reduce_mean())
        optimizer.step()
    out.value("iterations", net.iterations[-2:])
    out.model(model)


@program(stages=(2,), refused="is the only backward")
def energy_model(smp: Any, out: Any) -> None:
    """Langevin sampling: the gradient of the energy with respect to the input, taken in a step of its own."""
    model = smp.DistributedModel(mlp(2, 16, 16, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def langevin(x: Tensor, noise: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        for n in noise.unbind(1):
            (gradient,) = torch.autograd.grad(model(x).sum(), x)
            x = (x - 0.1 * gradient + 0.05 * n).detach().requires_grad_(True)
        return x

    @smp.step
    def train_step(real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        positive, negative = model(real), model(fake)
        loss = positive.mean() - negative.mean()
        regular = 0.1 * (positive**2 + negative**2).mean()
        model.backward(loss + regular)
        return loss, regular

    g = numbers(13)
    for _ in range(2):
        fake = langevin(torch.randn(4, 2, generator=g), torch.randn(4, 2, 2, generator=g)).concat()
        optimizer.zero_grad()
        loss, regular = train_step(torch.randn(4, 2, generator=g) + 2, fake)
        optimizer.step()
        out.value("fake", fake)
        out.value("loss", [loss.reduce_mean(), regular.reduce_mean()])
    out.model(model)


class SpectralConv1d(nn.Module):
    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.Parameter(torch.rand(channels, channels, modes, dtype=torch.cfloat) / channels**2)

    def forward(self, x: Tensor) -> Tensor:
        x_ft = torch.fft.rfft(x)
        out_ft = torch.zeros(*x.shape[:2], x.size(-1) // 2 + 1, dtype=torch.cfloat)
        out_ft[:, :, : self.modes] = torch.einsum("bix,iox->box", x_ft[:, :, : self.modes], self.weights)
        return torch.fft.irfft(out_ft, n=x.size(-1))


class FNO1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc0 = nn.Linear(2, 6)
        self.spectral = nn.ModuleList(SpectralConv1d(6, 3) for _ in range(3))
        self.local = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(3))
        self.fc1 = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.linspace(0, 1, x.shape[1]).reshape(1, -1, 1).repeat(x.shape[0], 1, 1)
        x = self.fc0(torch.cat((x, grid), dim=-1)).permute(0, 2, 1)
        for i, (spectral, local) in enumerate(zip(self.spectral, self.local)):
            x = spectral(x) + local(x)
            if i < len(self.local) - 1:
                x = F.gelu(x)
        return self.fc1(x.permute(0, 2, 1))


@program(stages=(2, 3), ranks=(2,), static=True)
def fourier_operator(smp: Any, out: Any) -> None:
    """A Fourier neural operator: complex parameters, rfft in the blocks, two branches into one sum."""
    model = smp.DistributedModel(FNO1d())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        guess = model(x).squeeze(-1)
        loss = ((guess - y).norm(2, dim=1) / y.norm(2, dim=1)).mean()
        model.backward(loss)
        return loss

    g = numbers(14)
    for _ in range(3):
        x = torch.randn(4, 8, 1, generator=g)
        optimizer.zero_grad()
        out.value("relative error", train_step(x, x.cumsum(1).squeeze(-1) / 8).reduce_mean())
        optimizer.step()
    out.model(model)


# Made weights, codes, dtypes --------------------------------------------------------------------------------


class HyperNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 6)
        self.hyper = mlp(6, 16, 5 * 8 + 5)
        self.trunk = mlp(4, 16, 8)

    def forward(self, x: Tensor, task: int) -> Tensor:
        made = self.hyper(self.embedding(torch.tensor(task)))
        weight, bias = made.split([40, 5])
        return F.linear(self.trunk(x), weight.view(5, 8), bias)


@program(stages=(2, 3), static=True)
def hypernetwork(smp: Any, out: Any) -> None:
    """One net makes the weights of another's last layer, chosen by a plain int, which changes over the
    steps.
    """
    model = smp.DistributedModel(HyperNetwork())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(x: Tensor, y: Tensor, task: int) -> tuple[Tensor, str]:
        loss = F.cross_entropy(model(x, task), y)
        model.backward(loss)
        return loss, f"task {task}"

    g = numbers(15)
    for step in range(5):
        optimizer.zero_grad()
        loss, name = train_step(
            torch.randn(4, 4, generator=g), torch.randint(0, 5, (4,), generator=g), step % 3
        )
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("name", name)
    out.model(model)


class Quantizer(nn.Module):
    def __init__(self, codes: int, width: int, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("embed", torch.randn(width, codes))
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("embed_avg", self.embed.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        dist = (
            flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        )
        index = (-dist).max(1).indices
        onehot = F.one_hot(index, self.embed.shape[1]).type(flat.dtype)
        quantize = F.embedding(index.view(*x.shape[:-1]), self.embed.t())
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(flat.t() @ onehot, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + 8e-5) * n
            self.embed.data.copy_(self.embed_avg / size.unsqueeze(0))
        diff = (quantize.detach() - x).pow(2).mean()
        quantize = x + (quantize - x).detach()
        return quantize, diff, index.view(*x.shape[:-1])


class VQVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.quantize, self.decoder = mlp(6, 16, 4), Quantizer(8, 4), mlp(4, 16, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        quantized, diff, codes = self.quantize(self.encoder(x))
        return self.decoder(quantized), diff, codes


@program(stages=(2, 3), ranks=(2,), pipelines=("interleaved", "simple"), static=True)
def vqvae(smp: Any, out: Any) -> None:
    """Straight-through codes; the codebook is a buffer with an EMA updated in forward (so order matters)."""
    model = smp.DistributedModel(VQVAE())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        guess, latent, codes = model(x)
        loss = F.mse_loss(guess, x) + 0.25 * latent.mean()
        model.backward(loss)
        return loss, codes

    g = numbers(16)
    for _ in range(4):
        optimizer.zero_grad()
        loss, codes = train_step(model, torch.randn(8, 6, generator=g))
        optimizer.step()
        used = torch.bincount(codes.concat(), minlength=8)
        probability = used / used.sum()
        out.value("perplexity", torch.exp(-(probability * (probability + 1e-10).log()).sum()).item())
        out.value("loss", loss.reduce_mean())
    out.model(model)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 12).double()
        self.narrow = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12)).bfloat16()
        self.norm = nn.LayerNorm(12)
        self.film = nn.Embedding(3, 24)
        self.head = nn.Linear(12, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        self.seen += torch.bincount(style, minlength=3)
        h = self.narrow(self.wide(x).bfloat16()).float()
        gamma, beta = self.film(style).chunk(2, dim=-1)
        return self.head(self.norm(h) * (1 + gamma) + beta)


@program(stages=(2, 3), ranks=(2,), static=True)
def mixed_dtypes(smp: Any, out: Any) -> None:
    """FiLM over float64, bfloat16 and float32 parts; a container buffer of ints counts the styles."""
    model = smp.DistributedModel(Mixed())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def train_step(x: Tensor, style: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x, style), y)
        model.backward(loss)
        return loss

    g = numbers(17)
    for _ in range(3):
        x = torch.randn(8, 6, generator=g, dtype=torch.float64)
        optimizer.zero_grad()
        loss = train_step(x, torch.randint(0, 3, (8,), generator=g), x[:, :2].float())
        optimizer.step()
        out.value("loss", loss.reduce_mean())
    out.value("dtypes", [str(p.dtype) for p in model.parameters()])
    out.model(model)


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Linear(8, 4 * 6)
        self.route = nn.Parameter(torch.randn(4, 3, 5, 6) * 0.3)
        self.decoder = mlp(15, 16, 8)

    @staticmethod
    def squash(s: Tensor) -> Tensor:
        n2 = (s**2).sum(-1, keepdim=True)
        return n2 / (1 + n2) * s / (n2.sqrt() + 1e-8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        u = self.squash(self.primary(x).view(-1, 4, 6))
        u_hat = torch.einsum("pcoi,bpi->bpco", self.route, u)
        b = torch.zeros(*u_hat.shape[:3])
        for r in range(3):
            c = b.softmax(2)
            v = self.squash((c.unsqueeze(-1) * (u_hat if r == 2 else u_hat.detach())).sum(1))
            if r < 2:
                b = b + (u_hat.detach() * v.unsqueeze(1)).sum(-1)
        lengths = v.norm(dim=-1)
        chosen = lengths.argmax(1) if y is None else y
        masked = v * torch.eye(3).index_select(0, chosen).unsqueeze(-1)
        return lengths, self.decoder(masked.flatten(1))


@program(stages=(2, 3))
def capsules(smp: Any, out: Any) -> None:
    """Dynamic routing between a container's own parameter and a decoder; evaluation leaves an argument
    out.
    """
    model = smp.DistributedModel(Capsules())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        lengths, rebuilt = model(x, y)
        t = torch.eye(3)[y]
        margin = t * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - t) * F.relu(lengths - 0.1) ** 2
        loss = margin.sum(1).mean() + 0.0005 * F.mse_loss(rebuilt, x, reduction="sum")
        model.backward(loss)
        return loss

    @smp.step
    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        lengths, rebuilt = model(x)
        return lengths.argmax(1), rebuilt

    g = numbers(18)
    for _ in range(3):
        x, y = torch.randn(4, 8, generator=g), torch.randint(0, 3, (4,), generator=g)
        optimizer.zero_grad()
        out.value("loss", train_step(x, y).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            guess, rebuilt = predict(x)
        out.value("guess", guess.concat())
        out.value("rebuilt", rebuilt.concat())
    out.model(model)


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 2, stride=2),
        )
        self.discriminator = nn.Sequential(
            nn.utils.spectral_norm(nn.Conv2d(1, 8, 3, stride=2)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32, 1),
        )

    def forward(self, x: Tensor, part: str) -> Tensor:
        return self.generator(x).tanh() if part == "g" else self.discriminator(x).view(-1)


@program(stages=(2, 3), ranks=(2,))
def dcgan(smp: Any, out: Any) -> None:
    """Alternating training of two parts with an optimizer each; the discriminator's step uses
    fake.detach().
    """
    net = GAN()
    model = smp.DistributedModel(net)
    optimizer_g = smp.DistributedOptimizer(
        torch.optim.Adam(net.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    )
    optimizer_d = smp.DistributedOptimizer(
        torch.optim.Adam(net.discriminator.parameters(), lr=0.01, betas=(0.5, 0.9))
    )
    criterion = nn.BCEWithLogitsLoss()

    @smp.step
    def d_step(real: Tensor, noise: Tensor) -> tuple[Tensor, float]:
        fake = model(noise, "g")
        real_score, fake_score = model(real, "d"), model(fake.detach(), "d")
        loss = criterion(real_score, torch.full((real.size(0),), 0.9))
        loss = loss + criterion(fake_score, torch.zeros_like(fake_score))
        model.backward(loss)
        return loss, real_score.sigmoid().mean().item()

    @smp.step
    def g_step(noise: Tensor) -> Tensor:
        score = model(model(noise, "g"), part="d")
        loss = criterion(score, torch.ones_like(score))
        model.backward(loss)
        return loss

    g = numbers(19)
    for _ in range(2):
        net.discriminator.zero_grad()
        loss_d, d_x = d_step(torch.randn(4, 1, 6, 6, generator=g), torch.randn(4, 4, 1, 1, generator=g))
        optimizer_d.step()
        net.generator.zero_grad()
        loss_g = g_step(torch.randn(4, 4, 1, 1, generator=g))
        optimizer_g.step()
        out.value("losses", [loss_d.reduce_mean().item(), loss_g.reduce_mean().item(), d_x])
    out.model(model)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(16, 3)
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor, keep: list[bool]) -> Tensor:
        x = self.stem(x)
        for block, kept in zip(self.blocks, keep, strict=True):
            x = x + block(x) if kept else x
        return self.head(x)


@program(stages=(2, 3), ranks=(2,))
def stochastic_depth(smp: Any, out: Any) -> None:
    """The step draws which blocks to skip with Python's random; a frozen stem, a part that nothing uses."""
    import random

    net = StochasticDepth()
    net.stem.requires_grad_(False)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    )
    drawn: list[list[bool]] = []

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        keep = [random.random() < 0.6 for _ in range(4)]
        drawn.append(keep)
        loss = F.cross_entropy(model(x, keep), y)
        model.backward(loss)
        return loss

    g = numbers(20)
    for _ in range(4):
        optimizer.zero_grad()
        loss = train_step(torch.randn(4, 6, generator=g), torch.randint(0, 3, (4,), generator=g))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
    out.value("drawn", drawn)
    out.model(model)
