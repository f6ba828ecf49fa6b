"""A partitioned model ready to run: everything between the public API and the executors.

Built once, when the partition is known. It owns the recorder, the step runner, the gradient reduction and
the timeline of one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..alike_between import BetweenSteps
from ..comm.groups.peers import Peers
from ..comm.groups.ranks import Ranks
from ..comm.groups.stage_peers import StagePeers
from ..comm.wires.memory import MemoryWire
from ..comm.wires.wire import Wire
from ..deferred import Waiting
from ..errors import SMPError, SMPTimeout
from ..nn.guarding import plain
from ..plan.order.schedules import Policy
from ..record.code.source_line import warn_once_at_user_line
from ..record.describe.checkpointed_calls import is_marked
from ..record.parameters.placement import Placement
from ..record.parameters.sharing_memory import SharingMemory
from ..record.step.recorder import Recorder
from .choosing import ScheduleChooser
from .graphs.allowed import why_none
from .graphs.stage_graphs import StageGraphs
from .offloading.offload import ActivationOffload, longest_wait
from .reduction.drift import drift_between
from .reduction.reductions import Reductions, broadcast_parameters, rule_of
from .reduction.replicated_gradients import check_replicated_gradients, check_results
from .sharded.parameters import ShardedParameters
from .sharded.units import Sharding, shard
from .stage.executor import StageExecutor
from .stage.failure import error_like, failure_kind
from .stage.gradients import GradientBooks
from .stage.random_streams import RandomStreams
from .step.step_runner import StepRunner
from .weights.deferral import WeightGradients


def _deferred(weights: dict[int, WeightGradients | None], stage: int) -> frozenset[int]:
    """Ids of the parameters of which the stage's backwards leave the gradients for later."""
    found = weights.get(stage)
    return frozenset() if found is None else found.deferred


@dataclass(frozen=True)
class ReductionOptions:
    """The data-parallel options of DistributedModel."""

    overlapping_allreduce: bool = True
    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    backward_passes_per_step: int = 1
    average_grads_across_microbatches: bool = True


_OF_GRADIENTS = frozenset(("backward", "grad", "grad_fn", "register_prehook"))


class Scaling(Protocol):
    """By what losses are multiplied."""

    @property
    def scale(self) -> float:
        """In the backwards of now."""

    def begin(self) -> None:
        """A step begins, or a backward outside of one."""

    def before_backward(self) -> None:
        """A backward starts; raises if it may not."""


class ModelRuntime:
    """Runs steps of one model on this process.

    Args:
        placement: the partition applied to the model.
        peers: the mp group.
        wire: to the other stages; None where this process plays all of them.
        policy: the schedule's.
        ranks: the job's, for reducing gradients; None where this process is alone.
        options: see :class:`ReductionOptions`.
        exchange: gives every dp rank's object to all of them; needed with ``ranks``.
        stage_peers: the ranks that share the stage; None where there are no others.
        sharding: which parameters lie in pieces; None: none.
        activation_horizon: how many actions before their backward offloaded activations come back; None: they
            stay in memory.
        waiting: parameters that have no memory yet, of which this stage's get theirs now; None: all have it.
        chooser: takes the schedule from the policy's hands; None: the policy stays.
        graphs: segments of replayed steps may become graphs of the device.
        between: what the script does between steps.
    """

    def __init__(
        self,
        placement: Placement,
        peers: Peers,
        wire: Wire | None,
        policy: Policy,
        ranks: Ranks | None,
        options: ReductionOptions,
        exchange: Callable[[Any], list[Any]] | None = None,
        stage_peers: StagePeers | None = None,
        sharding: Sharding | None = None,
        activation_horizon: int | None = None,
        waiting: Waiting | None = None,
        chooser: ScheduleChooser | None = None,
        graphs: bool = False,
        between: BetweenSteps | None = None,
    ) -> None:
        self.placement = placement
        self._between = between
        self._chooser = chooser
        self.peers = peers
        self.options = options
        self._exchange = exchange
        self.streams = RandomStreams()
        self.reducer: Reductions | None = None
        self._shared = stage_peers if stage_peers is not None and stage_peers.share_batch else None
        self._checks = False
        self._unchecked_horizon = activation_horizon
        self._watched: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._passes = 0
        # Gradients of sharded parameters do not stay whole from one pass to the next.
        self._passes_per_reduction = 1 if sharding is not None else options.backward_passes_per_step
        self._reduce_now = self._trains = False
        self.scaling: Scaling | None = None  # in fp16, the optimizer's
        sharing = None
        if sharding is not None or len(peers.stages) < placement.num_stages:
            sharing = SharingMemory(placement)
        placement.free_other_stages(peers.stages)
        parameters = self._parameters = self.local_parameters()
        self.sharded: ShardedParameters | None = None
        if waiting is not None and sharding is None:
            waiting.make(parameters)
        placement.move_here()
        parameters = self._parameters = self.local_parameters()
        if ranks is not None:
            if sharding is None:
                broadcast_parameters(parameters, ranks)
            else:
                self.sharded = shard(
                    placement,
                    parameters,
                    sharding,
                    partial(rule_of, ranks=ranks),
                    partial(self._make_whole, placement, waiting, ranks),
                )
            self.reducer = Reductions(
                parameters,
                ranks,
                self.sharded.groups if self.sharded is not None else (),
                bucket_cap_bytes=int(options.bucket_cap_mb * 2**20),
                overlap=options.overlapping_allreduce,
                as_views=options.gradient_as_bucket_view,
                most_elements=sharding.reduced_elements if sharding is not None else None,
            )
            self.reducer.broadcast_buffers(self.local_buffers())
            self.reducer = self.reducer or None
        if sharing is not None:
            sharing.part()
        if waiting is not None:
            waiting.forget()
        on_final = self._on_final if self.reducer is not None else None
        queues: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self.books = {}
        weights: dict[int, WeightGradients | None] = {}
        for stage in sorted(peers.stages):
            books = self.books[stage] = GradientBooks(placement, on_final, partial(_deferred, weights, stage))
            splits = policy.splits_backward or chooser is not None
            if sharding is not None or activation_horizon is not None:
                splits = (
                    False  # gathered copies, and what is hooked to leave memory, are made for one backward
                )
            weights[stage] = (
                WeightGradients(books.touched, placement.alias, keeps_whole=self._looks_at_gradients)
                if splits
                else None
            )
        self.executors = {
            stage: StageExecutor(
                stage,
                placement,
                wire if wire is not None else MemoryWire(stage, queues),
                self.streams,
                before_backward=books.before,
                before_weights=books.before_weights,
                after_backward=books.after,
                on_failure=stage_peers.announce_failure if stage_peers is not None else None,
                sharded=self.sharded,
                offload=None if activation_horizon is None else ActivationOffload(activation_horizon),
                weights=weights[stage],
                graphs=(
                    StageGraphs(
                        stage,
                        placement,
                        why_none(
                            shared=stage_peers is not None,
                            sharded=self.sharded is not None,
                            offloaded=activation_horizon is not None,
                            splits=weights[stage] is not None,
                            wire=wire,
                        ),
                    )
                    if graphs
                    else None
                ),
                goes_on=books.goes_on,
            )
            for stage, books in self.books.items()
        }
        self.runner = StepRunner(
            placement.num_stages,
            peers,
            policy,
            self.executors,
            self.books,
            self.streams,
            stage_peers,
            between,
        )
        self._may_run_ahead = stage_peers is None and sharding is None and activation_horizon is None
        self.recorder = Recorder(placement, self.runner)

    def _looks_at_gradients(self, module: nn.Module) -> bool:
        """Whether code that has run in calls of the module mentions gradients, or nodes of autograd."""
        return self.recorder.descriptions.mentions(module, _OF_GRADIENTS)

    @staticmethod
    def _make_whole(
        placement: Placement, waiting: Waiting | None, ranks: Ranks, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Before they are cut into pieces: they have memory, and are the same on all replicas."""
        if waiting is not None:
            waiting.make(parameters)
            placement.move_here()
        broadcast_parameters(parameters, ranks)

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
        self,
        num_microbatches: int,
        inputs: tuple[int, Callable[[], list[str]]] = (0, list),
        *,
        trains: bool = True,
    ) -> None:
        """Starts a step.

        Args:
            num_microbatches: as in :meth:`StepRunner.begin_step`, like ``inputs``.
            inputs: see there.
            trains: whether it is going to have a backward, as far as is known.
        """
        self._trains = trains
        self._checks = inputs[0] != 0
        if self.reducer is not None:
            if self.options.broadcast_buffers:
                self.reducer.broadcast_buffers(self.local_buffers())
            self.reducer.begin_step()
            if self._passes % self._passes_per_reduction == 0:
                self.reducer.set_aside()
            self._reduce_now = (self._passes + 1) % self._passes_per_reduction == 0
        self._watched = [
            (parameter, plain(parameter).clone())
            for parameter in self._parameters
            if parameter._post_accumulate_grad_hooks and num_microbatches > 1
        ]
        hook = self.reducer is not None and self.reducer.hook is not None
        average = self.options.average_grads_across_microbatches and not hook
        if self.scaling is not None:
            self.scaling.begin()
        loss_scale = 1.0 if self.scaling is None else self.scaling.scale
        scale = loss_scale / num_microbatches if average else loss_scale
        if self._chooser is not None:
            self.runner.planner.use(self._chooser.policy)
        self.runner.drops_with_replicas = self.reducer is not None and trains
        self.runner.may_run_ahead = self._may_run_ahead and self._chooser is None and self.scaling is None
        self.runner.begin_step(self.recorder, num_microbatches, scale, inputs)

    def finish(
        self, outputs: Sequence[tuple[int, int]], *, has_backward: bool, keep_graph: bool
    ) -> list[torch.Tensor]:
        """Executes the step; gradients are reduced when it returns.

        Raises:
            SMPError: the step failed on a rank of the mp group or, if gradients are reduced, of any replica.
        """
        try:
            if has_backward and self.scaling is not None:
                self.scaling.before_backward()
            found = self.runner.finish(outputs, keep_graph=keep_graph)
            self._refuse_changed_parameters()
            if has_backward and self.reducer is not None and not self._reduce_now:
                self.reducer.refuse_more_passes()
        except Exception as error:
            self._join_reduction(error, expected=has_backward)
            raise
        if has_backward:
            self._check_offloading()
            self._passes += 1
            self._reduce(None)
            self._choose()
        if self.reducer is not None:
            self.reducer.put_back(failed=False)
        if has_backward and self._checks and self._shared is not None:
            # Not before: a gradient may be a view of memory that is being reduced.
            own = {self.placement.alias(p) or "": p for p in self._parameters}
            check_replicated_gradients(own, self._shared)
        if self._checks and self._shared is not None:
            check_results(found, self.runner.losses, self._shared)
        return found

    def _choose(self) -> None:
        """Decides on the schedule once enough steps have been seen."""
        if self._chooser is None or self.runner.last_batch is None:
            return
        decision = self._chooser.after_step(self.runner.last_batch, self.runner.spans())
        if decision is not None:
            self._chooser = None
            self.runner.planner.use(decision.policy, decision.graph, decision.costs)
            if self.peers.rank in (-1, 0):
                print(decision.text, flush=True)

    def _check_offloading(self) -> None:
        """Says so where nothing can be offloaded."""
        horizon, batch = self._unchecked_horizon, self.runner.last_batch
        if horizon is None or batch is None:
            return
        self._unchecked_horizon = None  # once is enough
        if not self.recorder.runs and not any(map(is_marked, self.placement.root.modules())):
            warn_once_at_user_line(
                "offload_activations: no module is checkpointed by smp.set_activation_checkpointing or "
                "smp.patches.checkpoint, so nothing leaves memory"
            )
        elif (longest := longest_wait(batch.schedule)) <= horizon + 1:
            lower = f"activation_loading_horizon: {longest - 2:g}, " if longest > 2 else ""
            warn_once_at_user_line(
                f"offload_activations: nothing leaves memory: what would be back within {horizon} actions "
                "(activation_loading_horizon) stays, and in this schedule a backward comes at most "
                f"{longest:g} after its forward: set {lower}pipeline: simple with more microbatches, or more "
                "partitions"
            )

    def _refuse_changed_parameters(self) -> None:
        """A hook on a parameter has seen its gradient, and the parameter is another one: too early."""
        for parameter, before in self._watched:
            if not torch.equal(plain(parameter), before):
                name = self.placement.alias(parameter)
                raise SMPError(
                    f"a hook changed the parameter {name!r} during the backwards of an smp.step, whose other "
                    "microbatches have used it as it was before: change it when the step has returned"
                )

    def abandon(self, error: BaseException) -> None:
        """The step failed before it could be executed to its end."""
        if self.runner.is_open:
            trains = self._trains or self.runner.has_backward
            self.runner.abandon(error)
            # Whether the other replicas come to a backward in this step is not known better.
            self._join_reduction(error, expected=trains)

    def _join_reduction(self, error: BaseException, *, expected: bool) -> None:
        if self.reducer is not None:
            self.reducer.put_back(failed=True)
        if expected and isinstance(error, Exception) and not isinstance(error, SMPTimeout):
            self._reduce(error)

    def _reduce(self, error: Exception | None) -> None:
        """Averages gradients over the replicas, unless the step has failed on one of them."""
        if self.reducer is None:
            return
        if self._reduce_now:
            said = None if self._between is None else self._between.digest(in_stages=False)
            failed = self.reducer.finish(failed=error is not None, said=said)
            if self.reducer.differs:
                self._refuse_drift()
            if not failed:
                return
            self.reducer.put_back(failed=True)
        assert self._exchange is not None
        texts = self._exchange(None if error is None else (self.peers.rank, str(error), failure_kind(error)))
        if all(text is None for text in texts):
            return  # a pass of several, which gradients are added up in
        self._undo_step()
        if error is not None and not isinstance(error, SMPError) and not getattr(error, "__notes__", ()):
            error.add_note("smp: gradients are None on all replicas, those of earlier steps too")
        if error is None:
            rank, text, kind = next(item for item in texts if item is not None)
            raise error_like(
                kind, f"another replica failed, so gradients were not averaged: rank {rank}: {text}"
            )

    def _refuse_drift(self) -> None:
        """Replicas have stepped otherwise: says in what, on all of them.

        Raises:
            SMPMismatch: always.
        """
        assert self.reducer is not None and self._exchange is not None and self._between is not None
        self.reducer.put_back(failed=True)
        names = {id(p): self.placement.alias(p) or "" for p in self._parameters}
        values = [(names[id(p)], bits) for p, bits in self.reducer.few_values()]
        mine = (self.peers.rank, self._between.lines(in_stages=False), values)
        heard = self._exchange(mine)
        self._undo_step()
        raise drift_between(heard)

    def _undo_step(self) -> None:
        """The step has gone well here and failed on another replica, or the other way round: nothing of it
        stays on any, and passes whose gradients are added up begin anew."""
        self.runner.drop_gradients_of(self.placement)
        self.recorder.buffers.restore()
        self._passes -= self._passes % self._passes_per_reduction

    # Backwards outside a step count like those of steps; see .plain_backward.

    @property
    def begins_passes(self) -> bool:
        """Whether the next backward is the first one whose gradients are reduced together."""
        return self._passes % self._passes_per_reduction == 0

    @property
    def reduces_next_pass(self) -> bool:
        """Whether gradients are reduced at the end of the next backward."""
        return (self._passes + 1) % self._passes_per_reduction == 0

    @property
    def splits_backwards(self) -> bool:
        """Whether gradients of parameters may come in actions of their own."""
        return any(executor.weights is not None for executor in self.executors.values())

    @property
    def passes(self) -> int:
        """How many backwards have ended, of steps and outside of them."""
        return self._passes

    def count_pass(self) -> None:
        """A backward has ended."""
        self._passes += 1

    @property
    def gradients_are_averaged(self) -> bool:
        """Whether all replicas hold the same gradients now; what a hook of the user's makes is not known."""
        if self.reducer is None:
            return True
        return self.reducer.hook is None and self._passes % self._passes_per_reduction == 0

    def _on_final(self, parameter: nn.Parameter) -> None:
        if self.reducer is not None and self._reduce_now:
            self.reducer.on_final(parameter)
