"""What each action does to a stage's memory, found by playing one microbatch on fake tensors.

The executor that runs real steps runs here too, with the same lists and the same books of gradients, but on
fake parameters and with a wire that carries nothing: what keeps a tensor alive there keeps it alive here.
Each kind of microbatch (those with one graph are of one kind) is played twice, since its first backward
makes the gradients that later ones add to; where gradients of parameters have actions of their own once
before, to see what can be split. Of stages that are alike (:mod:`.alike_stages`) one plays for all.
The cost is that of the forward and backward of two microbatches on fake tensors, some 50 us an operator,
whatever the number of microbatches and their size.

A call that fake tensors cannot run (it looks at data) was run for real when the step was recorded, and what
it keeps is not known: something stands in for it (:mod:`.fake_step`), and it is named in
``Played.not_counted``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..plan.collecting import without_gc
from ..plan.order.schedules import Policy, Work, compute_order
from ..plan.step.actions import Action, ActionKind
from ..plan.step.lowering import lower
from ..plan.step.memory import ActionMemory
from ..plan.step.segments import Segment
from ..record.commands.recording import Recording
from ..record.describe.effects import untouched
from ..record.describe.live_bytes import LiveBytes
from ..record.describe.metadata import MetadataInference
from ..record.describe.tracing import without_hooks
from ..record.parameters.placement import Placement
from ..runtime.stage.executor import StageExecutor
from ..runtime.stage.gradients import GradientBooks
from ..runtime.stage.microbatch import MicrobatchState, StagePart
from ..runtime.stage.random_streams import RandomStreams
from ..runtime.weights.deferral import WeightGradients
from .alike_stages import Likeness, alike
from .fake_step import FakeCommands, FakeWire, fake_parameters

__all__ = ["CannotPlay", "Played", "play"]


class CannotPlay(RuntimeError):
    """An action needs data: a backward of the user's own that looks at it, for one."""


@dataclass
class Played:
    """What playing has shown.

    Attributes:
        memory: by kind of microbatch, whether it is the first of its kind, and the action with microbatch 0.
        lists: for each kind the actions of one microbatch, stage by stage.
        with_gradient: names of the parameters that get a gradient.
        not_counted: for each stage, the calls of which it is not known what they keep.
    """

    memory: dict[tuple[int, bool, Action], ActionMemory]
    lists: list[tuple[tuple[Action, ...], ...]]
    with_gradient: set[str]
    not_counted: list[tuple[str, ...]]

    def repeat(self, twin: int, stage: int) -> None:
        """What one stage's actions have shown holds for those of a stage like it."""
        for kind, lists in enumerate(self.lists):
            for played, action in zip(lists[twin], lists[stage], strict=True):
                for first in (True, False):
                    if (kind, first, played) in self.memory:
                        self.memory[kind, first, action] = self.memory[kind, first, played]
        self.not_counted.append(())


def play(placement: Placement, kinds: Sequence[Sequence[Recording]], *, splits: bool = False) -> Played:
    """Plays microbatches on every stage.

    Args:
        placement: the partitioned model; parameters and buffers may be on the meta device.
        kinds: complete recordings, those with one graph together, in the order of their microbatches.
        splits: whether backwards leave gradients of parameters to a ``W``; what a backward keeps until then
            is seen as all else is, by running both.

    Raises:
        CannotPlay: names the action.
    """
    inference = MetadataInference()
    streams = RandomStreams()
    played = Played({}, [], set(), [])
    works = [Work(0, recordings[0].graph()) for recordings in kinds]
    policy = Policy("zero_bubble" if splits else "interleaved", active_microbatches=1)
    played.lists = [lower(compute_order([work], policy), [work], placement.num_stages) for work in works]
    descriptions, parameters = _descriptions(placement, works, kinds, played)
    with (
        without_hooks(placement.root),
        untouched(placement.root, whatever=True),
        fake_parameters(placement.root, inference),
        streams.executing(),
        without_gc(),  # nothing is collected in the middle of an action and counted as what it has freed
    ):
        for stage in range(placement.num_stages):
            twin = next((i for i in range(stage) if alike(descriptions[i], descriptions[stage])), None)
            if twin is not None and not played.not_counted[twin]:
                played.repeat(twin, stage)
                played.with_gradient |= {
                    name
                    for other, name in zip(parameters[twin], parameters[stage], strict=True)
                    if other in played.with_gradient
                }
                continue
            player = _Player(stage, placement, inference, streams)
            for kind, (work, recordings) in enumerate(zip(works, kinds, strict=True)):
                for first in (True, False)[: len(recordings)]:
                    found = player.run(work, recordings[0], played.lists[kind][stage])
                    played.memory |= {(kind, first, action): memory for action, memory in found.items()}
            played.not_counted.append(tuple(player.commands.stand_ins))
            played.with_gradient |= player.with_gradient()
    return played


def _descriptions(
    placement: Placement, works: Sequence[Work], kinds: Sequence[Sequence[Recording]], played: Played
) -> tuple[list[Any], list[list[str]]]:
    """Of each stage what it must have in common with those like it, and the parameters that it calls."""
    likenesses = [Likeness(stage, placement) for stage in range(placement.num_stages)]
    descriptions = [
        [
            likeness.of(recordings[0], work.graph, played.lists[kind][likeness.stage])
            for kind, (work, recordings) in enumerate(zip(works, kinds, strict=True))
        ]
        for likeness in likenesses
    ]
    return descriptions, [list(likeness.parameters) for likeness in likenesses]


class _Player:
    """One stage, playing."""

    def __init__(
        self, stage: int, placement: Placement, inference: MetadataInference, streams: RandomStreams
    ) -> None:
        self.stage, self.placement, self.inference, self.streams = stage, placement, inference, streams
        self.parameters = {
            name: placement.parameter(name)
            for name, home in placement.parameter_stage.items()
            if home == stage
        }
        self.live = LiveBytes([*placement.root.parameters(), *placement.root.buffers()])
        self.commands = FakeCommands(stage, inference)

    def with_gradient(self) -> set[str]:
        return {name for name, parameter in self.parameters.items() if parameter.grad is not None}

    def run(self, work: Work, recording: Recording, actions: Sequence[Action]) -> dict[Action, ActionMemory]:
        """Plays one microbatch; gradients add up from call to call."""
        recording, ordinary = self.commands.of(recording)
        weights = None
        if any(action.kind is ActionKind.WEIGHT for action in actions):
            weights = WeightGradients(self._touched, self.placement.alias, _anything)
            before = {parameter: parameter.grad for parameter in self.parameters.values()}
            self._run(work, recording, actions, weights)
            for parameter, gradient in before.items():  # that run has shown what can be split
                parameter.grad = gradient
        found: dict[Action, ActionMemory] = {}
        self.live.ignore(ordinary)
        self._run(work, recording, actions, weights, found)
        return found

    def _run(
        self,
        work: Work,
        recording: Recording,
        actions: Sequence[Action],
        weights: WeightGradients | None,
        found: dict[Action, ActionMemory] | None = None,
    ) -> None:
        """One microbatch; ``found`` takes what its actions do."""
        books = GradientBooks(self.placement)
        executor = StageExecutor(
            self.stage,
            self.placement,
            FakeWire(),
            self.streams,
            before_backward=books.before,
            after_backward=books.after,
            weights=weights,
        )
        if found is not None:
            executor.watch(partial(self._measured, found))
        state = MicrobatchState(recording)
        executor.states[0] = state
        state.update(StagePart(work.graph, self.stage), self.stage)
        books.plan([work], {0: recording}, actions, self.stage, last_batch=True)
        with self.inference.mode, self.live if found is not None else contextlib.nullcontext():
            for reason in executor.run(actions):
                raise AssertionError(f"playing waits: {reason}")
            if (error := executor.error) is not None:
                assert executor.failure is not None
                raise CannotPlay(
                    f"{executor.failure.action} does not run on tensors without data "
                    f"({type(error).__name__}: {error})"
                ) from error
            executor.end_step()

    @contextlib.contextmanager
    def _measured(self, found: dict[Action, ActionMemory], action: Action) -> Iterator[None]:
        live = self.live
        alive, gradients = live.alive, self._gradient_bytes()
        live.peak = alive
        yield
        more = self._gradient_bytes() - gradients
        found[action] = ActionMemory(live.alive - alive - more, more, live.peak - alive)

    def _touched(self, recording: Recording, segment: Segment) -> list[nn.Parameter]:
        return GradientBooks(self.placement).touched(recording, segment)

    def _gradient_bytes(self) -> int:
        storages = [
            parameter.grad.untyped_storage()
            for parameter in self.parameters.values()
            if parameter.grad is not None and parameter.grad.layout is torch.strided
        ]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _anything(arrived: torch.Tensor, made: torch.Tensor) -> bool:
    """Tensors without data are not compared."""
    return arrived.shape == made.shape
