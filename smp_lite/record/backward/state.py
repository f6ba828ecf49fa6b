"""The Python state that a backward pass reads: that of the moment when ``model.backward()`` was called.

Hooks, backwards of autograd functions and what a checkpoint computes again are Python code. In one process
they run within ``model.backward()``; here they run later, when the step function may have set attributes,
globals or dicts for other microbatches. So what the step function changes afterwards is noted, and the old
values are in force while the backward of that microbatch runs. Steps without such code note nothing.

What backward code itself changes (a hook that counts its calls) goes on from one backward to the next, as in
one process; who could see that too late is looked for in :mod:`.effects`. A place that the step
function changes too is an error.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from ...errors import SMPError
from ..code.reads import places_mentioned, places_of_class, places_reached
from ..describe.descriptions import Descriptions
from ..parameters.placement import Placement
from ..state.between import ReadBetween
from ..state.places import ModuleAttribute, Place, PlacesRead, Seen, in_force
from .effects import BACKWARD_CODE, BackwardEffects
from .functions import functions_in
from .gradient_reads import refuse_reads_of_changing
from .part import Owners, Part

if TYPE_CHECKING:
    from ..commands.recording import Command, Recording

__all__ = ["BackwardState"]

_OURS = ("torch", __name__.partition(".")[0])


@dataclass
class _Called:
    """A ``model.backward()`` of this step: what was at the places, and at those that have changed since."""

    microbatch_index: int
    commands: list[Command]  # of the microbatch, also those to come
    of_backward_code: list[PlacesRead]
    reads: list[tuple[PlacesRead, Seen]]
    changed: dict[Hashable, tuple[Place, Any]] = field(default_factory=dict)

    def keep(self, place: Place, value: Any) -> None:
        self.changed.setdefault(place.identity, (place, value))


class BackwardState:
    """What backward code of one recorder's model reads.

    Attributes:
        runs_python: whether any such code has been met, or a checkpoint, which runs forward code again.
        changing_buffers: gives names, by their memory, of the buffers that closed calls of a step change.
        effects: what it changes.
    """

    def __init__(self, placement: Placement, descriptions: Descriptions, read_between: ReadBetween) -> None:
        self._placement = placement
        self._read_between = read_between
        self._descriptions = descriptions
        self.runs_python = False
        self.changing_buffers: Callable[[], Mapping[int, str]] = dict
        self._is_repeated = False  # the step has several microbatches
        self.effects = BackwardEffects(placement)
        self._of_classes: dict[type, PlacesRead] = {}
        self._of_closed: dict[Any, tuple[PlacesRead, list[Any]]] = {}  # hooks that closed calls put
        self._of_hooks: PlacesRead | None = None  # of this step
        self._heard: list[Any] = []  # hooks that recorded code has put on values
        self._of_forwards: PlacesRead | None = None  # whichever of them run where they are called
        self._called: list[_Called] = []

    def begin_step(self, num_microbatches: int) -> None:
        self._of_hooks = None
        self._is_repeated = num_microbatches > 1
        self._heard.clear()
        self._called.clear()
        self.effects.begin_step(num_microbatches)

    def end_step(self) -> None:
        """Lets go of the microbatches."""
        self._called.clear()
        self.effects.end_step()

    # While recording ----------------------------------------------------------------------------------------

    def meet(self, cls: type[torch.autograd.Function]) -> PlacesRead:
        """An autograd function is used, here or inside a closed call."""
        places = self._of_classes.get(cls)
        if places is None:
            own = cls.__module__.partition(".")[0] in _OURS
            places = self._of_classes[cls] = PlacesRead([]) if own else places_of_class(cls)
            self.runs_python |= issubclass(cls, CheckpointFunction)
            if not own:
                self.runs_python = True
                for name in ("backward", "vjp"):
                    self.effects.keep(vars(cls).get(name))
        return places

    def hears_hook(self, hook: Any, *, of_recording: bool) -> None:
        """A hook is put on a tensor, or on what autograd saves.

        Args:
            hook: the function.
            of_recording: recorded code has done it, and no closed call.
        """
        self.runs_python = True
        if of_recording:
            self._heard.append(hook)
            self.effects.meet(hook)
        else:
            self.effects.keep(hook)
            self._hears_hook_inside(hook)

    def _hears_hook_inside(self, hook: Any) -> None:
        """A closed call has put a hook, with what it holds; values of the run that is only looked at pass."""
        plain = getattr(hook, "__func__", hook)
        held = [getattr(hook, "__self__", None), *_contents(plain)]
        held = [value for value in held if not isinstance(value, torch.Tensor)]
        key = (getattr(plain, "__code__", plain), *map(id, held))
        if key not in self._of_closed:
            self._of_closed[key] = places_reached([hook]), held  # so that ids stay theirs

    def hears_checkpoint(self) -> None:
        """Backward passes will run forward code again."""
        self.runs_python = True

    def note(self, recording: Recording, values: Sequence[int]) -> None:
        """``model.backward()`` of these values is called now."""
        if self._of_hooks is None:
            hooks = self._placement.gradient_hooks()
            _refuse_hooks_on_several(hooks)
            for stage, hook, owners in hooks:
                self.effects.meet(hook, stage, owners)
            self.runs_python |= bool(hooks)
            self._of_hooks = places_reached([hook for _, hook, _ in hooks])
            self.effects.meet_codes(self._descriptions.codes_with_node_hooks)
            self.runs_python |= self.effects.is_possible
        if not self.runs_python:
            return
        own = [
            *self._of_classes.values(),
            *[places for places, _ in self._of_closed.values()],
            self._of_hooks,
        ]
        if self._heard:
            own += [places_reached([hook]) for hook in self._heard]
        reads = _looked_at([*own, *self._by_calls()])
        called = _Called(recording.microbatch_index, recording.commands, own, reads)
        for read in own:
            self._read_between.look(read)
        if self._called and self._called[-1].microbatch_index == called.microbatch_index:
            self._check_unchanged_since_last()
        self._called.append(called)
        recording.around_backward = functools.partial(self._as_when_called, called)
        self.effects.note_backward(recording, values)

    def _check_unchanged_since_last(self) -> None:
        """A second ``model.backward()`` of a microbatch runs together with the first.

        Raises:
            SMPError: the step function has changed in between what backward code reads.
        """
        last = self._called[-1]
        changed = [place for places, seen in last.reads for place, _ in places.others_than_now(seen)]
        changed += [place for place, value in last.changed.values() if place.value() is not value]
        if changed:
            raise SMPError(
                f"{changed[0].name} is changed between two calls of model.backward() in one microbatch, and "
                f"read by {BACKWARD_CODE}: both backwards run together here, after the step function. Give "
                "model.backward() the sum of the losses, or let each read a place of its own"
            )

    def attribute_set(self, module: nn.Module, name: str, old: Any) -> None:
        """The step function sets an attribute: backwards that have been called keep what it was."""
        for called in self._called:
            called.keep(ModuleAttribute(module, name), old)

    def _by_calls(self) -> list[PlacesRead]:
        if self._of_forwards is None:
            kinds = dict.fromkeys(type(module) for module in self._placement.root.modules())
            users = (kind.forward for kind in kinds if kind.__module__.partition(".")[0] not in _OURS)
            self._of_forwards = places_mentioned(f for forward in users for f in _functions_of(forward))
        return [self._of_forwards, *self._descriptions.all_places()]

    # Around each batch of work ------------------------------------------------------------------------------

    def before_running(self) -> None:
        """What the step function has changed since each ``model.backward()`` is known from here on."""
        for called in self._called:
            for places, seen in called.reads:
                for place, value in places.others_than_now(seen):
                    called.keep(place, value)
        self.effects.before_running()

    def after_running(self) -> None:
        """What has changed since :meth:`before_running` is the doing of backward code."""
        self._read_between.clear()
        for called in self._called:
            called.reads = _looked_at([places for places, _ in called.reads])
            for places in called.of_backward_code:
                self._read_between.look(places)

    # Around each part of a backward -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _as_when_called(self, called: _Called, stage_index: int, commands: Sequence[int]) -> Iterator[None]:
        """Within: a part of the microbatch's backward runs, on that stage, that of these commands.

        Raises:
            SMPError: it has changed what the step function has changed too since ``model.backward()``.
        """
        state = list(called.changed.values())
        m, all_commands = called.microbatch_index, called.commands
        part = Part.of(m, stage_index, all_commands if self.effects.is_possible else (), commands)
        changing = self.changing_buffers() if self._is_repeated else {}
        reads = refuse_reads_of_changing(changing) if changing else contextlib.nullcontext()
        with self.effects.watched(part), in_force(state), reads:
            before = [place.get() for place, _ in state]
            yield
            self._check_only_changed_by_one(state, before)

    def _check_only_changed_by_one(self, state: list[tuple[Place, Any]], before: list[Hashable]) -> None:
        for (place, _), old in zip(state, before, strict=True):
            if place.get() != old:
                raise SMPError(
                    f"{place.name} is changed by {BACKWARD_CODE}, and by the step function or the forward "
                    "of another microbatch: here all microbatches are recorded before a backward runs, so "
                    "it would not become what it becomes in one process. Let each write to a place of its "
                    "own"
                )


def _refuse_hooks_on_several(hooks: list[tuple[int | None, Any, Owners]]) -> None:
    if any(getattr(hook, "__module__", "") == "torch.autograd.graph" for _, hook, _ in hooks):
        raise SMPError(
            "torch.autograd.graph.register_multi_grad_hook() wants the gradients of several parameters in "
            "one place, and stages make them at different times: look at them after the step function, "
            "between model.backward() and optimizer.step()"
        )


def _looked_at(read: list[PlacesRead]) -> list[tuple[PlacesRead, Seen]]:
    return [(places, places.look()) for places in read if places.places]


def _functions_of(forward: Any) -> Iterator[types.FunctionType]:
    """A forward, and what it is wrapped around; it may be an object that is called (torch's checkpoint())."""
    while forward is not None:
        yield from functions_in(forward)
        forward = getattr(forward, "__wrapped__", None)


def _contents(function: Any) -> Iterator[Any]:
    """What the variables around a function hold."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents
