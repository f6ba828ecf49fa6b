"""What the SMP API means in one process of plain torch: the yardstick that programs are held against.

A step function runs once for each microbatch, and each ``model.backward(loss)`` is a backward of that loss
divided by the number of microbatches. With several replicas, each is a process of its own, and gradients are
averaged over them when a step ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from smp_lite.record.values.microbatch import Splitter, StepOutput, merge_outputs
from smp_lite.record.values.structure import map_leaves

__all__ = ["Plain"]


class Plain:
    """The API of one session.

    Args:
        microbatches: of each step.
        replica: (rank, size) among the replicas.
        average: sums a tensor over all replicas in place; None where there is one.
    """

    StepOutput = StepOutput

    def __init__(
        self,
        microbatches: int,
        replica: tuple[int, int] = (0, 1),
        average: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.microbatches = microbatches
        self.replica = replica
        self.average = average
        self.wrapped: PlainModel | None = None
        self.amp = torch.amp
        self.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_

    # Model, optimizer, step ---------------------------------------------------------------------------------

    def DistributedModel(self, module: nn.Module, **options: Any) -> PlainModel:
        self.wrapped = PlainModel(module, self)
        return self.wrapped

    def DistributedOptimizer(self, optimizer: Any, **options: Any) -> Any:
        return optimizer

    def step(self, function: Any = None, *, detach_outputs: bool = True, **options: Any) -> Any:
        def decorate(found: Callable[..., Any]) -> Callable[..., Any]:
            splitter = Splitter(found, options.get("non_split_inputs") or (), options.get("input_split_axes"))

            def run(*args: Any, **kwargs: Any) -> Any:
                outputs = []
                self._share_buffers()
                if self.wrapped is not None:
                    self.wrapped.had_backward = False
                for part_args, part_kwargs in splitter.split(splitter.bind(args, kwargs), self.microbatches):
                    result = found(*part_args, **part_kwargs)
                    outputs.append(map_leaves(result, _detached) if detach_outputs else result)
                self._reduce()
                return merge_outputs(outputs)

            return functools.partial(run)  # a callable that a class body does not turn into a method

        return decorate if function is None else decorate(function)

    def _share_buffers(self) -> None:
        """Every step begins with the buffers of the first replica, as DistributedDataParallel has it."""
        if self.average is None or self.wrapped is None:
            return
        for buffer in self.wrapped.buffers():
            if self.replica[0]:
                buffer.zero_()
            self.average(buffer)

    def _reduce(self) -> None:
        if self.average is None or self.wrapped is None or not self.wrapped.had_backward:
            return
        for parameter in self.wrapped.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.replica[1])
                self.average(parameter.grad)

    # Placement: means nothing here --------------------------------------------------------------------------

    @contextlib.contextmanager
    def partition(self, index: int) -> Iterator[None]:
        yield

    def set_partition(self, module: nn.Module, index: int) -> None:
        pass

    @contextlib.contextmanager
    def gathered(self, model: PlainModel, rank: int | None = None) -> Iterator[nn.Module]:
        yield model.module

    # Ranks --------------------------------------------------------------------------------------------------

    def dp_rank(self) -> int:
        return self.replica[0]

    def dp_size(self) -> int:
        return self.replica[1]

    def rank(self) -> int:
        return 0

    def mp_rank(self) -> int:
        return 0

    pp_rank = tp_rank = local_rank = mp_rank

    def mp_size(self) -> int:
        return 1

    pp_size = tp_size = mp_size

    def barrier(self, *args: Any) -> None:
        pass

    def is_initialized(self) -> bool:
        return True


class PlainModel(nn.Module):
    """The wrapped model."""

    def __init__(self, module: nn.Module, session: Plain) -> None:
        super().__init__()
        self.module = module
        self._session = session
        self.had_backward = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        self.had_backward = True
        losses = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
        given = grad_tensors if isinstance(grad_tensors, list | tuple) else [grad_tensors] * len(losses)
        count = self._session.microbatches
        scaled = [
            torch.full_like(loss, 1 / count) if g is None else g / count
            for loss, g in zip(losses, given, strict=True)
        ]
        # The library runs backwards after the function: two of them may share a graph.
        torch.autograd.backward(losses, scaled, retain_graph=True)

    def get_module(self) -> nn.Module:
        return self.module

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> dict[str, Any]:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True, **options: Any) -> Any:
        return self.module.load_state_dict(state, strict)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
