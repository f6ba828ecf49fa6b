"""What memory features cost and save: one GPT, AdamW, one table.

Over two stages: plain, every block checkpointed, blocks checkpointed by twos, the same with all forwards
first, and that with what is kept written to files until backward needs it (interleaved, a backward comes too
soon after its forward for that); parameters in half precision with float32 masters. Over replicas:
the optimizer's state in pieces, and everything in pieces (sharded data parallelism).

A step is zero_grad, forward, backward and the optimizer's, one thread a process. It alternates with a step
of the plain model in one process (rank 0's, while the others sleep) on the same microbatches; replicas have
equal shares of that batch. Held is what tensors take between two steps: parameters, masters, gradients,
optimizer state. The peak is that of torch's allocator in a step, of the rank with most. Two
processors here compute in half precision slowly: what fp16 saves is memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import smp_lite as smp
from notebooks.gpt import GPT
from tests.benchmarks.beside_dense import (
    WARM_UP_STEPS,
    BesideDense,
    RankMemory,
    alternate,
    largest_difference,
    step_of,
)
from tests.benchmarks.measuring import bytes_of_tensors, peak
from tests.benchmarks.spread import Spread, slowest_rank
from tests.benchmarks.workload import Workload, next_byte_loss
from tests.harness import run_distributed

__all__ = ["measure_dense", "measure_in_ranks", "table"]


@dataclass(frozen=True)
class Feature:
    """One row: how many ranks, the parameters beside the pipeline's, and what is checkpointed.

    ``tolerance`` is relative, of losses: what is compared must train alike.
    """

    name: str
    stages: int
    replicas: int = 1
    parameters: dict[str, Any] = field(default_factory=dict)
    strategy: str | None = None
    tolerance: float = 1e-5


def _sharded(degree: int) -> Feature:
    parameters = {
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 0,
        "sdp_gradient_clipping": 0.0,
    }
    return Feature(f"sharded, d {degree}", 1, degree, parameters)


_SIMPLE = {"pipeline": "simple"}
_OFFLOADED = {"offload_activations": True, "activation_loading_horizon": 1}

_FEATURES = (
    Feature("plain", 2),
    Feature("checkpointed, each", 2, strategy="each"),
    Feature("checkpointed, group_2", 2, strategy="group_2"),
    Feature("group_2, simple", 2, parameters=_SIMPLE, strategy="group_2"),
    Feature("group_2, simple, offloaded", 2, parameters=_SIMPLE | _OFFLOADED, strategy="group_2"),
    Feature("bf16", 2, parameters={"bf16": True}, tolerance=3e-2),
    Feature("fp16", 2, parameters={"fp16": True}, tolerance=3e-2),
    Feature("sharded optimizer state", 1, 2, {"shard_optimizer_state": True}),
    _sharded(2),
    _sharded(4),
)


def table(quick: bool) -> Table:
    """Runs every feature beside the plain model and describes them."""
    workload, num_pairs = (Workload(64, 8, 32, 16, 4), 2) if quick else (Workload(128, 24, 64, 32, 4), 10)
    result = Table(
        "ranks",
        "feature",
        "held KiB",
        "peak KiB",
        "plain ms",
        "feature ms",
        "feature / plain",
        "difference",
        title=f"Memory features, {workload}, M {workload.num_microbatches}: of the rank with most; times of "
        f"{num_pairs} pairs: median (quartiles), plain is one process; difference of losses, relative",
    )
    kwargs: dict[str, Any] = {"workload": workload}
    (dense,) = run_distributed(f"{__name__}:measure_dense", 1, kwargs=kwargs, timeout_s=300.0)
    result.add_row("1", "one process", *(f"{n / 1024:.0f}" for n in (dense.held, dense.peak)))
    for feature in _FEATURES:
        ranks: list[BesideDense] = run_distributed(
            f"{__name__}:measure_in_ranks",
            feature.stages * feature.replicas,
            kwargs={**kwargs, "feature": feature, "num_pairs": num_pairs},
            timeout_s=900.0,
            fresh=True,
        )
        difference = largest_difference(ranks)
        if not difference <= feature.tolerance:
            raise RuntimeError(f"{feature.name}: losses differ by {difference:.1e} relative")
        dense_s, own_s = ranks[0].dense_s, slowest_rank([rank.own_s for rank in ranks])
        result.add_row(
            str(len(ranks)),
            feature.name,
            f"{max(rank.held for rank in ranks) / 1024:.0f}",
            f"{max(rank.peak for rank in ranks) / 1024:.0f}",
            f"{Spread.of(dense_s).median * 1e3:.0f}",
            f"{Spread.of(own_s).median * 1e3:.0f}",
            Spread.of([own / one for own, one in zip(own_s, dense_s, strict=True)]).text(digits=2),
            f"{difference:.1e}",
        )
    return result


class InSequence(GPT):
    """The GPT with its blocks in an ``nn.Sequential``, which strategies take apart."""

    def __init__(self, gpt: GPT) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(gpt.__dict__)
        self.blocks = nn.Sequential(*gpt.blocks)  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` to logits ``[B, T, V]``."""
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def measure_dense(workload: Workload) -> RankMemory:
    """Runs in one process: the plain model's memory."""
    torch.set_num_threads(1)
    elsewhere = bytes_of_tensors()
    step = _dense_step(workload)
    for _ in range(WARM_UP_STEPS):
        step()
    return RankMemory(bytes_of_tensors() - elsewhere, peak(step, elsewhere))


def measure_in_ranks(workload: Workload, feature: Feature, num_pairs: int) -> BesideDense:
    """Runs in every rank: counts, then alternates."""
    torch.set_num_threads(1)
    parameters = workload.parameters(feature.stages, "interleaved")
    smp.init({**parameters, "ddp": True, **feature.parameters})
    elsewhere = bytes_of_tensors()
    step = _own_step(workload, feature)
    losses = [step() for _ in range(WARM_UP_STEPS)]
    held_bytes = bytes_of_tensors() - elsewhere
    peak_bytes = peak(lambda: losses.append(step()), elsewhere)

    dense = _dense_step(workload) if smp.rank() == 0 else lambda: 0.0
    return BesideDense(held_bytes, peak_bytes, **alternate(step, dense, losses, num_pairs))


def _own_step(workload: Workload, feature: Feature) -> Callable[[], float]:
    """A step that returns this rank's loss."""
    net = InSequence(workload.model())
    model = smp.DistributedModel(net)
    if feature.stages > 1:
        for index, block in enumerate(net.blocks):
            smp.set_partition(block, workload.stage_of_block(index, feature.stages))
        for module in (net.norm, net.head):
            smp.set_partition(module, feature.stages - 1)
    if feature.strategy is not None:
        smp.set_activation_checkpointing(net.blocks, strategy=feature.strategy)
    adam = torch.optim.AdamW(model.parameters())
    # From a scale at which nothing overflows, so that all train from the first step on.
    optimizer = smp.DistributedOptimizer(
        adam, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**12}
    )
    batch = tuple(part.chunk(smp.dp_size())[smp.dp_rank()] for part in workload.batch())

    def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_byte_loss(model(tokens), targets)

    return step_of(model, optimizer, batch, loss_of)


def _dense_step(workload: Workload) -> Callable[[], float]:
    """The same in plain torch."""
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = workload.batch()
    size = workload.batch_size // workload.num_microbatches

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for inputs, wanted in zip(tokens.split(size), targets.split(size), strict=True):
            loss = next_byte_loss(model(inputs), wanted) / workload.num_microbatches
            loss.backward()
            total += float(loss)
        optimizer.step()
        return total

    return step
