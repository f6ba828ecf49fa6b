"""A partitioned model ready to run: everything between the public API and the executors.

Built once, when the partition is known. It owns the recorder, the step runner, the gradient reduction and
the timeline of one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..comm.peers import Peers
from ..comm.wires import MemoryWire, Wire
from ..plan.schedules import Policy
from ..record.placement import Placement
from ..record.recorder import Recorder
from .executor import StageExecutor
from .gradients import GradientBooks
from .random_streams import RandomStreams
from .reducer import Reducer, broadcast_tensors
from .step_runner import StepRunner


@dataclass(frozen=True)
class ReductionOptions:
    """The data-parallel options of DistributedModel."""

    overlapping_allreduce: bool = True
    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    backward_passes_per_step: int = 1
    average_grads_across_microbatches: bool = True


class ModelRuntime:
    """Runs steps of one model on this process.

    Args:
        placement: the partition applied to the model.
        peers: the mp group.
        wire: to the other stages; None where this process plays all of them.
        policy: the schedule's.
        collectives: over the dp group; None without data parallelism.
        options: see :class:`ReductionOptions`.
    """

    def __init__(
        self,
        placement: Placement,
        peers: Peers,
        wire: Wire | None,
        policy: Policy,
        collectives: Collectives | None,
        options: ReductionOptions,
    ) -> None:
        self.placement = placement
        self.peers = peers
        self.options = options
        self.collectives = collectives
        self.streams = RandomStreams()
        self.reducer: Reducer | None = None
        self._passes = 0
        self._reduce_now = False
        placement.free_other_stages(peers.stages)
        parameters = self.local_parameters()
        if collectives is not None and collectives.size > 1:
            self.reducer = Reducer(
                parameters,
                collectives,
                bucket_cap_bytes=int(options.bucket_cap_mb * 2**20),
                overlap=options.overlapping_allreduce,
                as_views=options.gradient_as_bucket_view,
            )
            broadcast_tensors([*parameters, *self.local_buffers()], collectives, "the initial parameters")
        on_final = self._on_final if self.reducer is not None else None
        queues: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self.books = {stage: GradientBooks(placement, on_final) for stage in sorted(peers.stages)}
        self.executors = {
            stage: StageExecutor(
                stage,
                placement,
                wire if wire is not None else MemoryWire(stage, queues),
                self.streams,
                before_backward=books.before,
                after_backward=books.after,
            )
            for stage, books in self.books.items()
        }
        self.runner = StepRunner(
            placement.num_stages, peers, policy, self.executors, self.books, self.streams
        )
        self.recorder = Recorder(placement, self.runner)

    def local_parameters(self) -> list[nn.Parameter]:
        """Parameters of the stages played here, in the model's order."""
        return [
            parameter for name, parameter in self.placement.root.named_parameters() if self.is_local(name)
        ]

    def is_local(self, name: str) -> bool:
        """Whether the parameter of that name belongs to a stage played here."""
        return self.placement.parameter_stage[name] in self.peers.stages

    def local_buffers(self) -> list[torch.Tensor]:
        return [buffer for _, buffer in self.placement.local_buffers(self.peers.stages)]

    def begin_step(
        self, num_microbatches: int, inputs: tuple[int, Callable[[], list[str]]] = (0, list)
    ) -> None:
        """Starts a step; ``inputs`` as in :meth:`StepRunner.begin_step`."""
        if (
            self.collectives is not None
            and self.collectives.size > 1
            and self.options.broadcast_buffers
            and self.placement.root.training
        ):
            broadcast_tensors(self.local_buffers(), self.collectives, "buffers")
        if self.reducer is not None:
            self.reducer.begin_step()
            self._reduce_now = (self._passes + 1) % self.options.backward_passes_per_step == 0
        hook = self.reducer is not None and self.reducer.hook is not None
        average = self.options.average_grads_across_microbatches and not hook
        self.runner.begin_step(self.recorder, 1.0 / num_microbatches if average else 1.0, inputs)

    def finish(
        self, outputs: Sequence[tuple[int, int]], *, has_backward: bool, keep_graph: bool
    ) -> list[torch.Tensor]:
        """Executes the step; gradients are reduced when it returns."""
        found = self.runner.finish(outputs, keep_graph=keep_graph)
        if has_backward:
            self._passes += 1
            if self.reducer is not None and self._reduce_now:
                self.reducer.finish()
        return found

    @property
    def gradients_are_averaged(self) -> bool:
        """Whether all replicas hold the same gradients now; what a hook of the user's makes is not known."""
        if self.collectives is None or self.collectives.size == 1:
            return True
        assert self.reducer is not None
        return self.reducer.hook is None and self._passes % self.options.backward_passes_per_step == 0

    def streams_drew(self) -> bool:
        """Whether the replicated random stream has moved since the step began."""
        return self.runner.drew()

    def _on_final(self, parameter: nn.Parameter) -> None:
        if self.reducer is not None and self._reduce_now:
            self.reducer.on_final(parameter)
