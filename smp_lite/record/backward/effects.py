"""What code within a backward pass changes, and whether anybody sees it later than in one process.

A hook that counts its calls is nobody's business: what it changes goes on from one backward to the next. But
code that is recorded before the backward runs, and in one process runs after it, would see too little: the
step function after ``model.backward()``, and both it and forwards for later microbatches. On several ranks
each sees what its own backwards change. All of that is an error, and so are random numbers that backward
code draws, and buffers that a checkpoint's second forward changes between the forwards of microbatches.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import SMPError
from ..code.copies import Copy
from ..code.frames import Frame, frames_of_the_step
from ..code.readers import Readers
from ..parameters.placement import Placement
from ..state import random_state
from ..state.hearing import hearing_attributes
from .functions import functions_in
from .gradient_reads import refuse_reads_elsewhere
from .part import Owners, Part
from .sharing import SharedState, name_in

if TYPE_CHECKING:
    from ..commands.recording import Recording

__all__ = ["BACKWARD_CODE", "BackwardEffects"]

BACKWARD_CODE = "code that runs within a backward (a hook, an autograd function's backward)"
_OURS = ("torch", __name__.partition(".")[0])


class BackwardEffects:
    """What backward code of one recorder's model changes.

    Attributes:
        is_possible: whether any such code has been met.
        step_function: that is being recorded.
    """

    def __init__(self, placement: Placement) -> None:
        self.is_possible = False
        self.step_function: Any = None
        self._placement = placement
        self._codes: set[types.CodeType] = set()  # of backward code
        self._shared = SharedState()
        self._frames: dict[types.CodeType, Frame] = {}
        self._readers: Readers | None = None
        self._readers_of_attributes: Readers | None = None
        self._kept: Copy | None = None
        self._set: list[tuple[nn.Module, str]] = []  # attributes, by backward code
        self._num_microbatches = 1
        self._num_backwards = 0
        self._hooked: list[tuple[str, torch.Tensor]] = []
        self._done: dict[int, set[str]] = {}  # by microbatch: hooked parameters that have their gradient

    def begin_step(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._num_backwards = 0
        self._done.clear()
        self._shared.begin_step(num_microbatches)
        self.end_step()

    def end_step(self) -> None:
        """Lets go of what it was looked at for the step."""
        self._frames.clear()
        self._readers = self._readers_of_attributes = self._kept = None
        self._set.clear()
        self._hooked.clear()

    def meet(self, function: Any, stage_index: int | None = None, owners: Owners = frozenset()) -> None:
        """It will run within backwards, on that stage (None: on any), in the parts with these owners."""
        self._add(function)
        self._shared.meet(function, stage_index, owners)

    def keep(self, function: Any) -> None:
        """It will run within backwards of this step and of later ones, on any stage."""
        self._add(function)
        self._shared.keep(function)

    def _add(self, function: Any) -> None:
        self.is_possible = True
        self._codes |= {inner.__code__ for inner in functions_in(function)}

    def meet_codes(self, codes: set[types.CodeType]) -> None:
        """Functions with this code may run within backwards."""
        self.is_possible |= bool(codes)
        self._codes |= codes

    def note_backward(self, recording: Recording, values: Sequence[int]) -> None:
        """``model.backward()`` of these values is called now.

        Raises:
            SMPError: it is not the first one of this microbatch, and code that runs within both would run
                once, on the sum of their gradients.
        """
        self._num_backwards += 1
        if self.is_possible and recording.backwards:
            hooked = [name for name, _, _ in self._placement.hooked_parameters()]
            shared = recording.ancestors(values) & recording.ancestors(recording.roots())
            if hooked or shared:
                what = f"the parameter {hooked[0]!r}" if hooked else recording.commands[min(shared)].label
                raise SMPError(
                    f"model.backward() is called again in one microbatch: both backwards run together here, "
                    f"and {BACKWARD_CODE}, as on {what}, would see the sum of two gradients, one after the "
                    "other in one process. Call it once, with the sum of the losses"
                )
        if self.is_possible:
            self._frames.update({frame.code: frame for frame in frames_of_the_step()})

    def before_running(self) -> None:
        """Looks who could see what backward code changes, and what lies there."""
        if not self.is_possible or not self._num_backwards:
            return
        self._hooked = [(name, tensor) for name, tensor, _ in self._placement.hooked_parameters()]
        root, frames = self._placement.root, self._frames.values()
        self._shared.before_running()
        later = Readers(None, self._codes)
        for frame in frames:
            later.add_later(frame, self.step_function)
        self._readers = self._readers_of_attributes = later.complete()
        if self._is_seen_by_forwards:
            self._readers = Readers(root, self._codes)
            self._readers.add_function(self.step_function)
            for frame in frames:
                self._readers.add(frame)
            self._readers.complete()
        if self._has_later_calls:
            self._readers_of_attributes = self._readers
        self._kept = self._readers.copy()

    @property
    def _has_later_calls(self) -> bool:
        """Whether calls may be recorded in this step after a backward has been called."""
        return self._num_microbatches > 1 or self._num_backwards > 1

    @property
    def _is_seen_by_forwards(self) -> bool:
        """Whether a forward could see less of what backwards change than in one process.

        On several ranks each sees what its own backwards change.
        """
        placement = self._placement
        return self._has_later_calls or len(placement.local_stages) < placement.num_stages

    @contextlib.contextmanager
    def watched(self, part: Part) -> Iterator[None]:
        """Within: a part of a microbatch's backward runs.

        Raises:
            SMPError: it has changed what code reads that has run before it, and in one process runs after
                it; or it has drawn random numbers; or hooks have seen a part of a gradient, or what other
                parts give or share.
        """
        gradients = [_of_gradient(parameter) for _, parameter in self._hooked]
        buffers = self._versions() if self._has_later_calls else []
        drawn = random_state.all_states() if self.is_possible else None
        if self._readers is not None and self._kept is not None and self._kept.changed() is not None:
            self._kept = self._readers.copy()  # by a call that has run
        with self._shared.watched(part):
            with self._reads(part), hearing_attributes(lambda m, name: self._set.append((m, name))):
                yield
            if drawn is not None and drawn != random_state.all_states():
                raise SMPError(
                    f"{BACKWARD_CODE} draws random numbers: which ones they are depends on when it runs, and "
                    "on several ranks each draws its own. Draw them in the step function or in forward"
                )
            self._check_not_read(buffers)
        done = self._done.setdefault(part.microbatch_index, set())
        for (name, parameter), before in zip(self._hooked, gradients, strict=True):
            if _of_gradient(parameter) == before:
                continue
            if name in done:
                raise SMPError(
                    f"the parameter {name!r} has hooks on its gradient, which arises in several parts here: "
                    "calls on other stages lie between those that use it, or model.backward() is called "
                    "more than once. The hooks would see each part, and in one process they see the sum. "
                    "Change gradients between model.backward() and optimizer.step(), outside the step "
                    "function, or place what uses the parameter on one stage, side by side"
                )
            done.add(name)

    def _reads(self, part: Part) -> contextlib.AbstractContextManager[Any]:
        if not self.is_possible or (self._placement.num_stages == 1 and not part.elsewhere):
            return contextlib.nullcontext()
        hooked = {name for name, _ in self._hooked}  # of these, parts are looked for anyway
        return refuse_reads_elsewhere(self._placement, part, hooked, is_repeated=self._num_microbatches > 1)

    def _versions(self) -> list[tuple[nn.Module, str, torch.Tensor, int]]:
        return [
            (module, name, buffer, buffer._version)
            for module in self._placement.root.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def _check_not_read(self, buffers: list[tuple[nn.Module, str, torch.Tensor, int]]) -> None:
        readers = self._readers_of_attributes
        for module, name in self._set:
            if readers is not None and readers.reads(module, name):
                raise _read_too_early(f"{type(module).__name__}.{name}")
        self._set.clear()
        for module, name, buffer, version in buffers:
            if buffer._version == version or not self._is_read(module, name):
                continue
            label = f"the buffer {type(module).__name__}.{name}"
            if not self.is_possible:
                raise SMPError(
                    f"{label} is changed by a forward and by the checkpoint that runs it again: here "
                    "forwards of later microbatches may run between the two, and the buffer would become "
                    "something else. Leave the module out of the checkpoint, or train with microbatches=1"
                )
            raise _read_too_early(label)
        if self._kept is not None and (text := self._kept.changed()) is not None:
            raise _read_too_early(name_in(text))

    def _is_read(self, module: nn.Module, name: str) -> bool:
        """Whether a buffer that a backward changes is one that forwards read."""
        if type(module).__module__.partition(".")[0] in _OURS or self._readers is None:
            return True
        return name in self._readers.names.attributes


def _of_gradient(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes whenever something is added to the gradient."""
    return (id(parameter.grad), parameter.grad._version) if parameter.grad is not None else (0, 0)


def _read_too_early(name: str) -> SMPError:
    return SMPError(
        f"{name} is changed by {BACKWARD_CODE}, and read by forward or the step function: what runs after a "
        "backward in one process, and sees the new value, may run before it here, or on another rank. Let it "
        "be read under another name, which is set between steps, or let the hook read what the step function "
        "sets"
    )
