"""Side doors: what reaches into a model, or out of it, beside its arguments and results, while a step
runs.
"""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from typing import Any

import numpy as np
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


def data(seed: int, batch: int = 8, width: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    g = numbers(seed)
    return torch.randn(batch, width, generator=g), torch.randint(0, classes, (batch,), generator=g)


class Block(nn.Module):
    """A layer with a strength that may be turned, an adapter, and something it remembers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.lora_a, self.lora_b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.scaling = 1.0
        self.attention: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.scaling * self.lora_b(self.lora_a(x)))
        self.attention = y.detach().softmax(-1)
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12))
        self.blocks = nn.ModuleList(Block(12) for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Random numbers ---------------------------------------------------------------------------------------------


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 6)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


@program(stages=(2, 3), ranks=(2,))
def vae_randn_like(smp: Any, out: Any) -> None:
    """PyTorch's example VAE: eps = torch.randn_like(std) in a method of the model."""
    model = smp.DistributedModel(VAE())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        recon, mu, logvar = model(x)
        bce = F.binary_cross_entropy(recon, x.sigmoid(), reduction="sum")
        loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(data(i)[0]).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def policy_sampling(smp: Any, out: Any) -> None:
    """REINFORCE: torch.multinomial over the model's probabilities, in the step function."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(state: Tensor, good: Tensor) -> tuple[Tensor, Tensor]:
        probs = model(state).softmax(-1)
        action = torch.multinomial(probs.detach(), 1).squeeze(1)
        reward = (action == good).float()
        loss = -(probs.gather(1, action[:, None]).squeeze(1).log() * reward).mean()
        model.backward(loss)
        return loss, action

    for i in range(3):
        optimizer.zero_grad()
        loss, action = train_step(*data(i))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("action", action.concat())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def dropout_in_step(smp: Any, out: Any) -> None:
    """R-Drop's little sister: F.dropout on the model's output, in the step function."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        logits = F.dropout(model(x), p=0.3, training=True)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.model(model)


class Augmenting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(6, 16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            x = -x
        x = x * float(np.random.uniform(0.9, 1.1))
        return self.head(self.body(x))


@program(stages=(2,), ranks=(2,))
def augmentation_in_model(smp: Any, out: Any) -> None:
    """Augmentation by Python's and numpy's random in the model's top-level forward."""
    np.random.seed(3)
    model = smp.DistributedModel(Augmenting())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.model(model)


# Modules that change while a step runs ----------------------------------------------------------------------


@program(stages=(2,), ranks=(2,))
def pseudo_labels(smp: Any, out: Any) -> None:
    """model.eval() for the pseudo-labels and model.train() again, both inside the step; batch norm tells
    them apart.
    """
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor) -> tuple[Tensor, Tensor]:
        model.eval()
        with torch.no_grad():
            guess = model(x).softmax(-1)
        model.train()
        confident = (guess.max(-1).values > 0.36).float()
        loss = (F.cross_entropy(model(x), guess.argmax(-1), reduction="none") * confident).mean()
        model.backward(loss)
        return loss, confident

    for i in range(3):
        optimizer.zero_grad()
        loss, confident = train_step(data(i)[0])
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("confident", confident.concat())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def frozen_batch_norm(smp: Any, out: Any) -> None:
    """A helper puts batch norms into eval() at the start of the step and back to train() at its end."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def batch_norms(train: bool) -> None:
        for m in net.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.train(train)

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        batch_norms(train=False)
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        batch_norms(train=True)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def preference_with_adapters_off(smp: Any, out: Any) -> None:
    """DPO as peft does it: the reference is the same model with the adapters' scaling set to 0 for one
    call.
    """
    net = Net()
    model = smp.DistributedModel(net)
    adapters = [p for n, p in model.named_parameters() if "lora" in n]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(adapters, lr=1.0))
    model.eval()

    @smp.step
    def train_step(x: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
        for block in net.blocks:
            block.scaling = 0.0
        with torch.no_grad():
            reference = model(x).log_softmax(-1)
        for block in net.blocks:
            block.scaling = 1.0
        ratio = model(x).log_softmax(-1) - reference
        margin = ratio.gather(1, chosen[:, None]) - ratio.gather(1, rejected[:, None])
        loss = -F.logsigmoid(0.5 * margin).mean()
        model.backward(loss)
        return loss

    for i in range(3):
        x, y = data(i)
        optimizer.zero_grad()
        out.value("loss", train_step(x, y, (y + 1) % 3).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="requires_grad of the parameter")
def freezes_in_step(smp: Any, out: Any) -> None:
    """pix2pix's set_requires_grad(part, False) before a call in the step, and True after it."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def set_requires_grad(part: nn.Module, wanted: bool) -> None:
        for p in part.parameters():
            p.requires_grad = wanted

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        set_requires_grad(net.head, False)
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        set_requires_grad(net.head, True)
        return loss

    for i in range(2):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def clamps_weights_in_step(smp: Any, out: Any) -> None:
    """WGAN's clamp_ of a critic's weights at the start of the step function: later ones change nothing."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.RMSprop(model.parameters(), lr=0.01))

    @smp.step
    def train_step(real: Tensor, fake: Tensor) -> Tensor:
        for p in net.head.parameters():
            p.data.clamp_(-0.1, 0.1)
        loss = model(fake).mean() - model(real)[:, 0].mean()
        model.backward(loss)
        return loss

    for i in range(3):
        x, _ = data(i)
        optimizer.zero_grad()
        out.value("loss", train_step(x, x.flip(0) + 1).reduce_mean())
        optimizer.step()
    out.model(model)


# What modules remember --------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,))
def stored_attention(smp: Any, out: Any) -> None:
    """Each block keeps its attention on itself; the step returns the last block's map."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss, net.blocks[-1].attention

    for i in range(3):
        optimizer.zero_grad()
        loss, attention = train_step(*data(i))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("attention", attention)
    out.model(model)


class CountingMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(mlp(8, 12, 8) for _ in range(3))
        self.register_buffer("load", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        self.load = 0.9 * self.load + 0.1 * gates.detach().mean(0)
        return sum(g * e(x) for g, e in zip(gates.split(1, -1), self.experts))


@program(stages=(2,), ranks=(2,), always_on_ranks=True)
def buffers_read_in_step(smp: Any, out: Any) -> None:
    """Running statistics of the experts are read in the step, after the call, for the log."""
    net = nn.Sequential(nn.Linear(6, 8), CountingMoE(), nn.BatchNorm1d(8), CountingMoE(), nn.Linear(8, 3))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    log: list[float] = []

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        log.append(round(net[2].running_mean.norm().item(), 5))
        return loss, net[1].load

    for i in range(3):
        optimizer.zero_grad()
        loss, load = train_step(*data(i))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("load", load)
    out.value("log", log)
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def feature_matching(smp: Any, out: Any) -> None:
    """Forward hooks collect the blocks' outputs into a dict, and the loss uses them: distillation,
    perceptual loss.
    """
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    features: dict[int, Tensor] = {}
    for i, block in enumerate(net.blocks):
        block.register_forward_hook(lambda module, args, output, i=i: features.__setitem__(i, output))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + 0.1 * sum(f.pow(2).mean() for f in features.values())
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,))
def hook_for_one_call(smp: Any, out: Any) -> None:
    """A hook is put on a block for one call in the step, and removed after it: captum, probing."""
    net = Net()
    model = smp.DistributedModel(net)
    seen: list[Tensor] = []

    @smp.step
    def probe(x: Tensor) -> Tensor:
        handle = net.blocks[1].register_forward_hook(lambda m, args, o: seen.append(o.detach().mean()))
        logits = model(x)
        handle.remove()
        return logits

    with torch.no_grad():
        out.value("logits", probe(data(0)[0]).concat())
    out.value("seen", seen)


class Meter:
    def __init__(self) -> None:
        self.count, self.values = 0, []


class Metered(nn.Module):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.body, self.head = mlp(6, 16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 3))
        self.meter = meter

    def forward(self, x: Tensor) -> Tensor:
        self.meter.count += 1
        self.meter.values.append(len(x))
        beta = min(1.0, self.meter.count / 6)
        return self.head(self.body(x)) * beta


@program(stages=(2,), ranks=(2,))
def meter_in_model(smp: Any, out: Any) -> None:
    """The model counts its calls on an object it was given, and warms up by that count."""
    meter = Meter()
    model = smp.DistributedModel(Metered(meter))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.value("count", meter.count)
    out.value("values", str(meter.values))
    out.model(model)


# Gradients and updates in the step --------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), refused="looked at inside an smp.step")
def gradient_norm_in_step(smp: Any, out: Any) -> None:
    """.grad is looked at in the step, after model.backward, to find parts without gradients."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    norms: list[bool] = []

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        norms.append(any(p.grad is not None for p in model.parameters()))
        return loss

    for i in range(2):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.value("has gradients", norms)
    out.model(model)


@program(stages=(2,), microbatches=1, refused="inside a function decorated")
def clips_in_step(smp: Any, out: Any) -> None:
    """clip_grad_norm_ right after model.backward, inside the step function, one microbatch."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), microbatches=1, refused="inside a function decorated")
def whole_loop_in_step(smp: Any, out: Any) -> None:
    """zero_grad, backward and optimizer.step all inside the step function, as a beginner does it; one
    microbatch.
    """
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        optimizer.step()
        return loss

    for i in range(3):
        out.value("loss", train_step(*data(i)).reduce_mean())
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def gradients_like_outputs(smp: Any, out: Any) -> None:
    """model.backward(outputs, torch.ones_like(outputs)), as tensor.backward(gradient) is often called."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        logits = model(x)
        model.backward(logits, torch.ones_like(logits))
        return logits

    for i in range(3):
        optimizer.zero_grad()
        out.value("logits", train_step(data(i)[0]).concat())
        optimizer.step()
    out.model(model)


# Targets, queues, buffers -----------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def byol_target(smp: Any, out: Any) -> None:
    """A target network outside the model, called in the step, moved after each step by zip(parameters(),
    ...).
    """
    net = Net()
    target = copy.deepcopy(net).requires_grad_(False)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = F.normalize(target(x + 0.1), dim=-1)
        loss = 2 - 2 * (F.normalize(model(x), dim=-1) * goal).sum(-1).mean()
        model.backward(loss)
        return loss

    for i in range(4):
        optimizer.zero_grad()
        out.value("loss", train_step(data(i)[0]).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            for p, t in zip(net.parameters(), target.parameters(), strict=True):
                t.mul_(0.5).add_(p, alpha=0.5)
    out.value("target", target.state_dict())
    out.model(model)


class MoCo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder_q = mlp(6, 16, 16, 4)
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * 0.9 + q.data * 0.1

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % 16

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / 0.07
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


@program(stages=(2,), ranks=(2,), refused="cannot be recorded")
def moco(smp: Any, out: Any) -> None:
    """MoCo's reference code: the key encoder's .data is moved in forward, keys go into a queue buffer."""
    model = smp.DistributedModel(MoCo())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9))

    @smp.step
    def train_step(a: Tensor, b: Tensor) -> Tensor:
        logits, labels = model(a, b)
        loss = F.cross_entropy(logits, labels)
        model.backward(loss)
        return loss

    for i in range(3):
        x, _ = data(i)
        optimizer.zero_grad()
        out.value("loss", train_step(x, x + 0.1).reduce_mean())
        optimizer.step()
    out.model(model)


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 8), mlp(8, 16, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids).cumsum(1)))


@program(stages=(2,), ranks=(2,))
def generates_into_buffer(smp: Any, out: Any) -> None:
    """Greedy decoding in one step writes each token into a tensor made beforehand, of which views are fed."""
    model = smp.DistributedModel(TinyLM())

    @smp.step
    def generate(prompt: Tensor) -> Tensor:
        tokens = torch.zeros(prompt.shape[0], 6, dtype=torch.long)
        tokens[:, : prompt.shape[1]] = prompt
        for t in range(prompt.shape[1], tokens.shape[1]):
            tokens[:, t] = model(tokens[:, :t])[:, -1].argmax(-1)
        return tokens

    with torch.no_grad():
        out.value("tokens", generate(torch.arange(8).view(4, 2)).concat())


@program(stages=(2,), ranks=(2,))
def tensors_out_by_list(smp: Any, out: Any) -> None:
    """loss.detach() is appended to a list outside, and stacked after the epoch, so as not to synchronise."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses: list[Tensor] = []

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        losses.append(loss.detach())

    for i in range(2):
        optimizer.zero_grad()
        train_step(*data(i))
        optimizer.step()
    out.value("losses", torch.stack(losses))


@program(stages=(2,), ranks=(2,))
def running_totals(smp: Any, out: Any) -> None:
    """A confusion total outside is added to in place by the step, microbatch after microbatch."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    total, best = torch.zeros(3), {"loss": torch.tensor(1e9)}

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        total.add_(logits.detach().softmax(-1).sum(0))
        best["loss"] = torch.minimum(best["loss"], loss.detach())
        return loss

    for i in range(2):
        out.value("loss", train_step(*data(i)).reduce_mean())
    out.value("total", total)
    out.value("best", best)


# torch.func and friends: may be refused ---------------------------------------------------------------------


@program(stages=(2,), refused="torch.func transformations")
def per_sample_vmap(smp: Any, out: Any) -> None:
    """torch.vmap over the model, a sample at a time."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))

    @smp.step
    def predict(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: model(row[None])[0])(x)

    with torch.no_grad():
        out.value("logits", predict(data(0)[0]).concat())


@program(stages=(2,), refused="torch.func transformations")
def input_gradient_by_func(smp: Any, out: Any) -> None:
    """torch.func.grad of the model with respect to its input."""
    model = smp.DistributedModel(mlp(6, 16, 16, 1))

    @smp.step
    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda v: model(v).sum())(x)

    out.value("slope", slope(data(0)[0]).concat())


@program(stages=(2,), ranks=(2,), refused="mat1 and mat2")
def falls_back(smp: Any, out: Any) -> None:
    """try: the model on the batch; except RuntimeError (a wrong width): on its first columns, padded."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        try:
            logits = model(x)
        except RuntimeError:
            logits = model(x[:, :6])
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss

    for i, width in enumerate((6, 7, 6)):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i, width=width)).reduce_mean())
        optimizer.step()
    out.model(model)


@torch.jit.optimized_execution(False)
def scripted(smp: Any, out: Any, net: nn.Module) -> None:
    """Not optimized: from the second run on torch.jit would take other code, with other last bits."""
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def scripted_part(smp: Any, out: Any) -> None:
    """A part of the model is torch.jit.script'ed."""
    scripted(smp, out, nn.Sequential(mlp(6, 16, 16), torch.jit.script(mlp(16, 16, 16)), nn.Linear(16, 3)))


@torch.jit.script
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))


class BiasGelu(nn.Module):
    """Calls a function that is torch.jit.script'ed, as Megatron's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return bias_gelu(self.linear(x), self.bias)


@program(stages=(2,), ranks=(2,))
def scripted_function(smp: Any, out: Any) -> None:
    scripted(smp, out, nn.Sequential(mlp(6, 16, 16), BiasGelu(), BiasGelu(), nn.Linear(16, 3)))
