"""Each session left its fake tensors behind: 170 of them for a small GPT, for as long as the process lived.

The fake run counted what backward keeps by saved-tensor hooks that returned the tensor they were given. An
operator that saves its own output then holds itself through its graph, a circle that runs through C++, where
Python's collector does not look.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import smp_lite as smp


def _one_session() -> None:
    smp.reset()
    smp.init_in_memory({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softmax(-1), nn.Linear(4, 1)))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> Any:
        loss = model(x).tanh().sum()
        model.backward(loss)
        return loss

    step(model, torch.ones(4, 4))
    smp.reset()


@pytest.mark.ci
def test_a_finished_session_leaves_no_fake_tensors() -> None:
    _one_session()
    gc.collect()
    before = sum(isinstance(found, FakeTensor) for found in gc.get_objects())
    _one_session()
    gc.collect()
    assert sum(isinstance(found, FakeTensor) for found in gc.get_objects()) <= before
