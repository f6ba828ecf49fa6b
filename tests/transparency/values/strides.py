"""What the ranks run for the tests of strides: models that see with which strides tensors come to them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.comm.wires.wire import Transfer
from smp_lite.record.values.placed import TensorMeta
from smp_lite.session import current
from tests.models import Batch
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.rounds import Round, assert_rounds_equal

__all__ = ["MODELS", "send_all", "train"]

WIDTH = 5
"""At which products and sums show how their operands lie."""


class Convolutions(nn.Module):
    """Channels-last weights and images; where the gradient of the mean comes in, it is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self._block()
        self.second = self._block()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _block(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1, groups=2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, 6, 6).to(memory_format=torch.channels_last)
        x = x + self.first(x)
        x = x + self.second(x)
        return x.mean((2, 3))


class Row(nn.Linear):
    """Gives all but the first row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 1:]


class Slices(nn.Module):
    """A linear layer adds its bias within the product only where its input has no gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Row(WIDTH, 200), nn.Linear(200, 200)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean((1, 2))[:, None].expand(-1, 4)


class Shift(nn.Module):
    """The gradient of its parameter is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Concatenated(nn.Module):
    """The gradients of what is put together are slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Shift(), nn.Conv1d(9, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], 1).square().mean((1, 2))[:, None].expand(-1, 4)


class Turned(nn.Conv1d):
    """Gives its input a gradient that lies the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2).tanh()


class Residual(nn.Module):
    """Two gradients come to a value, one from elsewhere: the first one gives the sum its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), Shift(), nn.Tanh(), Shift())
        self.second = Turned(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(x)
        return (x * 0.5 + y).square().mean((1, 2))[:, None].expand(-1, 4)


class Channels(nn.Module):
    """Gives a view of what it has made, and has a parameter whose gradient is a sum over that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH, 1))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(self.linear(x).transpose(1, 2)) + self.by).transpose(1, 2)


class Added(nn.Module):
    """Changes a view of what the first block has made, after another stage has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Channels()
        self.second = nn.Sequential(Turned(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += self.second(x * 1.0)
        return (x * x.sum(1, keepdim=True)).mean((1, 2))[:, None].expand(-1, 4)


class Flat(Added):
    """A view that lies row by row, whose gradient comes turned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Shift(), nn.Flatten(), nn.Unflatten(1, (9, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += self.second(x * 1.0)
        kernel = torch.linspace(-1, 1, WIDTH * WIDTH * 3).view(WIDTH, WIDTH, 3)
        return F.conv1d(x.transpose(1, 2), kernel).square().mean((1, 2))[:, None].expand(-1, 4)


class Borrowed(nn.Module):
    """Uses a weight on another stage: under ``no_grad`` torch multiplies by parts if it wants none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.first(x).transpose(0, 1), self.second.weight, self.second.bias)
        return x.transpose(0, 1).square().mean((1, 2))[:, None].expand(-1, 4)


class OfTokens(nn.Module):
    """Images made of tokens, one in each microbatch: by its strides such a one is not channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 8 * 36)
        self.second = nn.Sequential(
            nn.Conv2d(8, 8, 1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tanh(self.first(x)).reshape(len(x), 36, 8)
        image = tokens.transpose(1, 2).reshape(len(x), 8, 6, 6) * 2
        larger = F.interpolate(image, size=(9, 9), mode="bilinear")
        return self.second(torch.cat([larger, larger.roll(1, 2)], 1)[:, ::2]).tanh().mean((2, 3))


class NormedChannels(nn.Module):
    """An image whose channels are normed as a row, of one sample, goes to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, stride=2)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        image = self.first(x.view(len(x), 1, 12, 12))
        normed = F.layer_norm(image.permute(0, 2, 3, 1), [8]).permute(0, 3, 1, 2)
        return self.second(normed).tanh().sum((2, 3))


class Squeeze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1), nn.Sigmoid())

    def forward(self, image: Tensor) -> Tensor:
        return image * self.gate(image.mean((2, 3), keepdim=True))


class Chosen(Squeeze):
    """What it computes cannot be described without numbers, so it runs while the step is recorded."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) + image[image > 0].mean()


class Squeezed(nn.Module):
    """An image, one in each microbatch, of which two stages add up gradients of different strides."""

    squeeze: type[nn.Module] = Squeeze

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Conv2d(1, 8, 3, stride=2), nn.Linear(8, 4)])
        self.second = self.squeeze()

    def forward(self, x: Tensor) -> Tensor:
        image = F.interpolate(self.first[0](x.view(len(x), 1, 12, 12)), size=(7, 5), mode="bilinear")
        image = self.second(image) + image * 0.5
        return self.first[1](image.flatten(2).transpose(1, 2).tanh().mean(1))


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.linspace(-1, 1, 9 * WIDTH).view(9, WIDTH))
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = self.position[None] + x.reshape(len(x), 9, WIDTH)
        return self.linear(torch.tanh(x) * scale).mean(1)


class Positions(nn.Module):
    """With one sample, what a parameter and a value of another stage get as their gradients is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Positioned()])
        self.second = Positioned()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first[0](x).flatten(1)
        y = self.second(h, x)
        return self.first[1](h, y.exp().mean()) + y


class SqueezedAtOnce(Squeezed):
    squeeze = Chosen


MODELS: dict[str, type[nn.Module]] = {
    "squeezed at once": SqueezedAtOnce,
    "positions": Positions,
    "squeezed": Squeezed,
    "of tokens": OfTokens,
    "normed channels": NormedChannels,
    "convolutions": Convolutions,
    "slices": Slices,
    "concatenated": Concatenated,
    "residual": Residual,
    "borrowed": Borrowed,
    "added": Added,
    "flat": Flat,
}


def batch(name: str) -> Batch:
    generator = torch.Generator().manual_seed(3)
    shape: tuple[int, ...] = (8, 144) if name == "convolutions" else (8, 9, WIDTH)
    if name in ("of tokens", "normed channels", "squeezed", "squeezed at once"):
        shape = (NUM_MICROBATCHES, 144)
    if name == "positions":
        shape = (NUM_MICROBATCHES, 9, WIDTH)
    x = torch.randn(shape, generator=generator)
    return {"x": x, "target": torch.randn(len(x), 4, generator=generator)}


def _step(model: Any, batch: Batch, backward: Any) -> Any:
    loss = F.mse_loss(model(batch["x"]), batch["target"])
    backward(loss)
    return loss


def _evaluate(model: Any, batch: Batch, backward: Any) -> Any:
    return model(batch["x"])


def train(name: str, wire: str) -> None:
    """Raises AssertionError where a bit is not that of one process."""
    os.environ["SMP_LITE_WIRE"] = wire
    smp.init()

    def build() -> nn.Module:
        model = MODELS[name]()
        smp.set_partition(model.first, 0)
        smp.set_partition(model.second, 1)
        return model

    rounds = [*[Round(_step, batch(name))] * 3, Round(_evaluate, batch(name), no_grad=True)]
    assert_rounds_equal(build, rounds, placement="manual")


def layouts() -> dict[str, Tensor]:
    """Tensors of one shape, in all the ways that they can lie."""
    whole = torch.arange(4 * 6 * 5 * 8.0)
    dense = whole[: 2 * 4 * 3 * 5]
    shape = (2, 4, 3, 5)
    return {
        "contiguous": dense.view(shape),
        "channels last": dense.view(2, 3, 5, 4).permute(0, 3, 1, 2),
        "any order": dense.view(5, 4, 2, 3).permute(2, 1, 3, 0),
        "rows of longer ones": whole.view(2, 4, 15, 8)[:, :, ::5, 1:6],
        "a part of each": whole.view(2, 10, 6, 8)[:, 3:7, 1:4, :5],
        "every other": dense.repeat(2)[::2].view(shape),
        "expanded": whole[3:4].expand(shape),
        "expanded rows": whole[:20].view(1, 4, 1, 5).expand(shape),
        "expanded parts": whole.view(1, 10, 1, 96)[:, 2:6, :, 7:12].expand(shape),
        "overlapping": whole.as_strided(shape, (7, 2, 1, 1), 3),
        "overlapping with gaps": whole.as_strided(shape, (300, 20, 9, 9)),
        "negated": torch.view_as_complex(whole[:240].view(2, 4, 3, 5, 2)).conj().imag,
    }


def send_all(wire: str) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Sends each from stage 0 to 1, which knows of a contiguous one; what has arrived there, and strides."""
    os.environ["SMP_LITE_WIRE"] = wire
    smp.init()
    wires = current().wire()
    assert wires is not None
    found, under_way = {}, []
    for name, tensor in layouts().items():
        meta = TensorMeta.of(torch.empty(tensor.shape))
        transfer = wires.send(tensor, meta, 1) if smp.pp_rank() == 0 else wires.receive(meta, 0)
        under_way.append((name, transfer))
    for name, transfer in under_way:
        _wait(transfer)
        if smp.pp_rank() == 1:
            arrived = transfer.tensor()
            found[name] = arrived.clone(memory_format=torch.contiguous_format), arrived.stride()
    return found


def _wait(transfer: Transfer) -> None:
    end = time.monotonic() + 20
    while not transfer.done():
        assert time.monotonic() < end, "nothing has arrived"
