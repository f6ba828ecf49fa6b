"""Replicas partitioned differently now and then, and averaged gradients of different parameters.

The trace told storages apart by their addresses without keeping them alive, so a freed one's address counted
for another, and the activation bytes, and with them the partition, changed from process to process.
"""

from __future__ import annotations

import gc

import pytest
import torch

from smp_lite.record.describe.metadata import MetadataInference
from smp_lite.record.describe.tracing import ModuleTrace, trace_model
from tests.harness import run_distributed
from tests.models import CASES


def _kept_bytes(trace: ModuleTrace) -> dict[str, int]:
    return {name: tally.kept_bytes for name, tally in trace.tallies.items()}


@pytest.mark.slow
def test_a_trace_counts_the_same_bytes_every_time() -> None:
    case = CASES["batchnorm"]
    model = case.build()
    x = case.batch(8)["x"]
    found = []
    ballast = []
    for size in range(12):
        found.append(_kept_bytes(trace_model(model, (x,), {}, MetadataInference())))
        ballast.append([torch.empty(16 * size + 1) for _ in range(50)])  # other addresses next time
        gc.collect()
    assert all(bytes_ == found[0] for bytes_ in found)


@pytest.mark.ci
def test_measured_times_cut_all_replicas_alike() -> None:
    stages = run_distributed(
        "tests.regress.cases:partition_by_times",
        4,
        parameters={"partitions": 2, "ddp": True, "memory_weight": 0.0},
    )
    assert all(found == stages[0] for found in stages)
