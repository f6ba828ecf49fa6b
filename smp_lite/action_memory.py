"""What each action does to a stage's memory, found by playing one microbatch on fake tensors.

The executor that runs real steps runs here too, with the same lists and the same books of gradients, but on
fake parameters and with a wire that carries nothing: what keeps a tensor alive there keeps it alive here.
Each kind of microbatch (those with one graph are of one kind) is played twice, since its first backward
makes the gradients that later ones add to. The cost is that of the forward and backward of two microbatches
on fake tensors, some 50 us an operator, whatever the number of microbatches and their size.

A call that fake tensors cannot run (it looks at data, or has forward hooks) was run for real when the step
was recorded, and what it keeps is not known: a stand-in gives results and gradients of the right form, and
the call is named in ``Played.not_counted``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .comm.layout import arrival, departure
from .comm.wires import Transfer
from .plan.actions import Action
from .plan.lowering import lower
from .plan.memory import ActionMemory
from .plan.schedules import Policy, Work, compute_order
from .record.calls import Arguments, NewTensor, Repeated, ResultMeta, SameTensor
from .record.live_bytes import LiveBytes
from .record.metadata import MetadataInference, hook_reason, untouched
from .record.placed import PlacedTensor, TensorMeta
from .record.placement import Placement
from .record.recording import Command, Recording
from .record.structure import rebuild
from .runtime.executor import StageExecutor
from .runtime.gradients import GradientBooks
from .runtime.microbatch import MicrobatchState
from .runtime.random_streams import RandomStreams

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


def play(placement: Placement, kinds: Sequence[Sequence[Recording]]) -> Played:
    """Plays microbatches on every stage.

    Args:
        placement: the partitioned model; parameters and buffers may be on the meta device.
        kinds: complete recordings, those with one graph together, in the order of their microbatches.

    Raises:
        CannotPlay: names the action.
    """
    inference = MetadataInference()
    streams = RandomStreams()
    played = Played({}, [], set(), [])
    works = [Work(0, recordings[0].graph()) for recordings in kinds]
    policy = Policy(active_microbatches=1)
    played.lists = [lower(compute_order([work], policy), [work], placement.num_stages) for work in works]
    with untouched(placement.root), _without_hooks(), _without_gc(), streams.executing():
        inference.install_fakes(placement.root)
        _all_parameters(placement.root)
        fake = Placement(placement.root, placement.stage_of, placement.num_stages)
        for stage in range(placement.num_stages):
            player = _Player(stage, fake, inference, streams)
            for kind, (work, recordings) in enumerate(zip(works, kinds, strict=True)):
                for first in (True, False)[: len(recordings)]:
                    found = player.run(work, recordings[0], played.lists[kind][stage])
                    played.memory |= {(kind, first, action): memory for action, memory in found.items()}
            played.not_counted.append(tuple(player.stand_ins))
            played.with_gradient |= player.with_gradient()
    return played


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
        self.stand_ins: dict[str, None] = {}

    def with_gradient(self) -> set[str]:
        return {name for name, parameter in self.parameters.items() if parameter.grad is not None}

    def run(self, work: Work, recording: Recording, actions: Sequence[Action]) -> dict[Action, ActionMemory]:
        """Plays one microbatch; gradients add up from call to call."""
        recording, ordinary = self._fake(recording)
        books = GradientBooks(self.placement)
        executor = StageExecutor(
            self.stage,
            self.placement,
            _Wire(),
            self.streams,
            before_backward=books.before,
            after_backward=books.after,
        )
        state = MicrobatchState(recording)
        executor.states[0] = state
        state.update(work.graph, self.stage)
        books.plan([work], {0: recording}, actions, self.stage, last_batch=True)
        live = self.live
        live.ignore(ordinary)
        found: dict[Action, ActionMemory] = {}
        with self.inference.mode, live:
            for action in actions:
                alive, gradients = live.alive, self._gradient_bytes()
                live.peak = alive
                try:
                    for reason in executor.run([action]):
                        raise AssertionError(f"playing waits: {reason}")
                except Exception as error:
                    raise CannotPlay(
                        f"{action} does not run on tensors without data ({type(error).__name__}: {error})"
                    ) from error
                more = self._gradient_bytes() - gradients
                found[action] = ActionMemory(live.alive - alive - more, more, live.peak - alive)
            executor.end_step()
        return found

    def _gradient_bytes(self) -> int:
        storages = [
            parameter.grad.untyped_storage()
            for parameter in self.parameters.values()
            if parameter.grad is not None and parameter.grad.layout is torch.strided
        ]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    # The recording with fake tensors ------------------------------------------------------------------------

    def _fake(self, recording: Recording) -> tuple[Recording, list[torch.Tensor]]:
        """This stage's commands on fakes of the ordinary tensors that they captured, and these."""
        made: dict[int, torch.Tensor] = {}
        commands = [
            self._fake_command(command, made) if command.stage_index == self.stage else command
            for command in recording.commands
        ]
        return replace(recording, microbatch_index=0, commands=commands), list(made.values())

    def _fake_command(self, command: Command, made: dict[int, torch.Tensor]) -> Command:
        if command.parameter is not None:
            return command
        given = command.arguments
        leaves = list(given.leaves)
        for position, tensor in zip(given.positions, given.tensors, strict=True):
            if type(tensor) is not PlacedTensor:
                if id(tensor) not in made:
                    made[id(tensor)] = self.inference.fake_arguments(Arguments.of((tensor,), {}))[0][0]
                leaves[position] = made[id(tensor)]
        arguments = Arguments(leaves, given.spec)
        meta = command.meta
        assert meta is not None
        if command.module is None:
            function = command.function
            assert function is not None
            call = self._with_stand_in(command.label, function, meta, ())
            return replace(command, arguments=arguments, function=call)
        parameters = tuple(command.module.parameters())
        call = self._with_stand_in(command.label, command.module, meta, parameters)
        return replace(command, arguments=arguments, module=_Module(command.module, call))

    def _with_stand_in(
        self,
        label: str,
        call: Callable[..., Any],
        meta: ResultMeta,
        parameters: Sequence[torch.Tensor],
    ) -> Callable[..., Any]:
        """The call, or where fake tensors cannot run it, something of its form."""

        def either(*args: Any, **kwargs: Any) -> Any:
            if not (isinstance(call, nn.Module) and hook_reason(call)):
                try:
                    return call(*args, **kwargs)
                except Exception:
                    pass  # the recorder could not run it on fake tensors either
            self.stand_ins[label] = None
            return _stand_in(meta, Arguments.of(args, kwargs).tensors, parameters)

        return either


class _Module(nn.Module):
    """Takes a module's place in a command, and has its parameters."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = module
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _Wire:
    """Carries nothing: what is sent has left, what is received has arrived, into memory of its own."""

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        departure(tensor, meta)
        return _Arrived(None)

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        return _Arrived(arrival(meta))


class _Arrived:
    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._tensor = tensor

    def done(self) -> bool:
        return True

    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor


class _StandIn(torch.autograd.Function):
    """New tensors that depend on all inputs, and keep nothing of them."""

    @staticmethod
    def forward(ctx: Any, metas: Sequence[TensorMeta], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.metas = [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in inputs]
        made = [torch.empty(meta.shape, dtype=meta.dtype, device=meta.device) for meta in metas]
        ctx.mark_non_differentiable(*[t for t, meta in zip(made, metas) if not meta.requires_grad])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return None, *[torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.metas]


def _stand_in(meta: ResultMeta, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Any:
    """A result of the described form."""
    described = [leaf.meta for leaf in meta.leaves if type(leaf) is NewTensor]
    sources = [t for t in (*tensors, *parameters) if t.is_floating_point() or t.is_complex()]
    new: tuple[torch.Tensor, ...] = _StandIn.apply(described, *sources) if described else ()
    following = iter(new)
    leaves: list[Any] = []
    for leaf in meta.leaves:
        if type(leaf) is NewTensor:
            leaves.append(next(following))
        elif type(leaf) is SameTensor:
            leaves.append(tensors[leaf.argument])
        elif type(leaf) is Repeated:
            leaves.append(new[leaf.index])
        else:
            leaves.append(leaf.value)  # type: ignore[union-attr]
    return rebuild(meta.spec, iter(leaves))


def _all_parameters(root: nn.Module) -> None:
    """A fake of a frozen parameter is a parameter too."""
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and not isinstance(tensor, nn.Parameter):
                if id(tensor) not in made:
                    made[id(tensor)] = nn.Parameter(tensor, requires_grad=False)
                module._parameters[name] = made[id(tensor)]


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Module calls run ``forward`` alone: the user's hooks must not see fake tensors."""
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module.forward(*args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Nothing is collected in the middle of an action and counted as what the action has freed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
