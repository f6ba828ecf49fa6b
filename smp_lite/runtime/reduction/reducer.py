"""Averages gradients over the data-parallel group while backward still runs.

Parameters are gathered into buckets in the reverse of their order in the model, about the order in which
their gradients become whole (Li et al. 2020, "PyTorch Distributed"). A bucket's sum is started as soon as
all its gradients are there and the buckets before it are under way; the order is the same on all ranks
whatever each of them runs. At the end the ranks also sum which parameters got a gradient at all: one that
nobody used keeps ``grad = None``, and one that only some used counts as zero on the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...comm.collectives import Collectives, Pending
from ...comm.layout import shaped_like, sum_of_bits
from ...comm.waiting import wait_until
from ...devices import CPU, is_host
from ...errors import SMPError, SMPMismatch
from ...nn.guarding import plain
from ...record.values.memory import place_of

_STEPS_MODULO = 1_000_003  # a sum of as many replicas as there are stays exact
_FEW, _SMALL = 8, 4096  # parameters that are compared, and their elements at most
_LOOK_EVERY = 100

Hook = Callable[[Any, "GradBucket"], "torch.futures.Future[torch.Tensor]"]


class GradBucket:
    """What a communication hook sees; the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, index: int, flat: torch.Tensor, bucket: _Bucket, is_last: bool) -> None:
        self._index, self._flat, self._bucket, self._is_last = index, flat, bucket, is_last

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, one after another, one-dimensional."""
        return self._flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        return self._bucket.views(self._flat)

    def parameters(self) -> list[nn.Parameter]:
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        return self._is_last


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    waiting: set[int] = field(default_factory=set)
    flat: torch.Tensor | None = None
    pending: Pending | None = None
    future: Any = None

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        return [
            shaped_like(part, parameter)
            for part, parameter in zip(flat.split(sizes), self.parameters, strict=True)
        ]


class Reducer:
    """Reduces the gradients of one stage's parameters.

    Args:
        parameters: in the model's order, the same on all members.
        collectives: over the group.
        divisor: of the sum; the number of batches in it.
        bucket_cap_bytes: a bucket is closed when it reaches this.
        overlap: start buckets during backward; else all at the end.
        as_views: afterwards ``parameter.grad`` are views of the buckets, which saves one copy of them.
        members: numbers in the job of the group's ranks, for errors.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        collectives: Collectives,
        *,
        divisor: int,
        bucket_cap_bytes: int,
        overlap: bool,
        as_views: bool,
        members: Sequence[int] = (),
    ) -> None:
        self.collectives = collectives
        self._members = tuple(members)
        self.divisor = divisor
        self.overlap = overlap
        self.as_views = as_views
        self.hook: tuple[Any, Hook] | None = None
        self.started_in_backward = 0  # buckets of the last step that overlapped; for tests and reports
        self._buckets = _buckets(parameters, bucket_cap_bytes)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0
        self._steps = 0
        self.differs = False  # whether members have stepped otherwise, as the last finish() found
        trained = [p for p in parameters if p.requires_grad and p.numel() <= _SMALL]
        self._few = sorted(trained, key=lambda p: p.numel())[:_FEW]

    def begin_step(self) -> None:
        self._steps += 1
        self._next = 0
        self.started_in_backward = 0
        for bucket in self._buckets:
            bucket.waiting = {id(parameter) for parameter in bucket.parameters}
            bucket.pending = bucket.future = None

    def on_final(self, parameter: nn.Parameter) -> None:
        """The parameter's gradient is whole for this step."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or not self.overlap:
            return
        bucket.waiting.discard(id(parameter))
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._start()
            self.started_in_backward += 1

    def few_values(self) -> list[tuple[nn.Parameter, int]]:
        """A few small parameters, which must be the same on all members, and the sums of their bits."""
        return [(parameter, sum_of_bits(plain(parameter))) for parameter in self._few]

    def _state(self, said: int) -> int:
        """A number of 20 bits for what must be the same on all members when they reduce."""
        # To read a device's numbers its host has to wait: now and then.
        is_near = all(is_host(parameter.device) for parameter in self._few)
        is_looked_at = is_near or self._steps % _LOOK_EVERY in (1, 2, 3)
        values = [bits for _, bits in self.few_values()] if is_looked_at and self.hook is None else []
        return zlib.crc32(repr((said, values)).encode()) & 0xFFFFF

    def finish(self, *, failed: bool = False, said: int | None = None) -> bool:
        """Starts what has not been, waits for all, and puts the averages in place.

        Args:
            failed: the step has failed here; the other members must not wait in vain.
            said: what the script has done between steps; ``differs`` tells afterwards whether that, or one of
                a few small parameters, is not the same on all members. None: they are not compared.

        Returns:
            Whether the step has failed on any member; then gradients are not to be used.

        Raises:
            SMPMismatch: the members are at different steps.
        """
        state = 0 if said is None else self._state(said)
        used = torch.tensor(
            [
                *[float(p.grad is not None) for bucket in self._buckets for p in bucket.parameters],
                float(failed),
                float(self._steps % _STEPS_MODULO),
                float(state),
                float(state * state),
            ],
            dtype=torch.float64,
            device=CPU,
        )
        while self._next < len(self._buckets):
            self._start()
        pending_use = self.collectives.all_reduce(used)
        for number, bucket in enumerate(self._buckets):
            self._wait(bucket, number)
        self._wait_until(pending_use.done, "agree on which parameters were used")
        *numbers, num_failed, steps, states, squares = used.tolist()
        if steps != self.collectives.size * (self._steps % _STEPS_MODULO):
            raise SMPMismatch(
                "the replicas are at different steps: one of them left out a step that the others made, or "
                "failed in one and went on. All replicas must call the same step functions equally often"
            )
        # That the mean of the squares is the square of the mean is so on all members, or on none.
        self.differs = not num_failed and self.collectives.size * int(squares) != int(states) ** 2
        if num_failed:
            return True
        flags = iter(numbers)
        for bucket in self._buckets:
            self._put_in_place(bucket, [bool(next(flags)) for _ in bucket.parameters])
            if not self.as_views:
                bucket.flat = None
        return False

    def _put_in_place(self, bucket: _Bucket, used: Sequence[bool]) -> None:
        """Gives each parameter its mean; None where nobody had a gradient."""
        assert bucket.flat is not None
        for parameter, view, was_used in zip(bucket.parameters, bucket.views(bucket.flat), used, strict=True):
            if not was_used:
                parameter.grad = None
            elif self.as_views:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    @torch.no_grad()
    def _start(self) -> None:
        bucket = self._buckets[self._next]
        for parameter in bucket.parameters:
            refuse_sparse(parameter)
        parts = [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for parameter in bucket.parameters
        ]
        flat = bucket.flat
        if flat is None or not self.as_views:
            flat = torch.empty(
                sum(p.numel() for p in bucket.parameters),
                dtype=parts[0].dtype,
                device=parts[0].device,
            )
        for view, part in zip(bucket.views(flat), parts, strict=True):
            if place_of(view) != place_of(part):
                view.copy_(part)
        bucket.flat = flat
        if self.hook is not None:
            state, function = self.hook
            is_last = self._next == len(self._buckets) - 1
            bucket.future = function(state, GradBucket(self._next, flat, bucket, is_last))
            if not isinstance(bucket.future, torch._C.Future):  # the base of torch.futures.Future
                raise SMPError(
                    f"the communication hook returned {type(bucket.future).__name__}: it must return a "
                    "torch.futures.Future of the reduced bucket"
                )
        else:
            flat.div_(self.divisor)
            bucket.pending = self.collectives.all_reduce(flat)
        self._next += 1

    def _wait_until(self, test: Callable[[], bool], what: str) -> None:
        others = ", ".join(map(str, self._members)) or "of the dp group"
        wait_until(
            test,
            lambda: (
                f"not all of the ranks {others} came to {what}. All replicas must run equally many steps: "
                "give each as many batches (a DistributedSampler does, with drop_last=True)"
            ),
            lambda: self._members,
        )

    def _wait(self, bucket: _Bucket, number: int) -> None:
        what = f"reduce gradient bucket {number} of {len(self._buckets)}"
        if bucket.pending is not None:
            self._wait_until(bucket.pending.done, what)
        elif bucket.future is not None:
            self._wait_until(bucket.future.done, what)
            result = bucket.future.wait()
            assert bucket.flat is not None
            value = result[0] if isinstance(result, list | tuple) else result
            if place_of(value) != place_of(bucket.flat):
                bucket.flat.copy_(value)
        bucket.pending = bucket.future = None  # with the memory that they hold


def refuse_sparse(parameter: nn.Parameter) -> None:
    """Raises SMPError where a gradient is sparse: parts of it cannot be summed one by one."""
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise SMPError(
            f"the gradient of a parameter of shape {list(parameter.grad.shape)} is sparse, and is not "
            "averaged over replicas: build the embedding with sparse=False"
        )


def _buckets(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    open_bucket: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        kind = (parameter.dtype, parameter.device)
        bucket, size = open_bucket.get(kind, (None, 0))
        if bucket is None or size >= cap_bytes:
            bucket, size = _Bucket([]), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        open_bucket[kind] = (bucket, size + parameter.numel() * parameter.element_size())
    return buckets


def broadcast_tensors(tensors: Iterable[torch.Tensor], collectives: Collectives, what: str) -> None:
    """Overwrites tensors with group rank 0's, all of one dtype in one message."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in by_kind.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        if not flat.numel():
            continue
        row = flat.view(torch.uint8)  # bytes: process groups do not know every dtype
        pending = collectives.broadcast(row)
        wait_until(pending.done, lambda: f"{what} from dp rank 0 did not arrive")
        with torch.no_grad():
            for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.copy_(part.view(tensor.shape))
