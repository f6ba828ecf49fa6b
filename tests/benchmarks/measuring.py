"""What the benchmarks measure in a rank: seconds of steps, and bytes of tensors."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from mpi4py import MPI
from torch import Tensor, nn

from smp_lite.runtime.step.step_runner import StepRunner
from tests.allocated import memory_profile, most_and_left

__all__ = ["bytes_held", "bytes_of_tensors", "on_first_rank", "peak", "recorded_first", "timed"]

_ASLEEP_S = 1e-3


def recorded_first() -> contextlib.AbstractContextManager[Any]:
    """Within: a step is recorded to its end before it runs, so that the two can be told apart."""
    return mock.patch.object(StepRunner, "_start_ahead")


def timed(step: Callable[[], Any]) -> float:
    """Seconds of a step that all ranks begin together."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def on_first_rank(step: Callable[[], Any]) -> float:
    """Seconds of a step of rank 0 alone. The others sleep: where MPI waits, it takes a core."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    if MPI.COMM_WORLD.Get_rank() == 0:
        step()
    took = time.perf_counter() - start
    everybody = MPI.COMM_WORLD.Ibarrier()
    while not everybody.Test():
        time.sleep(_ASLEEP_S)
    return took


def bytes_held(parameters: Iterable[Tensor], state: dict[str, Any]) -> int:
    """Of parameters, their gradients, and the optimizer's state."""
    parameters = list(parameters)
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    tensors += [value for own in state["state"].values() for value in own.values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def peak(step: Callable[[], Any], elsewhere: int) -> int:
    """Bytes of tensors at the peak of a step, above those of the process before the model was made."""
    at_start = bytes_of_tensors() - elsewhere
    with memory_profile() as profile:
        step()
    return at_start + most_and_left(profile)[0]


def bytes_of_tensors() -> int:
    """Of all in this process."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in found if tensor.layout is torch.strided]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values())
