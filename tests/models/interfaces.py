"""Models that differ in what passes between modules: keywords, dicts, dataclasses, ints, None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Batch, Case
from tests.models.layers import (
    WIDTH,
    Chain,
    MLPBlock,
    mlp_blocks,
    random_generator,
    regression_batch,
)

__all__ = ["CASES"]


class KeywordBlock(nn.Module):
    """Takes keywords only; returns a dict of which one entry is None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()

    def forward(
        self, *, hidden: Tensor, scale: float = 1.0, residual: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        out = self.inner(hidden) * scale
        if residual is not None:
            out = out + residual
        return {"hidden": out, "power": out.square().mean(), "cache": None}


class KeywordNet(nn.Module):
    """Blocks called by keyword; the output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, return_power: bool = False) -> dict[str, Any]:
        power = 0.0
        residual = None
        for block in self.blocks:
            out = block(hidden=x, scale=0.5, residual=residual)
            x, residual = out["hidden"], x
            power = power + out["power"]
        result = {"prediction": self.head(x), "cache": out["cache"]}
        if return_power:
            result["power"] = power
        return result


def keyword_loss(model: Callable[..., Any], batch: Batch) -> dict[str, Any]:
    output = model(x=batch["x"], return_power=True)
    loss = F.mse_loss(output["prediction"], batch["target"]) + 0.1 * output["power"]
    return {"loss": loss, "prediction": output["prediction"], "cache": output["cache"]}


@dataclass
class State:
    """What the blocks of `DataclassNet` hand on."""

    hidden: Tensor
    previous: tuple[Tensor, Tensor] | None
    trail: list[list[Tensor]]
    name: str = "state"


class StateBlock(nn.Module):
    """Dataclass in, dataclass out; the first block finds no ``previous``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLPBlock()

    def forward(self, state: State) -> State:
        hidden = state.hidden + self.inner(state.hidden)
        if state.previous is not None:
            hidden = hidden + 0.5 * state.previous[1]
        means = [hidden.mean(dim=-1), hidden.amax(dim=-1)]
        return State(hidden, (state.hidden, hidden), [*state.trail, means])


@dataclass
class Prediction:
    """What `DataclassNet` returns."""

    value: Tensor
    trail: list[list[Tensor]]
    loss: Tensor | None = None


class DataclassNet(nn.Module):
    """Dataclasses, None, tuples and nested lists between the blocks and in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StateBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Prediction:
        state = State(x, None, [])
        for block in self.blocks:
            state = block(state)
        return Prediction(self.head(state.hidden), state.trail)


def dataclass_loss(model: Callable[..., Any], batch: Batch) -> Prediction:
    prediction = model(batch["x"])
    penalty = sum(mean.square().mean() for means in prediction.trail for mean in means)
    prediction.loss = F.mse_loss(prediction.value, batch["target"]) + 0.01 * penalty
    return prediction


def build_sequential() -> nn.Module:
    """A root that is nobody's class: its forward is torch's own."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(MLPBlock() for _ in range(4)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


class Router(nn.Module):
    """Chooses two rows of a table for each sample: an integer output without gradient."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, num_rows)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(x)
        return scores.topk(2, dim=-1).indices, scores.logsumexp(dim=-1)


class BagNet(nn.Module):
    """Integer inputs, and integers that one block makes and another looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(32, WIDTH, mode="sum")
        self.blocks = mlp_blocks(2)
        self.router = Router(8)
        self.experts = nn.EmbeddingBag(8, WIDTH, mode="mean")
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps int64 ``[B, N]`` to ``[B, W]``."""
        x = self.bag(ids)
        for block in self.blocks:
            x = x + block(x)
        rows, confidence = self.router(x)
        return self.head(x + self.experts(rows)) * confidence[:, None]


def bag_batch(num_samples: int) -> Batch:
    ids = torch.randint(32, (num_samples, 5), generator=random_generator(1))
    return {"ids": ids, "target": regression_batch(num_samples)["target"]}


def bag_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["ids"]), batch["target"])


class PassThrough(nn.Module):
    """Has parameters, but returns its very input: an output that is no new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, adapt: bool = False) -> Tensor:
        return self.adapter(x) if adapt else x


class IdentityNet(nn.Module):
    """Modules that hand their input back, with and without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp_blocks(4)
        self.skip = PassThrough()
        self.identity = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.skip(x)
        for block in self.blocks:
            same = self.skip(self.identity(x))
            x = same + block(x)
        return self.skip(x)


class UnusedNet(Chain):
    """One block is never called, and one parameter of a called block is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = MLPBlock()
        self.blocks[1].forgotten = nn.Parameter(torch.ones(WIDTH))


CASES = (
    Case(
        "kwargs_out",
        KeywordNet,
        regression_batch,
        "keyword arguments, dict outputs, None among them, a sum over all blocks",
        keyword_loss,
        loss_of=lambda output: output["loss"],
    ),
    Case(
        "dataclass_out",
        DataclassNet,
        regression_batch,
        "dataclasses, None fields, tuples, nested lists",
        dataclass_loss,
        loss_of=lambda output: output.loss,
    ),
    Case("sequential", build_sequential, regression_batch, "the root is an nn.Sequential"),
    Case("embedding_bag", BagNet, bag_batch, "integer inputs and activations", bag_loss),
    Case(
        "identity",
        IdentityNet,
        regression_batch,
        "modules that return their input unchanged",
        unused_parameters=frozenset({"skip.adapter.weight", "skip.adapter.bias"}),
    ),
    Case(
        "unused",
        UnusedNet,
        regression_batch,
        "parameters without gradient, in a block never called and in one that is",
        unused_parameters=frozenset(
            {"blocks.1.forgotten"} | {f"spare.{name}" for name, _ in MLPBlock().named_parameters()}
        ),
    ),
)
