"""Runs one stage's list of actions.

One loop over the list, one table from kind to method, and no decisions: what to run, in which order and
what to send is in the list, how segments hang together is in the graphs. :meth:`StageExecutor.run` is a
generator that yields whenever it would have to wait, so the same code is driven by polling a wire in one
process for each rank, and by turns when one process plays all stages.

Every cut value is a leaf on its consumer's side, so the backward of a segment is exactly one
``torch.autograd.backward`` over its outputs, started only when all gradients it needs are there: nothing
ever blocks inside autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...comm.wires.wire import Transfer, Wire
from ...errors import SMPError
from ...plan.step.actions import COMPUTE_KINDS, Action, ActionKind
from ...plan.step.segments import Segment
from ...record.backward.engine import edge_of, run_backward
from ...record.commands.recording import Command, Recording
from ...record.parameters.placement import Placement
from ..graphs.stage_graphs import StageGraphs
from ..offloading.offload import COUNTED_KINDS, ActivationOffload
from ..sharded.parameters import ShardedParameters
from ..weights.deferral import WeightGradients
from .ahead import NOT_RECORDED, NOT_RESUMED, Ahead
from .commands import CommandRunner, RealRun
from .cut_gradients import CutGradients, of_its_own
from .failure import Failure
from .held import what_is_held
from .microbatch import MicrobatchState
from .random_streams import RandomStreams
from .spans import Spans
from .starts import keeping_strides, taken_starts
from .transfers import Transfers


class StageExecutor:
    """The state of one stage during one step.

    Args:
        stage_index: which stage.
        placement: where the live parameters are.
        wire: to the other stages.
        streams: random seeds.
        before_backward, before_weights, after_backward: called around each backward, and around what it has
            left for later, with (microbatch, segment); gradient reduction listens here. The first returns
            further leaves at which the backward begins, and their gradients.
        on_failure: called when an action has failed.
        sharded: parameters that must be brought together before an action; None: all are here.
        offload: takes what checkpointed calls keep out of memory; None: it stays.
        weights: gives gradients of parameters in actions of their own, where the list has them.
        graphs: runs segments of replayed steps without their Python; None: it always runs.
        goes_on: says of (microbatch, segment) whether its backward adds to what others have found, which a
            graph of it cannot: it adds up its own gradients first.
    """

    def __init__(
        self,
        stage_index: int,
        placement: Placement,
        wire: Wire,
        streams: RandomStreams,
        *,
        before_backward: Callable[[int, Segment], Iterable[tuple[Any, torch.Tensor]]] | None = None,
        before_weights: Callable[[int, Segment], None] | None = None,
        after_backward: Callable[[int, Segment], None] | None = None,
        on_failure: Callable[[], None] | None = None,
        sharded: ShardedParameters | None = None,
        offload: ActivationOffload | None = None,
        weights: WeightGradients | None = None,
        graphs: StageGraphs | None = None,
        goes_on: Callable[[int, Segment], bool] | None = None,
    ) -> None:
        self.stage_index = stage_index
        self.states: dict[int, MicrobatchState] = {}
        self.transfers = Transfers(stage_index, wire, self.states, placement.may_change)
        self.spans = Spans()
        self.gradient_scale = 1.0
        self.failure: Failure | None = None  # of the last list
        self.error: Exception | None = None
        self._commands = CommandRunner(placement, streams)
        self._commands.sharded = self._sharded = sharded
        self.offload = offload
        self.weights = weights
        self.graphs = graphs
        self._goes_on = goes_on
        self._placement = placement
        self._before_backward = before_backward
        self._before_weights = before_weights
        self._after_backward = after_backward
        self._on_failure = on_failure
        self._to_adopt: list[tuple[MicrobatchState, Command]] = []
        self._table: dict[ActionKind, Callable[[Action, MicrobatchState], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.WEIGHT: self._weight,
            ActionKind.SEND_FORWARD: self.transfers.send_forward,
            ActionKind.RECV_FORWARD: self.transfers.receive_forward,
            ActionKind.SEND_BACKWARD: self.transfers.send_backward,
            ActionKind.RECV_BACKWARD: self.transfers.receive_backward,
        }

    def observe(self, observer: Any) -> None:
        """From now on ``observer`` sees each command that runs; None: nobody does."""
        self._commands.observer = observer

    def watch(self, around: Callable[[Action], contextlib.AbstractContextManager[Any]]) -> None:
        """From now on ``around(action)`` is entered around each action's method."""
        for kind, method in self._table.items():
            self._table[kind] = partial(_within, around, method)

    def run(self, actions: Sequence[Action], ahead: Ahead | None = None) -> Iterator[str]:
        """Executes the list; yields what it waits for whenever it cannot go on.

        If an action fails, ``failure`` says so afterwards; all transfers of the list have been made.

        Args:
            actions: the list.
            ahead: how far the step has been recorded; None: to its end.
        """
        self.failure = None
        transfers, sharded = self.transfers, self._sharded
        if sharded is not None:
            sharded.begin(self._uses(actions))
        offload = self.offload
        if offload is not None:
            offload.begin(actions)
        if self.weights is not None:
            alike = None if ahead is None else self.states[ahead.first.microbatch_index]
            ms = dict.fromkeys([action.microbatch_index for action in actions])
            self.weights.begin(actions, {m: self.states[m] if alike is None else alike for m in ms})
        states, table, spans = self.states, self._table, self.spans
        for number, action in enumerate(actions):
            kind, m = action.kind, action.microbatch_index
            if ahead is not None and (m >= ahead.num_recorded or m >= ahead.cut):
                while ahead.lacks(action):
                    yield NOT_RECORDED
                if ahead.leaves_out(action):
                    if kind not in COMPUTE_KINDS:
                        yield from transfers.without_need(action, ahead)
                    continue
            state = states[m]
            if kind in COMPUTE_KINDS:
                for transfer, value, stage in self._needs(action, state):
                    if not transfer.done():
                        what = "value" if kind is ActionKind.FORWARD else "the gradient of"
                        waits = f"{action} on stage {self.stage_index} needs {what} v{value}"
                        waits += f" from stage {stage}"
                        yield waits
                        while not transfer.done():
                            yield waits
                    if spans.are_on_device:
                        transfer.tensor()  # the device waits for it here, not within the action
                    del transfer  # it holds what has arrived
                while ahead is not None and not ahead.is_resumed:
                    yield NOT_RESUMED
                if ahead is not None and ahead.leaves_out(action):
                    continue  # given up while it waited
                try:
                    if sharded is not None:
                        yield from sharded.bring()
                    if offload is not None and kind in COUNTED_KINDS:
                        yield from offload.bring()
                    begun = spans.begin()
                    if torch.autograd._profiler_enabled():  # a span that nobody sees costs time
                        with torch.profiler.record_function(str(action)):
                            table[kind](action, state)
                    else:
                        table[kind](action, state)
                    if sharded is not None:
                        sharded.leave()
                    if offload is not None and kind in COUNTED_KINDS:
                        segment = state.by_visit[action.visit]
                        offload.leave(action, state.leaves.get(segment.commands[0], {}).values())
                except Exception as error:
                    self.failure = Failure.of(error, self.stage_index, action, self._commands.doing)
                    self.error = error
                    if isinstance(error, torch.OutOfMemoryError):
                        self.failure.held = what_is_held(self._placement.root.parameters(), self.states)
                    if self._on_failure is not None:
                        self._on_failure()
                    self._let_go()
                    yield from transfers.given_up(actions[number + 1 :], ahead)
                    break
                spans.end(action, begun)
            else:
                table[kind](action, state)
        self._let_go()
        if ahead is not None and ahead.cut == 0:
            yield from transfers.receives_end()
        yield from transfers.sends_end()

    def _let_go(self) -> None:
        if self._sharded is not None:
            self._sharded.end()
        if self.offload is not None:
            self.offload.end()
        if self.weights is not None:
            self.weights.end()

    def _uses(self, actions: Sequence[Action]) -> list[tuple[int, ...]]:
        """For each forward and backward the groups of sharded parameters that it needs."""
        assert self._sharded is not None
        known: dict[Any, tuple[int, ...]] = {}
        found = []
        for action in actions:
            if action.kind not in COMPUTE_KINDS:
                continue
            state = self.states[action.microbatch_index]
            segment = state.by_visit[action.visit]
            commands = [state.recording.commands[index] for index in segment.commands]
            owners = tuple([c.parameter or id(c.module) for c in commands if c.parameter or c.module])
            if owners not in known:
                parameters = [p for c in commands if c.module is not None for p in c.module.parameters()]
                parameters += [self._placement.parameter(c.parameter) for c in commands if c.parameter]
                known[owners] = self._sharded.groups_of(parameters)
            found.append(known[owners])
        return found

    def end_step(self) -> None:
        self._let_go()  # a list that was given up halfway
        if self.offload is not None:
            self.offload.end_step()
        if self.graphs is not None:
            self.graphs.end_step()
        self.failure = self.error = None
        self.transfers.forget()
        self.states.clear()
        self._to_adopt.clear()
        self._commands.undescribed.clear()

    def result_of(self, command: Command) -> RealRun:
        """What a command has shown that ran before it was described."""
        return self._commands.undescribed[command.index]

    def forget(self, command: Command) -> None:
        """The run of the command has been undone."""
        del self._commands.undescribed[command.index]

    def adopt_later(self, state: MicrobatchState, command: Command) -> None:
        """The command is described now: :meth:`adopt` will store its values."""
        self._to_adopt.append((state, command))

    def adopt(self) -> None:
        for state, command in self._to_adopt:
            self._commands.adopt(command, state.data)
        self._to_adopt.clear()

    # What an action waits for --------------------------------------------------------------------------

    def _needs(self, action: Action, state: MicrobatchState) -> list[tuple[Transfer, int, int]]:
        """(transfer, value, stage that sends it) of each thing that the action waits for."""
        if action.kind is ActionKind.WEIGHT:
            return []  # its own backward comes before it
        part, found = state.part, []
        if action.kind is ActionKind.FORWARD:
            arriving = state.arriving
            for value, stage in part.arrivals[action.visit]:
                if value in arriving:
                    found.append((arriving[value], value, stage))
            return found
        gradients = state.arriving_gradients
        for value, sources in part.gradients_taken[action.visit]:
            for stage, _ in sources:
                found.append((gradients[value, stage], value, stage))
        return found

    # Actions ----------------------------------------------------------------------------------------------

    def _forward(self, action: Action, state: MicrobatchState) -> None:
        segment = state.by_visit[action.visit]
        recording = state.recording
        local: dict[int, torch.Tensor] = {}
        for value in segment.imports:
            local[value] = self._imported(state, value)
        leaves = {value: local[value] for value in segment.imports}
        begin: dict[int, Any] = {}
        replayed = None if self.graphs is None else self._replayed(recording, segment, leaves, state)
        if replayed is not None:
            local |= replayed
            self._commands.edges.clear()
        elif self.offload is not None:
            local = {value: self.offload.leaf_for(leaf) for value, leaf in leaves.items()}
            begin.update({value: edge_of(tensor) for value, tensor in local.items() if tensor.requires_grad})
            with self.offload.during(action):
                self._commands.run_segment(recording, segment, local, state.data)
        elif self.weights is None:
            self._commands.run_segment(recording, segment, local, state.data)
        else:
            with self.weights.forward(action.microbatch_index, segment, state):
                self._commands.run_segment(recording, segment, local, state.data)
        self._commands.starts.clear()
        key = segment.commands[0]
        for value, _ in recording.inputs:
            if value in local and value not in segment.imports:
                state.inputs[value] = local[value]
        state.forward_done.add(key)
        if segment.has_backward or not recording.complete:
            state.leaves[key] = leaves
            if replayed is None:
                begin.update(self._commands.copied)
            if begin:
                state.sums_begin[key] = begin
        self._keep_exports(state, segment, local)
        for value in segment.imports:
            state.used(value)

    def _replayed(
        self, recording: Recording, segment: Segment, leaves: dict[int, torch.Tensor], state: MicrobatchState
    ) -> dict[int, torch.Tensor] | None:
        """What a graph of the segment makes for others; None: there is none."""
        if self.graphs is None or self._commands.observer is not None:
            return None
        goes_on = self._goes_on is not None and self._goes_on(recording.microbatch_index, segment)
        if goes_on or state.part.sums_taken[segment.visit] or state.part.seeds_taken[segment.visit]:
            return None

        def run(local: dict[int, torch.Tensor]) -> None:
            self._commands.run_segment(recording, segment, local, state.data)
            local |= self._commands.starts

        return self.graphs.forward(recording, segment, leaves, run)

    def _imported(self, state: MicrobatchState, value: int) -> torch.Tensor:
        """The segment's own leaf of a value made elsewhere."""
        if value in state.arriving:
            state.keep(value, state.arriving.pop(value).tensor())
        made = state.recording.values[value]
        leaf = state.data[value].detach()
        if not made.meta.requires_grad:
            return leaf
        if leaf.dtype is torch.float32 and leaf.layout is torch.strided and not made.is_parameter:
            # Autocast takes leaves for weights, of which it casts one once for all uses, unless it is a view.
            # (A weight is no view either: under no_grad its own views would not want a gradient, as they do
            # in one process, by which kernels are chosen.)
            leaf = leaf[...]  # view_as() would write strides of its own for lengths of one
        return leaf.requires_grad_()

    def _keep_exports(self, state: MicrobatchState, segment: Segment, local: dict[int, torch.Tensor]) -> None:
        state.edges.update(self._commands.edges)
        self._commands.edges.clear()
        if not state.recording.complete:
            # Later commands may need anything that was made here.
            for index in segment.commands:
                for value in state.recording.commands[index].outputs:
                    if value in local:
                        state.keep(value, self._lasting(local[value]))
            return
        state.begin_backward_at(segment, local)
        for value in segment.exports:
            if state.remaining.get(value):
                state.keep(value, self._lasting(local[value]))

    def _lasting(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is kept beyond its action may not lie in the memory of a sharded parameter."""
        is_lent = self._sharded is not None and self._sharded.owns_memory_of(tensor)
        return tensor.clone() if is_lent else tensor

    def _backward(self, action: Action, state: MicrobatchState) -> None:
        segment = state.by_visit[action.visit]
        key = segment.commands[0]
        m = action.microbatch_index
        starts, gradients, sums = taken_starts(state, segment, self.gradient_scale)
        leaves = state.leaves.pop(key)
        begin = state.sums_begin.pop(key, leaves)
        cut = CutGradients({value: leaves[value] for value in segment.gradient_imports})
        if self.graphs is not None:
            self.graphs.before_backward(state.recording, segment, starts, gradients)
        # What a backward is given for a leaf is there before it adds its own, use by use.
        for value, total in sums.items():
            start = begin[value] if value in begin else leaves[value]
            starts.append(keeping_strides(start, total) if self.graphs is None else start)
            gradients.append(total)
        if self._before_backward is not None:
            for parameter, gradient in self._before_backward(m, segment):
                starts.append(parameter)
                gradients.append(gradient)
        with state.recording.around_backward(self.stage_index, segment.commands):
            try:
                if self.weights is None:
                    run_backward(starts, gradients)
                else:
                    with self.weights.backward(m, segment, state, starts):
                        run_backward(starts, gradients)
            except RuntimeError as error:
                if self._sharded is not None and "invalid gradient" in str(error):
                    raise SMPError(
                        "autograd still holds a graph over the pieces of sharded parameters, made outside of "
                        "smp.step (a penalty on weights, of which the loss is still there; nodes kept of "
                        f"parameters): del what holds it before the step ({error})"
                    ) from error
                raise
        if self._after_backward is not None:
            self._after_backward(m, segment)
        state.backward_done.add(key)
        for leaf in state.inputs.values():
            if leaf.grad is not None:
                leaf.grad = of_its_own(leaf.grad)
        for value, gradient in cut.taken():
            target = state.graph.gradient_target(segment, value).stage_index
            waiting = state.gradients if target == self.stage_index else state.outgoing
            waiting.setdefault(value, {})[segment.index] = gradient

    def _weight(self, action: Action, state: MicrobatchState) -> None:
        if self.weights is None:
            return  # the backward has left nothing
        m, segment = action.microbatch_index, state.by_visit[action.visit]
        if self._before_weights is not None:
            self._before_weights(m, segment)
        with state.recording.around_backward(self.stage_index, segment.commands):
            self.weights.run(m, segment.visit)
        if self._after_backward is not None:
            self._after_backward(m, segment)


def _within(
    around: Callable[[Action], contextlib.AbstractContextManager[Any]],
    method: Callable[[Action, MicrobatchState], None],
    action: Action,
    state: MicrobatchState,
) -> None:
    with around(action):
        method(action, state)
