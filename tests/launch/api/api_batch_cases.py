"""What the tests of the batch's owner run in the ranks: pp rank 0 loads data, the others have dummies."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.launch.api.api_cases import error_of

VOCABULARY, LENGTH = 11, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens) * mask.unsqueeze(-1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _build() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def _data(index: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(index)
    length = LENGTH + index % 2  # sequences of several lengths
    return torch.randint(VOCABULARY, (4, length), generator=g), torch.ones(4, length)


def _dummy(index: int) -> tuple[Tensor, Tensor]:
    """As AWS's data pipelines collate ``torch.Tensor(0)``."""
    return torch.stack([torch.Tensor(0)] * 4), torch.stack([torch.Tensor(0)] * 4)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _plain(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    net = _build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        tokens, mask = _data(i)
        parts = [_loss(net(t, m), t) for t, m in zip(tokens.chunk(2), mask.chunk(2))]
        for part in parts:
            (part / 2).backward()
        losses.append(float(sum(parts) / 2))
        optimizer.step()
    return losses, net.state_dict()


def _start() -> tuple[Any, Any]:
    warnings.filterwarnings("ignore", message="Stage ")
    smp.init()
    model = smp.DistributedModel(_build())
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    loss = _loss(model(tokens, mask), tokens)
    model.backward(loss)
    return loss


class Pair(NamedTuple):
    tokens: Tensor
    mask: Tensor


_SHAPES: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Any]]] = {
    "positional": (lambda tokens, mask: (tokens, mask), lambda t, m: ((t, m), {})),
    "keywords": (lambda tokens, mask: (tokens, mask), lambda t, m: ((), {"tokens": t, "mask": m})),
    "dict": (lambda given: (given["tokens"], given["mask"]), lambda t, m: (({"tokens": t, "mask": m},), {})),
    "mapping": (
        lambda given: (given["tokens"], given["mask"]),
        lambda t, m: ((UserDict(tokens=t, mask=m),), {}),
    ),
    "other order": (
        lambda given: (given["tokens"], given["mask"]),
        lambda t, m: (({"tokens": t, "mask": m} if t.numel() else {"mask": m, "tokens": t},), {}),
    ),
    "nested": (lambda given: (given[0][0], given[1].mask), lambda t, m: (([(t,), Pair(t, m)],), {})),
}


def trained(shape: str = "positional", dummies: str = "always", steps: int = 4) -> dict[str, Any]:
    """Losses and weights, and one process's."""
    model, optimizer = _start()
    take, give = _SHAPES[shape]
    owns = smp.pp_rank() == 0

    def function(model: Any, options: Any, *args: Any, **kwargs: Any) -> Tensor:
        tokens, mask = take(*args, **kwargs)
        loss = _loss(model(tokens, mask), tokens)
        model.backward(loss)
        options.seen.append(tuple(tokens.shape))
        return loss

    train_step = smp.step(function)
    losses = []
    options = SimpleNamespace(seen=[], rank=smp.rank())  # stays the rank's own
    for i in range(steps):
        optimizer.zero_grad()
        real = owns or (dummies == "later" and i == 0) or (dummies == "between" and i != 1)
        tokens, mask = (_data if real else _dummy)(i)
        if dummies == "like the data" and not owns and i:
            tokens, mask = torch.zeros(4, LENGTH, dtype=torch.long), torch.ones(4, LENGTH)
        args, kwargs = give(tokens, mask)
        losses.append(float(train_step(model, options, *args, **kwargs).reduce_mean()))
        optimizer.step()
    expected_losses, expected = _plain(steps)
    state = model.state_dict()
    return {
        "losses": losses,
        "plain losses": expected_losses,
        "same": all(torch.equal(state[name], value) for name, value in expected.items()),
        "seen": options.seen[:2],
    }


def evaluated() -> tuple[list[float], list[float]]:
    """A model that is never trained here, and results that every rank uses."""
    model, _ = _start()
    model.eval()

    @smp.step
    def test_step(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        return _loss(model(tokens, mask), tokens)

    net = _build()
    found, expected = [], []
    with torch.no_grad():
        for i in range(2):
            tokens, mask = (_data if smp.pp_rank() == 0 else _dummy)(i)
            found.append(float(test_step(model, tokens, mask).reduce_mean()))
            tokens, mask = _data(i)
            parts = [_loss(net(t, m), t) for t, m in zip(tokens.chunk(2), mask.chunk(2))]
            expected.append(float(sum(parts) / 2))
    return found, expected


def _step(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    model, _ = _start()

    def function(model: Any, tokens: Any, mask: Any = None) -> Tensor:
        loss = _loss(model(tokens, mask), tokens)
        model.backward(loss)
        return loss

    return lambda: smp.step(function)(model, *args, **kwargs)


def owner_has_the_dummy() -> str:
    smp.init()
    data = (_dummy if smp.pp_rank() == 0 else _data)(0)
    return error_of(_step(*data))


def what_cannot_be_handed_over(kind: str) -> str:
    smp.init()
    tokens = mask = torch.zeros(0)
    if smp.pp_rank() == 0:
        tokens, mask = _data(0)
        if kind == "sparse":
            mask = mask.to_sparse()
        else:
            tokens = torch.ones(4, 5, dtype=torch.complex64)
            mask = tokens.conj()
    return error_of(_step(tokens, mask))


def another_nesting() -> str:
    smp.init()
    tokens, mask = (_data if smp.pp_rank() == 0 else _dummy)(0)
    return error_of(_step(tokens, mask) if smp.pp_rank() == 0 else _step(tokens))


def same_shape_other_numbers() -> str:
    smp.init()
    tokens, mask = _data(0)
    return error_of(_step((tokens + smp.pp_rank()) % VOCABULARY, mask))


def other_numbers_later() -> str:
    smp.init()
    model, _ = _start()

    tokens, mask = _data(0)
    for _ in range(5):
        train_step(model, tokens, mask)
    return error_of(lambda: train_step(model, tokens, mask + smp.pp_rank()))


def own_values(kind: str) -> str:
    """What is no tensor of the batch, and differs between the ranks."""
    smp.init()
    model, _ = _start()
    rank = smp.pp_rank()
    array = np.arange(1, VOCABULARY + 1.0) + rank
    weights = {"array": array, "list": array.tolist(), "number": np.float32(1 + rank), "global": None}[kind]
    outside = torch.full((VOCABULARY,), 1.0 + rank)

    @smp.step
    def weighted_step(model: Any, tokens: Tensor, mask: Tensor, weights: Any) -> Tensor:
        logits = model(tokens, mask)
        if kind == "number":
            loss = _loss(logits, tokens) * weights
        else:
            weight = outside if weights is None else torch.as_tensor(weights, dtype=torch.float32)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), weight=weight)
        model.backward(loss)
        return loss

    return error_of(lambda: weighted_step(model, *_data(0), weights))


def unwritten() -> list[float]:
    """Memory that nobody has written yet differs from rank to rank, and nobody reads it."""
    smp.init()
    model, _ = _start()

    @smp.step
    def filling_step(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        logits = torch.empty(*tokens.shape, VOCABULARY)
        logits.fill_(float(smp.pp_rank()))  # as memory may be
        first = tokens < VOCABULARY // 2
        found = model(tokens, mask)
        logits[first] = found[first]
        logits[~first] = 2 * found[~first]
        loss = _loss(logits, tokens)
        model.backward(loss)
        return loss

    return [float(filling_step(model, *_data(i)).reduce_mean()) for i in range(3)]


def with_gaps() -> tuple[list[float], list[float]]:
    """Losses of batches that are slices of a larger tensor, and of the same batches without gaps."""
    smp.init()
    found = []
    for has_gaps in (True, False):
        smp.reset()
        model, optimizer = _start()

        losses = []
        for i in range(3):
            tokens, mask = (_data if smp.pp_rank() == 0 else _dummy)(i)
            if smp.pp_rank() == 0:
                tokens, mask = tokens[:, 1:4], mask[:1].expand(4, -1)[:, 1:4]
                if not has_gaps:
                    tokens, mask = tokens.contiguous(), mask.contiguous()
            optimizer.zero_grad()
            losses.append(float(train_step(model, tokens, mask).reduce_mean()))
            optimizer.step()
        found.append(losses)
    return found[0], found[1]


@smp.step
def _shifting_step(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    inputs.mul_(2)  # and the targets, where they share memory
    loss = (model(inputs) - targets).square().mean()
    model.backward(loss)
    return loss


def _sharing(kind: str, index: int) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(28.0).reshape(4, 7) / 28 + index
    if kind == "one tensor":
        return numbers[:, :6], numbers[:, :6]
    if kind == "shifted":
        return numbers[:, :-1], numbers[:, 1:]
    if kind == "numpy":
        array = numbers.numpy()
        return torch.from_numpy(array[:, :6]), torch.from_numpy(array)[:, 1:]
    assert kind == "other types"
    inputs = numbers[:, :6].clone()
    return inputs, inputs.view(torch.int32)


def shares_memory(kind: str, others: str) -> tuple[list[float], list[float]]:
    """Losses where inputs and targets share memory on pp rank 0, and those of one process."""
    plain = []
    for i in range(3):
        inputs, targets = _sharing(kind, i)
        halves = []
        for m in range(2):
            part, wanted = inputs[2 * m : 2 * m + 2], targets[2 * m : 2 * m + 2]
            part.mul_(2)
            halves.append((_chain()(part) - wanted).square().mean())
        plain.append(float(torch.stack(halves).mean()))
    smp.init()
    model = smp.DistributedModel(_chain())
    losses = []
    for i in range(3):
        inputs, targets = _sharing(kind, i)
        if smp.pp_rank() > 0:
            inputs, targets = inputs.clone(), targets.clone()
            if others == "dummies":
                inputs, targets = torch.zeros(0), torch.zeros(0)
        losses.append(float(_shifting_step(model, inputs, targets).reduce_mean()))
    return losses, plain


def _chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def draws_for_data() -> list[float]:
    smp.init()
    warnings.filterwarnings("ignore", message="Stage ")
    torch.manual_seed(5)
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4))
    model = smp.DistributedModel(nn.Sequential(*blocks))

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        y = model(x + 0.1 * torch.rand(x.shape))
        loss = y.square().mean() + random.random() + float(np.random.rand())
        model.backward(loss)
        return loss

    losses = []
    for _ in range(3):
        if smp.pp_rank() == 0:
            x = torch.randn(4, 6) * random.random() * float(np.random.rand())
        else:
            x = torch.empty(4, 0)
        losses.append(float(train_step(model, x).reduce_mean()))
    return losses


def goes_on_after_an_error() -> dict[str, Any]:
    """The step that could not be run leaves nothing behind."""
    found = owner_has_the_dummy()
    smp.reset()
    return {"error": found, **trained()}
