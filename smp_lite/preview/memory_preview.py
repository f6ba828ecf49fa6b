"""The memory that each stage of a planned step will need: put together from its parts.

Counted is what torch allocates for tensors in the process of one rank, in a training step that is not the
first. At all times that is parameters and buffers, the optimizer's state, the batch and what the step
function makes of it on every rank, and what the step before returned. Along the stage's list of actions come
gradients, all that backward keeps (the loss's share as well), values and gradients received, sent and waiting
for their sum, what graphs of a device hold (:mod:`.graph_memory`), and what an action needs on top while it
runs. The peak is the largest of four moments: within the list, at its end when results are shared, while
replicas reduce gradients, and in ``optimizer.step()``.
Gradients are taken to be freed between steps, as ``zero_grad()`` does.

Not counted: Python and torch themselves, what most kernels allocate and free inside, what the script holds
beside, and evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.groups.ranks import Ranks
from ..deferred import is_deferred
from ..nn.layout import layout_of
from ..plan.step.actions import Action, ActionKind
from ..plan.step.memory import ActionMemory, StageMemory, StagePeak, step_peak
from ..plan.units import human_bytes
from ..record.commands.recording import Recording
from ..record.parameters.placement import Placement
from ..record.values.placed import TensorMeta
from ..runtime.reduction.reductions import rule_of
from ..runtime.step.batches import Batch
from ..session import Session
from ..wrapper.cutting.schedules import optimizer_states
from .action_memory import CannotPlay, Played, play
from .graph_memory import graph_memory, graph_notes
from .optimizer_memory import OptimizerMemory, optimizer_memory

__all__ = ["CannotPlay", "MemoryPreview", "preview_memory"]


@dataclass(frozen=True)
class MemoryPreview:
    """Each stage's peak, and what a reader of the figures should know."""

    stages: tuple[StageMemory, ...]
    notes: tuple[str, ...]


def preview_memory(
    session: Session,
    batch: Batch,
    recordings: Mapping[int, Recording],
    inputs: Iterable[torch.Tensor] = (),
) -> MemoryPreview:
    """Finds out what a step needs, without running it.

    Args:
        session: its model is partitioned; an optimizer that is not there is taken to be AdamW.
        batch: the step's last batch of work.
        recordings: by microbatch.
        inputs: the tensors that the step function was given.

    Raises:
        CannotPlay: a backward of the user's own looks at data, so nobody knows what it needs.
    """
    runtime = session.model.runtime
    placement: Placement = runtime.placement
    kinds: dict[tuple[int, ...], list[Recording]] = {}
    for recording in recordings.values():
        kinds.setdefault(recording.plan_key(), []).append(recording)
    splits = any(action.kind is ActionKind.WEIGHT for actions in batch.schedule for action in actions)
    played = play(placement, list(kinds.values()), splits=splits)
    kind_of = {
        recording.microbatch_index: (kind, recording is members[0])
        for kind, members in enumerate(kinds.values())
        for recording in members
    }
    on_every_rank = _ordinary_bytes(recordings.values(), inputs)
    results = [_result_bytes(recordings.values(), stage) for stage in range(session.num_stages)]
    notes: dict[str, None] = {}
    optimizers: dict[Any, OptimizerMemory] = {}  # by what a stage's parameters are like
    stages = []

    def memory_of(action: Action, new: bool = False) -> ActionMemory:
        kind, first = kind_of[action.microbatch_index]
        return played.memory[kind, first or new, action._replace(microbatch_index=0)]

    graphs = [
        graph_memory(session, batch, recordings, stage, memory_of) for stage in range(session.num_stages)
    ]
    for stage in range(session.num_stages):
        own = [name for name, home in placement.parameter_stage.items() if home == stage]
        trained = [placement.parameter(name) for name in own if name in played.with_gradient]
        form = _form_for_optimizer(session.optimizer, trained)
        if form not in optimizers:
            optimizers[form] = _optimizer_memory(session.optimizer, trained, notes)
        optimizer = optimizers[form]
        done = _not_listed(batch.schedule[stage], played, stage, kind_of)
        peak = step_peak(
            batch.schedule[stage],
            lambda action, beside=graphs[stage].beside: beside.get(action) or memory_of(action),
            kept=sum(memory_of(action).kept for action in done),
            gradients=sum(memory_of(action).gradients for action in done),
        )
        reduced = _reduced_bytes(session, trained)
        moment = _largest_moment(session, peak, optimizer, reduced, results[stage], sum(results))
        # Buffers of other stages are not freed.
        parameters = [*map(placement.parameter, own), *placement.root.buffers()]
        stages.append(
            StageMemory(
                stage_index=stage,
                when=moment.when,
                parameters=sum(map(_num_bytes, parameters)),
                gradients=moment.gradients,
                optimizer=optimizer.state,
                batch=on_every_rank + moment.results,
                kept=moment.kept,
                running=moment.running,
                graphs=graphs[stage].num_bytes,
                not_counted=played.not_counted[stage],
            )
        )
    notes |= dict.fromkeys((*_notes(session, batch, stages), *graph_notes(session, batch, graphs)))
    return MemoryPreview(tuple(stages), tuple(notes))


def _not_listed(
    actions: Sequence[Action], played: Played, stage: int, kind_of: Mapping[int, tuple[int, bool]]
) -> list[Action]:
    """What has run while the step was recorded."""
    listed = set(actions)
    everything = (
        action._replace(microbatch_index=m)
        for m, (kind, _) in kind_of.items()
        for action in played.lists[kind][stage]
    )
    return [action for action in everything if action not in listed]


@dataclass(frozen=True)
class _Moment:
    """What a stage holds beside what it always holds, in bytes."""

    when: str
    gradients: int
    results: int
    kept: int = 0
    running: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.results + self.kept + self.running


def _largest_moment(
    session: Session,
    peak: StagePeak,
    optimizer: OptimizerMemory,
    reduced: int,
    own_results: int,
    results: int,
) -> _Moment:
    """The peak of a whole training step.

    Args:
        session: whether buckets stay.
        peak: of the list of actions.
        optimizer: of this stage's parameters.
        reduced: bytes of gradients that are summed over ranks.
        own_results, results: bytes that this stage, and that all stages return in a step.
    """
    gradients = peak.gradients_at_end
    buckets = min(reduced, gradients)
    views = buckets if session.model.runtime.options.gradient_as_bucket_view else 0
    when = str(peak.action).removeprefix(str(peak.action.stage_index)) if peak.action else "-"
    return max(
        # What the step before returned is there until this one returns; the buckets are, if gradients are
        # views of them.
        _Moment(when, peak.gradients + views, results, peak.kept, peak.running),
        _Moment("gradients reduced", gradients + buckets, 2 * results),
        _Moment("results shared", gradients + buckets, 2 * results - own_results, peak.kept_at_end),
        _Moment("optimizer.step()", gradients, results, running=optimizer.running),
        key=lambda moment: moment.total,
    )


def _reduced_bytes(session: Session, trained: Sequence[torch.Tensor]) -> int:
    """Bytes of the gradients that are summed over replicas, or over ranks that have a summand of them."""
    axes = {name: size for name, size in session.topology.axes if name != "pp"}
    if _replicas_are_assumed(session):
        axes["dp"] = 2
    ranks = Ranks(session.batch_axes, axes, lambda axes, own=False: None)
    rules = [rule_of(parameter, ranks) for parameter in trained]  # type: ignore[arg-type]
    return sum(
        _num_bytes(parameter)
        for parameter, rule in zip(trained, rules, strict=True)
        if rule.axes or rule.divisor > 1
    )


def _replicas_are_assumed(session: Session) -> bool:
    """SMP's parameters say whether gradients are averaged, and not over how many replicas."""
    return session.plan is None and (session.cfg.ddp or session.cfg.horovod)


def _form_for_optimizer(optimizer: Any, trained: Sequence[torch.Tensor]) -> Any:
    """Equal where an optimizer needs the same for these parameters."""
    if optimizer is None:
        return tuple(map(TensorMeta.of, trained))
    groups = {id(p): i for i, group in enumerate(optimizer.optimizer.param_groups) for p in group["params"]}
    return tuple(
        (TensorMeta.of(p), TensorMeta.of(optimizer.stand_in_of(p)), groups.get(id(p))) for p in trained
    )


def _optimizer_memory(
    optimizer: Any, trained: Sequence[torch.Tensor], notes: dict[str, None]
) -> OptimizerMemory:
    """What the optimizer keeps for parameters of one stage; notes what had to be assumed."""
    if not trained:
        return OptimizerMemory(0, 0)
    if optimizer is None:
        notes["no optimizer was made before the step: AdamW is counted"] = None
        return optimizer_memory(torch.optim.AdamW(trained), trained)
    inner = optimizer.optimizer
    try:
        return optimizer_memory(inner, trained, optimizer.stand_in_of)
    except Exception as error:
        notes[
            f"{type(inner).__name__} cannot step on tensors without data ({type(error).__name__}: {error}): "
            "its state is estimated, and what a step needs on top is not counted"
        ] = None
        return OptimizerMemory(int(sum(map(_num_bytes, trained)) * optimizer_states(optimizer)), 0)


def _notes(session: Session, batch: Batch, stages: Sequence[StageMemory]) -> list[str]:
    root: torch.nn.Module = session.model.module
    # Parameters are split as they are wrapped: before, each rank has all of every one.
    waiting = sum(_num_bytes_of_whole(p) for p in root.parameters() if is_deferred(p))
    whole = sum(map(_num_bytes_of_whole, root.parameters())) + sum(map(_num_bytes, root.buffers())) - waiting
    notes = [f"until the first step every rank holds the whole model as it was built: {human_bytes(whole)}"]
    if waiting:
        notes.append(
            f"beside that, {human_bytes(waiting)} of parameters wait: their initialization is delayed"
        )
    if _replicas_are_assumed(session):
        notes.append("replicas are assumed, and the buckets of their reduction counted")
    if session.cfg.offload_activations:
        notes.append(
            "offload_activations: what is moved out of memory between a forward and its backward is counted "
            "as if it stayed, so ranks need less"
        )
    degree = session.cfg.sharded_data_parallel_degree
    if session.shard_axes or degree > 1:
        of_plan = session.plan.said("data_parallel").text() if session.plan is not None else None
        over = math.prod(map(session.topology.axis_size, session.shard_axes)) if of_plan else degree
        notes.append(
            f"{of_plan or f'sharded_data_parallel_degree={degree}'}: sharded parameters are counted whole, "
            f"as while they are used; between uses a rank keeps one of {over} pieces of them, of their "
            "gradients and of their optimizer state"
        )
    notes += [
        f"stage {stage.stage_index} needs more: {', '.join(stage.not_counted)} cannot run without data, so "
        "nobody knows what is kept there and how long it takes"
        for stage in stages
        if stage.not_counted
    ]
    limit = session.cfg.memory_limit
    if limit is not None and (above := [str(s.stage_index) for s in stages if s.total > limit]):
        notes.append(
            f"stage {', '.join(above)}: above memory_limit={limit} ({human_bytes(limit)}). What is chosen "
            "keeps to it by an estimate from the whole model, without the batch, messages and what an action "
            "needs while it runs: set it lower by the difference"
        )
    if any(work.forward_done for work in batch.works):
        notes.append(
            "a part of the step ran while it was recorded, since Python needed its data: the schedule shows "
            "the rest, and a peak in that part is not counted"
        )
    return notes


def _ordinary_bytes(recordings: Iterable[Recording], inputs: Iterable[torch.Tensor]) -> int:
    """The batch, and tensors made of it that commands will read: their parts of memory, each once."""
    captured = [
        tensor
        for recording in recordings
        for command in recording.commands
        for tensor, source in zip(command.arguments.tensors, command.sources, strict=True)
        if source < 0
    ]
    sizes: dict[int, int] = {}
    parts: dict[int, dict[tuple[int, int], None]] = {}
    for tensor in (*inputs, *captured):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
            parts.setdefault(storage._cdata, {})[tensor.storage_offset(), _num_bytes(tensor)] = None
    return sum(min(sizes[key], sum(size for _, size in found)) for key, found in parts.items())


def _result_bytes(recordings: Iterable[Recording], stage: int) -> int:
    """What the step function returns that this stage makes."""
    return sum(
        recording.values[value].meta.num_bytes
        for recording in recordings
        for value in recording.needed
        if recording.values[value].stage_index == stage
    )


def _num_bytes_of_whole(parameter: torch.Tensor) -> int:
    layout = layout_of(parameter)
    shape = parameter.shape if layout is None else layout.shape
    return math.prod(shape) * parameter.element_size()


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
