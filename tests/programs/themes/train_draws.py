"""Random numbers and memory layouts of the container's and the step function's code: one idiom a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program

# Draws that look at a hidden value ------------------------------------------------------------------------

DRAWS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "noise_like": ("h + 0.1 * randn_like(h)", lambda h: h + 0.1 * torch.randn_like(h)),
    "new_normal": ("h.new_empty(...).normal_()", lambda h: h + h.new_empty(h.shape).normal_()),
    "drop_path": (
        "timm's drop_path: h.new_empty(shape).bernoulli_(keep)",
        lambda h: h * h.new_empty((h.shape[0], 1)).bernoulli_(0.8).div_(0.8),
    ),
    "dropout_function": ("F.dropout(h, 0.3)", lambda h: F.dropout(h, 0.3, training=True)),
    "bernoulli_mask": ("torch.bernoulli of h's sigmoid", lambda h: h * torch.bernoulli(h.sigmoid())),
    "gumbel": ("F.gumbel_softmax, straight through", lambda h: F.gumbel_softmax(h, tau=0.7, hard=True)),
    "categorical": (
        "an action of Categorical(logits=h) decides what is scaled",
        lambda h: h * (1 + torch.distributions.Categorical(logits=h).sample()[:, None]),
    ),
    "multinomial": (
        "multinomial picks a column",
        lambda h: h + h.gather(1, torch.multinomial(h.softmax(-1), 1)),
    ),
    "normal_around": ("torch.normal(mean=h, std=0.1)", lambda h: h + torch.normal(h.detach(), 0.1)),
    "rsample": ("Normal(h, 1).rsample()", lambda h: torch.distributions.Normal(h, 1.0).rsample()),
    "random_mask": ("a mask from rand of h's shape, as MAE does", lambda h: h * (torch.rand(h.shape) > 0.3)),
    "shuffled": ("rows shuffled by randperm of h's length", lambda h: h + h[torch.randperm(len(h))]),
}


class Around(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
        self.second = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(self.draw(h) if self.draw else h)


def _draw_program(name: str, text: str, draw: Callable[[Tensor], Tensor], in_step: bool) -> None:
    def function(smp: Any, out: Any) -> None:
        torch.manual_seed(5 + smp.dp_rank())
        model = smp.DistributedModel(Around(None if in_step else draw))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

        @smp.step
        def train_step(model: Any, x: Tensor) -> Tensor:
            y = model(x)
            loss = (draw(y) if in_step else y).pow(2).mean()
            model.backward(loss)
            return loss

        for _ in range(2):
            optimizer.zero_grad()
            out.value("loss", train_step(model, torch.randn(8, 8)))
            optimizer.step()
        out.model(model)

    where = "the step function" if in_step else "the container's forward"
    function.__name__ = f"{name}_in_{'step' if in_step else 'forward'}"
    function.__doc__ = f"{text}, in {where}."
    program(stages=(2,), ranks=(2,))(function)


for _name, (_text, _draw) in DRAWS.items():
    for _in_step in (False, True):
        _draw_program(_name, _text, _draw, _in_step)


# Layouts ---------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.mix1, self.mix2 = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix2(torch.tanh(self.mix1(self.embed(tokens))))))


def _train_words(smp: Any, out: Any, net: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))

    @smp.step
    def train_step(model: Any, tokens: Tensor) -> Tensor:
        loss = loss_of(model(tokens), tokens)
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(6)
    for _ in range(2):
        optimizer.zero_grad()
        out.value("loss", train_step(model, torch.randint(0, 13, (4, 7), generator=generator)))
        optimizer.step()
    out.model(model)


@program(stages=(2, 3), ranks=(2,), static=True)
def shifted_by_hand(smp: Any, out: Any) -> None:
    """logits[:, :-1, :].contiguous().view(-1, V), as in every fine-tuning script."""

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        shift_logits = logits[:, :-1, :].contiguous()
        shift_labels = tokens[:, 1:].contiguous()
        return F.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))

    _train_words(smp, out, Words(), loss_of)


@program(stages=(2,), ranks=(2,))
def shifted_with_ellipsis(smp: Any, out: Any) -> None:
    """logits[..., :-1, :].contiguous() and reshape; labels with ignore_index."""

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        labels = tokens.masked_fill(tokens == 3, -100)
        return nn.CrossEntropyLoss(ignore_index=-100)(
            logits[..., :-1, :].contiguous().reshape(-1, 13), labels[..., 1:].contiguous().reshape(-1)
        )

    _train_words(smp, out, Words(), loss_of)


@program(stages=(2,), ranks=(2,))
def class_axis_second(smp: Any, out: Any) -> None:
    """logits.transpose(1, 2) for cross_entropy over (N, C, L), then a contiguous view of it by class."""

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        by_class = logits.transpose(1, 2)
        return (
            F.cross_entropy(by_class, tokens) + 1e-2 * by_class.contiguous().view(13, -1).logsumexp(0).mean()
        )

    _train_words(smp, out, Words(), loss_of)


@program(stages=(2,), ranks=(2,))
def contiguity_asked(smp: Any, out: Any) -> None:
    """Code that branches by is_contiguous() and stride(), as many losses do."""

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        part = logits.permute(1, 0, 2)[:-1]
        scale = 1.0 if part.is_contiguous() else 0.5
        flat = part.view(-1, 13) if part.stride(0) > part.stride(1) else part.reshape(-1, 13)
        return scale * F.cross_entropy(flat, tokens.t()[1:].reshape(-1))

    _train_words(smp, out, Words(), loss_of)


class HeadsByHand(nn.Module):
    """Attention in the container's forward around placed projections; minGPT's views."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.qkv1, self.proj1 = nn.Linear(12, 36), nn.Linear(12, 12)
        self.qkv2, self.proj2 = nn.Linear(12, 36), nn.Linear(12, 12)
        self.head = nn.Linear(12, 13)

    def attend(self, x: Tensor, qkv: nn.Linear, proj: nn.Linear) -> Tensor:
        b, t, c = x.size()
        q, k, v = qkv(x).split(c, dim=2)
        q, k, v = (z.view(b, t, 3, c // 3).transpose(1, 2) for z in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (c // 3) ** -0.5
        att = att.masked_fill(torch.tril(torch.ones(t, t)) == 0, float("-inf")).softmax(-1)
        y = (att @ v).transpose(1, 2).contiguous().view(b, t, c)
        return x + proj(y)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.attend(x, self.qkv1, self.proj1)
        return self.head(self.attend(x, self.qkv2, self.proj2))


@program(stages=(2, 3), ranks=(2,))
def heads_by_hand(smp: Any, out: Any) -> None:
    """minGPT's attention in the container itself: split, view, transpose, contiguous, view."""
    _train_words(
        smp, out, HeadsByHand(), lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten())
    )


class TimeMajor(Words):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(0, 1)
        x = torch.tanh(self.mix2(torch.tanh(self.mix1(x))))
        return self.head(x.transpose(0, 1))


@program(stages=(2, 3), ranks=(2,))
def time_major(smp: Any, out: Any) -> None:
    """Sequences run time-major between blocks: transposes at the entry and the exit of the container."""
    _train_words(smp, out, TimeMajor(), lambda y, t: F.cross_entropy(y.reshape(-1, 13), t.reshape(-1)))


class Patches(nn.Module):
    """einops' rearrange by hand; channels last in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.mix = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        b, c, h, w = x.shape
        x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).contiguous().view(b, -1, c * 4)
        x = self.norm(x + self.mix(x))
        return self.head(x.mean(1))


@program(stages=(2,), ranks=(2,))
def patches_by_hand(smp: Any, out: Any) -> None:
    """Patches cut by view, permute, contiguous, view in the container, from images in channels_last."""
    model = smp.DistributedModel(Patches())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 1, 4, 4).to(memory_format=torch.channels_last)
        out.value("loss", train_step(model, x, torch.tensor([0, 1, 2, 0])))
        optimizer.step()
    out.model(model)
