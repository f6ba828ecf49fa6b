"""How the partition of a real model is decided: traced, timed, stored, by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp


class _Uneven(nn.Module):
    """Six blocks of equal parameters; block 0 runs five times, so it computes most."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x).tanh()
        return x


def _run(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> dict[str, int]:
    wrapped = smp.DistributedModel(model, **options)

    @smp.step
    def step(wrapped: Any, *inputs: torch.Tensor) -> Any:
        loss = wrapped(*inputs).float().sum()
        wrapped.backward(loss)
        return loss

    step(wrapped, *inputs)
    return dict(wrapped.partition.stage_of)


def _blocks(stage_of: dict[str, int], num: int = 6) -> list[int]:
    return [stage_of[f"blocks.{i}"] for i in range(num)]


def test_computation_alone_isolates_the_block_that_runs_often() -> None:
    smp.init_in_memory({"partitions": 2, "memory_weight": 0.0})
    assert _blocks(_run(_Uneven(), torch.ones(256, 64))) == [0, 1, 1, 1, 1, 1]


class _Slow(nn.Linear):
    """Takes long without computing, which only a clock sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return super().forward(x)


def test_measured_times_isolate_the_block_that_takes_long() -> None:
    smp.init_in_memory({"partitions": 2, "memory_weight": 0.0})
    model = nn.Sequential(_Slow(64, 64), *(nn.Linear(64, 64) for _ in range(5)))
    stage_of = _run(model, torch.ones(8, 64), trace_execution_times=True)
    assert [stage_of[str(i)] for i in range(6)] == [0, 1, 1, 1, 1, 1]


def test_skip_tracing_goes_by_parameters() -> None:
    smp.init_in_memory({"partitions": 2, "memory_weight": 0.0, "skip_tracing": True})
    assert _blocks(_run(_Uneven(), torch.ones(8, 64))) == [0, 0, 0, 1, 1, 1]


def test_a_model_that_looks_at_data_is_traced_for_real() -> None:
    class Looks(_Uneven):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            if x.sum().item() > -1e9:
                x = super().forward(x)
            return x

    smp.init_in_memory({"partitions": 2, "memory_weight": 0.0})
    model = Looks()
    plain_norm = nn.BatchNorm1d(64)
    before = torch.default_generator.get_state()
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    assert _blocks(_run(model, x))[1:] == [1] * 5
    # The trial run left no trace: one forward's statistics, and no random number drawn.
    plain_norm(x)
    assert torch.equal(model.norm.running_mean, plain_norm.running_mean)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_stored_partition_is_used_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "partition.json"
    smp.init_in_memory({"partitions": 2, "memory_weight": 0.0, "partition_file": str(file)})
    decided = _run(_Uneven(), torch.ones(256, 64))
    smp.reset()
    smp.init_in_memory(
        {"partitions": 2, "memory_weight": 1.0, "partition_file": str(file), "load_partition": True}
    )
    assert _run(_Uneven(), torch.ones(256, 64)) == decided
    smp.reset()
    smp.init_in_memory({"partitions": 2, "partition_file": str(file), "load_partition": True})
    with pytest.raises(ValueError, match="blocks"):
        _run(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.ones(8, 64))
    smp.reset()
    smp.init_in_memory({"partitions": 3, "partition_file": str(file), "load_partition": True})
    with pytest.raises(smp.SMPError, match="2 partitions"):
        _run(_Uneven(), torch.ones(8, 64))


def test_modules_with_backward_hooks_stay_whole() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Pair(), Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    calls = []
    model = Two()
    model.first.register_full_backward_hook(lambda *args: calls.append(args))
    smp.init_in_memory({"partitions": 3, "microbatches": 2})
    stage_of = _run(model, torch.ones(8, 64))
    assert stage_of["first.a"] == stage_of["first.b"]
    assert stage_of["second.a"] != stage_of["second.b"]
    assert len(calls) == 2
