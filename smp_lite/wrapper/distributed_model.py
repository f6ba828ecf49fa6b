"""``smp.DistributedModel``: the user's model, cut over the stages.

Follows the SMP API reference ("smdistributed.modelparallel.torch.DistributedModel"). The wrapped module is
not rewritten. Until the first step every rank holds all of it; then it is partitioned, each rank keeps its
own stage's parameters, and those of other stages become away (:mod:`smp_lite.record.parameters.away`).
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import session as session_module
from ..devices import check_current, is_host
from ..errors import SMPError
from ..nn.distributed.base import note_places
from ..nn.part_guard import PartGuard, is_guarded
from ..optim.half.types import half_type
from ..optim.state.own_parameters import OwnParameters
from ..plan.partitioning.partition import ModuleCost, Partition
from ..record.parameters.placement import Placement
from ..record.parameters.sharing_memory import refuse_parted
from ..record.state.ambient import refuse_transformations
from ..record.values.inputs import inputs_here
from ..runtime.graphs.stage_graphs import are_wanted
from ..runtime.model_runtime import ModelRuntime, ReductionOptions
from ..smp_v1 import cuda_as_cpu
from ..steps.step_timeline import StepTimeline
from ..tensor_parallel.applying_plan import apply_plan
from ..tensor_parallel.by_hand import refuse_exchanged
from ..tensor_parallel.fast_paths import keep_from_fast_paths
from ..tensor_parallel.replacement import replace_marked, translations
from ..tensor_parallel.splitting import refuse_own_batches
from .activation_checkpointing import check_marked, group_marked
from .cutting.delayed import begin_without_data, lacks, prepare_delayed
from .cutting.first_meeting import FirstMeeting
from .cutting.lazy_modules import has_lazy_modules, initialise_lazy_modules
from .cutting.partitioning import decide_partition, load_partition, report_partition
from .cutting.same_weights import compare_parts, share_stages, take_over_first
from .cutting.schedules import Schedules, first_policy, schedule_chooser
from .cutting.sharding import announce_slices, own_memory, sharding_of
from .half_precision import HalfPrecision, check_cast
from .hops import end_hops
from .outside_step import OutsideStep
from .state.model_with_state import ModelWithState

if TYPE_CHECKING:
    from ..steps.step_context import StepContext

Hook = Callable[["DistributedModel", Any], None]


class DistributedModel(ModelWithState):
    """Wraps the model of the job; one for each script.

    Args:
        module: any eager ``nn.Module``, built alike on all ranks. Modules in it that are marked for tensor
            parallelism are replaced in it; where it is replaced itself, ``model.module`` is the new one.
        trace_device: accepted for SMP scripts ("cpu" or "gpu"); tracing runs on fake tensors.
        trace_execution_times: partition by measured times instead of flops.
        overlapping_allreduce: start the data-parallel reduction while backward still runs; None: as the
            parameter of that name says, which is True by default.
        backward_passes_per_step: reduce only in every n-th step; gradients of the others add up (a sum).
        average_grads_across_microbatches: mean over microbatches; False: sum.
        bucket_cap_mb: size of a reduction bucket in MiB.
        trace_memory_usage: accepted; memory is always counted.
        broadcast_buffers: send dp rank 0's buffers to its group before each step, as DDP does.
        gradient_as_bucket_view: let ``.grad`` be views of the reduction's buckets.
        find_unused_parameters: accepted; unused parameters are always found.

    Raises:
        SMPError: ``smp.init()`` was not called, there is a DistributedModel already, or the module is one.
        TypeError: it is no module.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool | None = None,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        session = session_module.current()
        _check_wrapping(session, module)
        if trace_device not in ("cpu", "gpu"):
            raise ValueError(f"trace_device must be 'cpu' or 'gpu', got {trace_device!r}")
        if backward_passes_per_step < 1:
            raise ValueError(
                f"backward_passes_per_step must be a positive integer, got {backward_passes_per_step}"
            )
        refuse_exchanged(module)
        self._was_meta = begin_without_data(session, module)
        if share_stages(session):  # or the ranks would cut parts of different models
            take_over_first(session, module)
        apply_plan(session, module)
        module, self._replaced = replace_marked(session, module)
        refuse_own_batches(session, module)
        keep_from_fast_paths(module)
        note_places(module)
        if (translated := translations(self._replaced)) is not None:
            session.module_manager.translate_functions.append(translated)
        self._half = HalfPrecision.if_asked(session, module)
        self.module = module
        if (take_back := end_hops(module)) is not None:
            session.overrides.callback(take_back)
        self._options = ReductionOptions(
            overlapping_allreduce=(
                session.cfg.overlapping_allreduce if overlapping_allreduce is None else overlapping_allreduce
            ),
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            backward_passes_per_step=backward_passes_per_step,
            average_grads_across_microbatches=average_grads_across_microbatches,
        )
        self._measure_times = trace_execution_times
        self._session = session
        self._runtime: ModelRuntime | None = None
        in_stages = session.world is not None and session.num_stages > 1
        share = "PP" if session.has_own_batches else "MP"
        self._meeting = FirstMeeting(session.world, share) if in_stages else None
        self._has_met = False  # in the step that runs, if the model is not cut yet
        self._parts_checked = False  # once, at the first call
        self._outside: OutsideStep | None = None  # a step; with one partition
        self._guard: PartGuard | None = None  # of split layers
        self._frozen: list[tuple[str, nn.Parameter]] = []  # at partition, and where there are replicas
        self.own_parameters: OwnParameters | None = None  # after partition
        self._partition: tuple[Partition, ModuleCost] | None = None
        self._stored_partition: Partition | None = None
        self.schedules: Schedules | None = None  # of pipeline auto, and where memory is limited
        self._post_partition_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._steps_done = 0
        self.is_gathered = False  # whether smp.gathered() holds the whole model now
        self._timeline: StepTimeline | None = None
        self._comm_hook: tuple[Any, Any] | None = None
        session.model = self
        session.between_steps.is_training = lambda: module.training
        # Sharded parameters stay whole until then, for groups by dimensions and for initialisation.
        announce_slices(session, module)
        waits = bool(session.shard_axes) or has_lazy_modules(module) or (self._was_meta and lacks(module))
        if session.num_stages == 1 and not waits:
            self._partition_now(None)
        if any(map(is_guarded, module.parameters())):
            self._guard = PartGuard(module)
            session.overrides.callback(self._guard.end)

    def __getattr__(self, name: str) -> Any:
        if name == "no_sync":
            raise AttributeError(
                "DistributedModel has no no_sync(): leave it out. Several backwards may add up before "
                "optimizer.step(); each is reduced when backward() returns, and they come to the same sum. "
                "backward_passes_per_step=n reduces in every n-th only"
            )
        return super().__getattr__(name)

    # Running ------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module; over several partitions only inside a function decorated with
        ``@smp.step``.

        In one partition it may be called in a plain loop. Then it computes the whole batch at once, and
        ``loss.backward()`` reduces gradients over the replicas before it returns, each time; it is collective
        over all ranks. Evaluation without gradients is, over replicas, each rank's own business.

        Raises:
            SMPError: outside a step over several partitions.
            SMPMismatch: outside a step, ranks that share a stage call it with different things.
        """
        context = self._session.step
        if context is None and self.is_gathered:
            return self._called(args, kwargs)
        if context is None:
            return self._call_outside(args, kwargs)
        if context.runs_plainly:
            return self._called(args, kwargs)
        refuse_transformations()
        if self._runtime is None:
            self._partition_now((args, kwargs))
        if context.runtime is None:
            assert self._runtime is not None
            context.start_recording(self._runtime)
        return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._half is None:
            return self.module(*args, **kwargs)
        args, kwargs = self._half.cast_inputs(args, kwargs)
        return self._half.cast_outputs(self.module(*args, **kwargs))

    def _call_outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._session.num_stages > 1:
            raise SMPError(
                "the DistributedModel was called outside a function decorated with @smp.step: "
                "move the call into one (for evaluation too; use model.eval() and torch.no_grad() around it)"
            )
        check_current()
        self._check_parts()
        args, kwargs = inputs_here((args, kwargs))
        if self._runtime is None:
            self._partition_now((args, kwargs))
        assert self._outside is not None
        with self.parts_as_ordinary():
            if self._half is None:
                return self._outside.call(args, kwargs)
            self._half.watch(self.module)
            args, kwargs = self._half.cast_inputs(args, kwargs)
            return self._half.cast_outputs(self._outside.call(args, kwargs))

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Backward of a loss; over several partitions only inside a function decorated with ``@smp.step``.

        Outside, it is ``torch.autograd.backward``. In fp16 the loss is multiplied by the loss scale.

        Args:
            tensors: a loss of one element, or a list of tensors with ``grad_tensors``.
            grad_tensors: gradients to start from; None: ones.

        Raises:
            SMPError: called outside a step over several partitions, or the loss depends on no parameter.
        """
        context = self._session.step
        if context is None and self._outside is not None:
            if self._half is not None:
                self._half.backward(tensors, grad_tensors)
            else:
                torch.autograd.backward(tensors, grad_tensors)
            return
        if context is None:
            raise SMPError(
                "model.backward() was called outside a function decorated with @smp.step: "
                "call it in the function that computes the loss"
            )
        if context.runtime is None and not context.runs_plainly:
            raise SMPError(
                "model.backward(): the loss does not depend on any parameter of the model: the "
                "DistributedModel was not called in this step. Call it in the first step at least, not only "
                "modules inside it"
            )
        if self._half is not None and not context.runs_plainly:
            self._half.before_backward()
        context.recorder.backward(tensors, grad_tensors)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; parameters of other stages count as well."""
        if set_to_none and self._session.step is None:
            with torch._C.DisableTorchFunctionSubclass():  # those would ask Python, twice each
                super().zero_grad()
        else:
            super().zero_grad(set_to_none)

    def before_step(self) -> None:
        """Ends what :meth:`cpu` began, and a backward that failed outside a step; called by every step.

        Raises:
            SMPError: a parameter trains now that did not when reductions over replicas were set up.
        """
        self.put_away()
        self._check_parts()
        self._has_met = False
        check_current()
        if self._outside is not None:
            self._outside.settle()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise SMPError(
                    f"the parameter {name!r} was frozen when reductions were set up, so its gradient would "
                    "not be reduced over the replicas: set requires_grad before smp.DistributedModel, and "
                    "freeze it after the first step"
                )

    def _check_parts(self) -> None:
        """What a script may have exchanged, or written, since the model was wrapped, once.

        Raises:
            SMPError: a parameter that was split; or parts of it.
        """
        if not self._parts_checked:
            refuse_exchanged(self.module)
            self._parts_checked = True
            if self._runtime is not None:  # else the ranks will meet when the model is cut
                compare_parts(self._session, self.module)

    def after_step(self, context: StepContext) -> None:
        """Hooks that wait for the end of the first step."""
        if context.runtime is not None:
            if self._timeline is not None:
                self._timeline.add_step(self._steps_done, context.runtime.runner)
            self._steps_done += 1
            if self._steps_done == 1:
                for hook in list(self._post_step_hooks.values()):
                    hook(self, self._session.optimizer)

    # Partition ----------------------------------------------------------------------------------------------

    @property
    def partitioned(self) -> bool:
        """Whether the model has been cut; False until the first step (with one partition: at once)."""
        return self._runtime is not None

    @property
    def runtime(self) -> ModelRuntime | None:
        return self._runtime

    @property
    def partition(self) -> Partition:
        """Which stage each module is on; after the first step."""
        return self.partition_and_costs[0]

    @property
    def partition_and_costs(self) -> tuple[Partition, ModuleCost]:
        """The partition with the costs that it was made from."""
        if self._partition is None:
            raise SMPError("the model is not partitioned yet: run a step first")
        return self._partition

    def parts_as_ordinary(self) -> contextlib.AbstractContextManager[None]:
        """Within: parameters of split layers are of torch's own types, as in a step."""
        return contextlib.nullcontext() if self._guard is None else self._guard.ordinary()

    def parts_as_between_steps(self) -> contextlib.AbstractContextManager[None]:
        """Within: they are guarded, as a script's own code finds them."""
        return contextlib.nullcontext() if self._guard is None else self._guard.between()

    def _partition_now(self, example: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        """Cuts the model; collective over all ranks."""
        with self.parts_as_ordinary():
            self._meet_and_cut(example)

    def _meet_and_cut(self, example: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        if self._meeting is None:
            self._cut(example)
            return
        self._has_met = True
        self._meeting.come()
        try:
            self._cut(example)
        except Exception as error:
            self._meeting.fail(error)
            raise
        self._meeting.come()

    def failed_before_partition(self, error: BaseException) -> None:
        """The step that runs has failed before its first call of the model: tells the other ranks."""
        if self._meeting is not None and self._runtime is None and not self._has_met:
            self._meeting.fail(error)

    def _cut(self, example: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        session = self._session
        self.end_waiting()
        for optimizer in session.optimizers:
            optimizer.before_partition()
        if example is not None and self._half is not None:
            example = self._half.cast_inputs(*example)
        loaded = {key for state, _ in self._pending_state for key in state} if self._was_meta else None
        waiting = prepare_delayed(session, self.module, measures=self._measure_times, loaded=loaded)
        if example is not None:
            initialise_lazy_modules(self.module, *example)
        take_over_first(session, self.module)
        peers = session.peers()
        partition, costs, self.schedules = decide_partition(
            session,
            self.module,
            example,
            peers,
            measure_times=self._measure_times,
            stored=self._stored_partition,
        )
        self._partition = partition, costs
        if session.num_stages > 1 and session.rank == 0:
            print(report_partition(session, partition, costs), flush=True)
        sharding = sharding_of(session, self.module)
        units = sharding.units if sharding is not None else None
        placement = Placement(self.module, partition.stage_of, session.num_stages, units)
        refuse_parted(placement, own_memory(session, placement))
        check_marked(placement, may_warn=session.cfg.auto_partition)
        self.own_parameters = OwnParameters(placement, peers.stages)
        self._runtime = ModelRuntime(
            placement,
            peers,
            session.wire(),
            first_policy(session, self.schedules),
            session.ranks(),
            self._options,
            session.exchange_over_replicas,
            session.stage_peers if session.stage_peers and not session.stage_peers.is_alone else None,
            sharding,
            session.cfg.activation_loading_horizon if session.cfg.offload_activations else None,
            waiting,
            schedule_chooser(session, self.schedules),
            graphs=session.cfg.static_mode and are_wanted() and session.on_planned is None,
            between=session.between_steps,
        )
        if session.world is not None:
            self._runtime.recorder.ranks_of_stage = session.ranks_of_stage
        group_marked(self._runtime.recorder.runs)
        self.own_parameters.after_partition()
        if self._runtime.reducer is not None:
            self._frozen = [(n, p) for n, p in self.module.named_parameters() if not p.requires_grad]
            self._runtime.runner.results.finder_of_reduced = self.own_parameters.namer
        self._runtime.runner.on_planned = session.on_planned
        self._runtime.runner.observer = lambda: session.observer
        self._timeline = StepTimeline.if_asked(session, peers.stages)
        if self._comm_hook is not None and self._runtime.reducer is not None:
            self._runtime.reducer.hook = self._comm_hook
        if session.num_stages == 1:
            if self._half is not None:  # before others, which a backward that is refused must not begin
                self._half.watch(self.module)
            self._outside = OutsideStep(session, self._runtime)
        for optimizer in session.optimizers:
            optimizer.after_partition()
        waits = bool(self._pending_state)
        try:
            if self._post_partition_hooks:
                self._run_post_partition_hooks()
            waits = True
            self.put_pending_in_place()
            for optimizer in session.optimizers:
                optimizer.load_pending()
        except Exception as error:
            if waits:
                self.refuse_until_loaded(error)
            raise

    def _run_post_partition_hooks(self) -> None:
        """What was loaded stays as it was loaded."""
        state = self._state()
        local = state.local()
        loaded = {key: copy.deepcopy(local[key]) for key in local if key in self._loaded_keys}
        for hook in list(self._post_partition_hooks.values()):
            hook(self, self._session.optimizer)
        state.put_back(loaded)

    def partition_for_optimizer(self) -> None:
        """Cuts parameters into slices where that may be done now: scripts look at them before a step."""
        of_smp = bool(self._session.shard_axes) and self._session.plan is None
        if of_smp and self._session.num_stages == 1 and not has_lazy_modules(self.module):
            self._partition_now(None)

    def use_stored_partition(self, path: str | os.PathLike[str]) -> None:
        """Partitions by a stored decision instead of making one; checks it if the model is cut already.

        Raises:
            SMPError: the model is partitioned in another way.
        """
        stored = load_partition(self._session, self.module, path)
        if self._partition is not None and self._partition[0].stage_of != stored.stage_of:
            raise SMPError(
                f"{os.fspath(path)!r} was saved with another partition than this model has: resume before "
                "the first step, or use a full checkpoint (partial=False)"
            )
        self._stored_partition = stored

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` after partition, before the first forward."""
        return self._register(self._post_partition_hooks, hook)

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` after the first step."""
        return self._register(self._post_step_hooks, hook)

    def _register(self, hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the wrapped module: averages of weights and frozen twins are plain modules.

        What is away here is away in the copy too; ``smp.gathered(copy)`` makes it whole.
        """
        return copy.deepcopy(self.module, memo)

    def __copy__(self) -> DistributedModel:
        same = type(self).__new__(type(self))
        same.__dict__.update(self.__dict__)
        return same

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SMPError(
            "a DistributedModel cannot be pickled: it belongs to this process's job. Save "
            "model.state_dict(), or smp.save(model.get_module())"
        )

    # As of torch -------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """A no-op before partition for devices (the library places parameters); dtypes are applied."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        ours = self._session.device
        names_one = device is not None and not cuda_as_cpu.means_cpu(device) and not is_host(device)
        if names_one and (device.type != ours.type or device.index not in (None, ours.index)):
            raise SMPError(
                f"model.to({str(device)!r}): this job runs on {ours}; the library moves parameters "
                "itself, so remove the call"
            )
        if dtype is not None:
            check_cast(
                f"model.to({dtype})", self.module, dtype, half_type(self._session.cfg), self.partitioned
            )
            self.module.to(dtype=dtype)
        return self

    def float(self) -> DistributedModel:
        return self._cast("float", torch.float32)

    def double(self) -> DistributedModel:
        return self._cast("double", torch.float64)

    def half(self) -> DistributedModel:
        return self._cast("half", torch.float16)

    def bfloat16(self) -> DistributedModel:
        return self._cast("bfloat16", torch.bfloat16)

    def _cast(self, name: str, dtype: torch.dtype) -> DistributedModel:
        check_cast(f"model.{name}()", self.module, dtype, half_type(self._session.cfg), self.partitioned)
        getattr(self.module, name)()
        return self

    # Data parallelism ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Not supported: uneven numbers of steps over dp ranks."""
        raise SMPError(
            "model.join() is not supported: give every dp rank the same number of steps "
            "(a DistributedSampler does, with drop_last=True)"
        )
        yield

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Replaces the reduction of each gradient bucket by ``hook(state, bucket)``.

        The hook returns a ``torch.futures.Future`` of the bucket's tensor and must average over dp ranks and
        microbatches itself: it sees sums over microbatches.

        Raises:
            SMPError: without ``ddp: True`` or with ``overlapping_allreduce=False``, or a second hook.
        """
        if not self._session.cfg.ddp or not self._options.overlapping_allreduce:
            raise SMPError("register_comm_hook needs ddp: True and overlapping_allreduce=True")
        if self._comm_hook is not None:
            raise SMPError("register_comm_hook was called before: there can be one hook")
        self._comm_hook = (state, hook)
        if self._runtime is not None and self._runtime.reducer is not None:
            self._runtime.reducer.hook = self._comm_hook

    _register_comm_hook = register_comm_hook


def _check_wrapping(session: session_module.Session, module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedModel wraps an nn.Module, got {type(module).__name__}")
    if session.model is not None or isinstance(module, DistributedModel):
        raise SMPError(
            "there is a DistributedModel already: a script can have one. Put several models into one "
            "nn.Module and wrap that; to begin anew (a cell of a notebook that runs again), call smp.reset() "
            "and smp.init() first"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise SMPError(
            "the model is wrapped in torch's DistributedDataParallel: wrap the plain model and set "
            "ddp: True in the parameters"
        )
    is_compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
    if is_compiled and session.num_stages > 1:
        raise SMPError(
            "the model is compiled as a whole (torch.compile), and its stages run on several ranks: compile "
            "modules that lie on one stage, such as its blocks, before it is wrapped"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise SMPError("TorchScript modules are not supported: wrap the eager module")
