"""Gradients of parameters that a backward leaves for a later action (``W``).

The heart of zero bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023), for unmodified modules: while
a segment runs forward, a function mode splits the calls of functions that :mod:`.rules` knows
(:mod:`.splitting`). Autograd then gives the gradient of the input only, and ``W`` makes the gradients of the
parameters and hands them to autograd as it would have got them itself: sums, hooks on parameters and buckets
of replicas see no difference but the time.

What is split is *learned*: the first time that a segment of some form runs, all its calls stay whole, and
where a parameter was used by just one call that has a rule, the gradient that the rule makes is compared with
the one that autograd has made. Only where every bit is the same, and not all are zeros, the parameter is
split from then on; of zeros alone the next lists are looked at, after ever longer pauses. So what
a rule cannot know (a second use in code that is not seen, another kernel) keeps a parameter whole, see
:mod:`.learning`. A list of actions splits a parameter in all microbatches or in none, in one segment of each:
sums over microbatches keep their order, and results their bits.

No code of the user's runs within a ``W``: a parameter that has hooks, or is read by those of others, stays
whole, since hooks may count together and look at each other's gradients. Whole stay also: calls under
autocast, in checkpointed or offloaded modules and wherever else what autograd saves is hooked, in function
transforms (``torch.func``) and in code that is being compiled; and, as long as its gradient is a view, a
parameter: views of one tensor count their changes together, so one that came in between would not be seen.

Input and output gradient of a split call are held until its ``W``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...errors import SMPError
from ...plan.step.actions import Action, ActionKind
from ...plan.step.segments import Segment
from ...record.backward.gradient_reads import GradientReads
from ...record.commands.recording import Recording
from .accumulating import accumulate
from .learning import comparing, same_bits
from .modules import Forward, LinearUse, installed, split_forwards, without_hooks
from .rules import Call
from .splitting import SplitCalls, Use

__all__ = ["WeightGradients"]

_Place = tuple[int, int]
"""(microbatch, visit)"""

_NOTHING: frozenset[int] = frozenset()
_NO_MODE = contextlib.nullcontext()


class Microbatch(Protocol):
    """What a stage knows of one microbatch."""

    recording: Recording
    by_visit: dict[int, Segment]
    forward_done: set[int]
    """First commands of segments."""


class WeightGradients:
    """The split calls of one stage.

    Args:
        parameters_of: the parameters that a segment of a recording may use.
        name_of: of a parameter, for errors.
        are_equal: compares the gradient that has arrived with what a rule has made; None: bit by bit.
        keeps_whole: whether the code of a module may look at gradients itself, or at autograd's nodes.
    """

    def __init__(
        self,
        parameters_of: Callable[[Recording, Segment], Sequence[nn.Parameter]],
        name_of: Callable[[nn.Parameter], str | None],
        are_equal: Callable[[Tensor, Tensor], bool] | None = None,
        keeps_whole: Callable[[nn.Module], bool] = lambda module: False,
    ) -> None:
        self._keeps_whole = keeps_whole
        self._kept: dict[Any, frozenset[int]] = {}  # by form, ids of parameters that are never split
        self._are_equal = are_equal or same_bits
        self._parameters_of = parameters_of
        self._name_of = name_of
        self._mode = SplitCalls(self)
        self._reads = GradientReads(self._refuse_read)
        self._learned: dict[Any, frozenset[int]] = {}  # by form of a segment, parameters to split
        self._read: dict[int, nn.Parameter] = {}  # by id, those whose gradients hooks look at
        self._lists = 0
        self._again: dict[Any, tuple[int, int]] = {}  # forms not all learned: the next list to try, the pause
        self._touched: dict[Any, dict[int, nn.Parameter]] = {}
        self._modules: dict[Any, list[nn.Module]] = {}  # by form, all of the segment
        self._decided: dict[Any, dict[int, nn.Parameter]] = {}  # by the forms of a list, what it splits
        self._places: frozenset[_Place] = frozenset()  # those of this list that have a W
        self._forwards: dict[Any, list[Forward]] = {}  # by form
        self.deferred: frozenset[int] = _NOTHING
        """Ids of the parameters that this list splits."""
        self._learning: dict[Any, _Place] = {}  # forms that this list learns, and where
        self._watched: list[Use] = []  # of the learning segment whose backward runs
        self._uses: dict[_Place, list[Use | LinearUse]] = {}  # what their W will find
        self._grads: dict[int, tuple[Tensor | None, int]] = {}
        self._learns = False  # the segment that runs forward
        self._backward: _Place | None = None

    # Lists ------------------------------------------------------------------------------------------------

    def begin(self, actions: Sequence[Action], states: Mapping[int, Microbatch]) -> None:
        """A list begins: decides which parameters it splits."""
        self.end()
        self._lists += 1
        later = frozenset([(a.microbatch_index, a.visit) for a in actions if a.kind is ActionKind.WEIGHT])
        if not later:
            return
        here = [
            (m, segment, states[m])
            for m in dict.fromkeys([action.microbatch_index for action in actions])
            for segment in states[m].by_visit.values()
        ]
        key = tuple(
            [
                (m, _form(state, segment), segment.commands[0] in state.forward_done)
                for m, segment, state in here
            ]
        )
        known = (later, key)
        if known not in self._decided:
            self._decided[known] = self._decide(here, later)
        # What does not want a gradient now is not touched; it may want one later.
        split = {
            number: p
            for number, p in self._decided[known].items()
            if p.requires_grad and not (p.grad is not None and p.grad._is_view())
        }
        if split:
            modules = [m for _, segment, state in here for m in self._modules[_form(state, segment)]]
            split = without_hooks(split, modules)
        self._places = later
        self.deferred = frozenset(split)
        self._grads = {number: _state_of(parameter) for number, parameter in split.items()}

    def _decide(
        self, here: Sequence[tuple[int, Segment, Microbatch]], later: frozenset[_Place]
    ) -> dict[int, nn.Parameter]:
        """The parameters that can be split in all these segments."""
        split: dict[int, nn.Parameter] = {}
        whole = set(self._read)  # also by hooks of another segment
        before: dict[int, set[int]] = {}  # touched in earlier visits of a microbatch
        for m, segment, state in here:
            touched = self._touched_by(state, segment)
            learned = _NOTHING
            if (m, segment.visit) in later and segment.commands[0] not in state.forward_done:
                learned = self._learned.get(_form(state, segment), _NOTHING)
            split.update((number, touched[number]) for number in learned)
            whole.update(touched.keys() - learned, self._kept[_form(state, segment)])
            earlier = before.setdefault(m, set())
            whole.update(touched.keys() & earlier)  # tied over segments: their sum has an order of its own
            earlier.update(touched)
        return {number: parameter for number, parameter in split.items() if number not in whole}

    @property
    def learned(self) -> list[nn.Parameter]:
        """The parameters that lists may split, by what has been seen so far."""
        return [
            p for form, keys in self._learned.items() for key, p in self._touched[form].items() if key in keys
        ]

    def _touched_by(self, state: Microbatch, segment: Segment) -> dict[int, nn.Parameter]:
        form = _form(state, segment)
        if form not in self._touched:
            self._modules[form] = _modules_of(state.recording, segment)
            self._touched[form] = {id(p): p for p in self._parameters_of(state.recording, segment)}
            owners = [state.recording.commands[index].module for index in segment.commands]
            kept = [owner for owner in owners if owner is not None and self._keeps_whole(owner)]
            self._kept[form] = frozenset([id(p) for owner in kept for p in owner.parameters()])
        return self._touched[form]

    def end(self) -> None:
        """A list has ended, or was given up."""
        self._places, self.deferred = frozenset(), _NOTHING
        self._learning.clear()
        self._watched.clear()
        self._uses.clear()
        self._grads.clear()
        self._forwards.clear()
        self._learns, self._backward = False, None

    # Forward ----------------------------------------------------------------------------------------------

    def forward(self, m: int, segment: Segment, state: Microbatch) -> contextlib.AbstractContextManager[Any]:
        """Around the forward of a segment."""
        place = (m, segment.visit)
        if place not in self._places:
            return _NO_MODE
        form = _form(state, segment)
        is_known = form in self._learned
        if is_known and form in self._again:
            is_known = self._lists < self._again[form][0]
        self._learns = not is_known and form not in self._learning
        if self._learns:
            self._learning[form] = place
            return self._mode
        if not self.deferred:
            return _NO_MODE
        if form not in self._forwards:
            self._forwards[form] = split_forwards(self._modules[form], self.deferred, self.took, self._mode)
        return installed(self._forwards[form])

    def splits(self, call: Call) -> bool:
        return all(id(p) in self.deferred for p in call.parameters)

    def watches(self, call: Call) -> bool:
        return self._learns

    def _learn(self, form: Any, agreeing: set[int], unshown: set[int]) -> None:
        before = self._learned.get(form)
        self._learned[form] = (before or _NOTHING) | agreeing
        if unshown:
            pause = 2 * self._again.get(form, (0, 0))[1] or 1
            self._again[form] = self._lists + pause, pause
        else:
            self._again.pop(form, None)
        if before is None or agreeing - before:
            self._decided.clear()
        del self._learning[form]

    # Backward ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, m: int, segment: Segment, state: Microbatch, starts: Sequence[Any]) -> Iterator[None]:
        """Around the backward of a segment, which begins at ``starts``."""
        place = (m, segment.visit)
        form = _form(state, segment)
        self._backward = place
        try:
            if self._learning.get(form) == place:
                touched = self._touched_by(state, segment)
                read: dict[int, Any] = {}
                reads = self._reads if self.deferred else _NO_MODE
                with reads, comparing(touched, starts, self._watched, read, self._are_equal) as seen:
                    yield
                known = len(self._read)
                self._read.update((key, p) for key, p in read.items() if isinstance(p, nn.Parameter))
                if len(self._read) > known:
                    self._decided.clear()
                self._learn(form, *seen)
            elif self.deferred:
                with self._reads:
                    yield
            else:
                yield
        finally:
            self._backward = None

    def took(self, use: Use | LinearUse, gradient: Tensor, split: bool) -> None:
        if not split:
            if use.gradient is None and self._backward is not None and isinstance(use, Use):
                self._watched.append(use)
        elif self._backward is None or use.gradient is not None or use.is_done:
            raise SMPError(
                f"the gradient of a call with {self._names(use.parameters)} was asked for outside of "
                "its backward (torch.autograd.grad in a module's forward?), which it was not in the first "
                "step, so gradients of parameters cannot be given later: set pipeline to 'interleaved'"
            )
        else:
            self._uses.setdefault(self._backward, []).append(use)
        use.gradient, use.gradient_version = gradient, gradient._version
        use.task = torch._C._current_graph_task_id()

    # Gradients of parameters ------------------------------------------------------------------------------

    def run(self, m: int, visit: int) -> None:
        """The action itself: gives what the backward of the segment has left."""
        done: set[int] = set()
        for use in self._uses.pop((m, visit), ()):
            if not use.is_as_it_was():
                raise SMPError(
                    f"what a call with {self._names(use.parameters)} has read, or the gradient of what it "
                    "has given, was changed in place before their gradients were made: clone() it before "
                    "the change, or set pipeline to 'interleaved'"
                )
            for parameter in use.parameters:
                if id(parameter) in done or not _same_state(parameter, self._grads[id(parameter)]):
                    raise SMPError(
                        f"the gradient of {self._names([parameter])} has come from other calls than in the "
                        "first step: more of them, or one that gives its gradient at once, since its input "
                        "is not contiguous or wants no gradient, or another parameter stands in its layer. "
                        "Where gradients of parameters are given later, how a module uses a parameter must "
                        "not depend on data; set pipeline to 'interleaved'"
                    )
                done.add(id(parameter))
            # One call after the other: what was just made is added while it is in the cache.
            for parameter, gradient in zip(use.parameters, use.made(), strict=True):
                accumulate(parameter, gradient)
                self._grads[id(parameter)] = _state_of(parameter)
            use.release()

    def _refuse_read(self, tensor: Any) -> None:
        if id(tensor) in self.deferred:
            raise SMPError(
                f"the gradient of {self._names([tensor])} is read or set within a backward (by a hook, or "
                "the backward of an autograd function), which it was not in the first step, so it is given "
                "later and not there yet: do this from the first step on, or set pipeline to 'interleaved'"
            )

    def _names(self, parameters: Iterable[nn.Parameter]) -> str:
        return "parameter " + ", ".join([repr(self._name_of(p)) for p in parameters])


def _form(state: Microbatch, segment: Segment) -> Any:
    """Segments of one form make the same calls on tensors of the same shapes, with the same parameters."""
    recording = state.recording
    commands = [recording.commands[index] for index in segment.commands]
    owners = tuple([c.parameter or id(c.module) for c in commands if c.parameter or c.module is not None])
    return recording.plan_key(), owners, segment.stage_index, segment.visit


def _modules_of(recording: Recording, segment: Segment) -> list[nn.Module]:
    owners = [recording.commands[index].module for index in segment.commands]
    return list({id(m): m for owner in owners if owner is not None for m in owner.modules()}.values())


def _state_of(parameter: nn.Parameter) -> tuple[Tensor | None, int]:
    gradient = parameter.grad
    return gradient, -1 if gradient is None else gradient._version


def _same_state(parameter: nn.Parameter, before: tuple[Tensor | None, int]) -> bool:
    now = _state_of(parameter)
    return now[0] is before[0] and now[1] == before[1]
