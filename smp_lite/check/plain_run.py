"""A step as plain torch runs it, in the child process: every call where it stands.

Two things are as in the recorded run, so that both can be compared to the bit: a backward starts with one
over the number of microbatches, and a module that the recorded run seeded for its call (dropout in a block)
is seeded alike.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import session as session_module
from ..record.code.source_line import user_line
from ..record.interception import listening
from ..record.state import random_state
from ..record.values.microbatch import merge_outputs
from ..record.values.structure import map_leaves
from ..runtime.stage.random_streams import RandomStreams
from .observe import Call, StepNotes, notes_of_state, print_of, prints, state_of

__all__ = ["PlainStep", "run_plainly"]


class _NotInferring:
    inferring = False


class PlainStep:
    """What the wrapped model finds in the place of a step that is recorded.

    Args:
        names: of the modules of the model, by id.
        recorded: labels of the calls that the recorded run made whole.
        seeded: the calls that it seeded: (microbatch, label, number).
        num_microbatches: of the step.
    """

    runs_plainly = True
    suspended = has_split_parameters = has_stale_buffers = False
    descriptions = _NotInferring()

    def __init__(
        self,
        names: dict[int, str],
        recorded: frozenset[str],
        seeded: frozenset[tuple[int, str, int]],
        num_microbatches: int,
    ) -> None:
        self.notes = StepNotes()
        self.microbatch_index = 0
        self.has_recorded_backward = False
        self.runtime: Any = None
        self._names, self._recorded, self._seeded = names, recorded, seeded
        self._num_microbatches = num_microbatches
        self._counts: Counter[tuple[int, str]] = Counter()
        self._inside = False
        self.drew = False  # whether a seeded call has
        self._streams = RandomStreams()
        self._streams.begin_step()

    # What the model and interception call -------------------------------------------------------------------

    @property
    def recorder(self) -> PlainStep:
        return self

    @property
    def not_listening(self) -> bool:
        return True

    def attribute_set(self, module: nn.Module, name: str, value: Any) -> None:
        """Nothing: every call sees the present state."""

    def meet(self, cls: type[torch.autograd.Function]) -> None:
        """Nothing: its backward runs at once."""

    def hears_hook(self, hook: Any) -> None:
        """Nothing, for the same reason."""

    def hears_checkpoint(self) -> None:
        """Nothing, either."""

    def ordinary_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def torch_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        losses = list(tensors) if isinstance(tensors, tuple | list) else [tensors]
        given = grad_tensors if isinstance(grad_tensors, tuple | list) else [grad_tensors] * len(losses)
        session = session_module.current()
        scale = 1.0 / self._num_microbatches
        if session.cfg.fp16 and session.optimizer is not None:
            scale *= session.optimizer.loss_scale
        seeds = [
            torch.full_like(loss, scale) if gradient is None else gradient * scale
            for loss, gradient in zip(losses, given, strict=True)
        ]
        # In the recorded run all backwards come after the function: two of them may share a graph.
        torch.autograd.backward(losses, seeds, retain_graph=True)

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        label = self._names.get(id(module), type(module).__name__)
        if self._inside or label not in self._recorded:
            return call(module, *args, **kwargs)
        count = (self.microbatch_index, label)
        key = (*count, self._counts[count])
        self._counts[count] += 1
        file, line = user_line()
        given, state = prints((args, kwargs)), state_of(module)
        self._inside = True
        try:
            if key in self._seeded:
                with random_state.kept():
                    self._streams.seed(self.microbatch_index, key[1:])
                    start = self._streams.state_digest()
                    result = call(module, *args, **kwargs)
                    self.drew |= self._streams.state_digest() != start
            else:
                result = call(module, *args, **kwargs)
        finally:
            self._inside = False
        self.notes.calls[key] = Call(given, prints(result), state, f"{file}:{line}")
        return result


def run_plainly(
    step: PlainStep,
    module: nn.Module,
    function: Callable[..., Any],
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
) -> StepNotes:
    """Runs the function for every microbatch; returns the notes."""
    outputs = []
    try:
        with listening(step):  # type: ignore[arg-type]
            for number, (args, kwargs) in enumerate(inputs):
                step.microbatch_index = number
                outputs.append(map_leaves(function(*args, **kwargs), _detached))
        if step.drew:
            RandomStreams.move_on()
        step.notes.outcome = {
            **notes_of_result(merge_outputs(outputs)),
            **notes_of_state(module),
            **notes_of_random_state(),
        }
    except Exception as error:
        step.notes.error = f"{type(error).__name__}: {error}"
    return step.notes


def notes_of_result(result: Any) -> dict[str, Any]:
    """Prints of what the step function returned, by place and microbatch."""
    from ..record.values.microbatch import StepOutput
    from ..record.values.structure import flatten

    leaves: list[Any] = []
    flatten(result, leaves)
    found = {}
    for i, leaf in enumerate(leaves):
        what = f"result {i}" if len(leaves) > 1 else "the result"
        if isinstance(leaf, StepOutput):
            for m, tensor in enumerate(leaf.outputs):
                found[f"{what} of microbatch {m}"] = print_of(tensor)
        else:
            found[what] = print_of(leaf)
    return found


def notes_of_random_state() -> dict[str, Any]:
    """Prints of all random streams."""
    return {
        "torch's random state": print_of(torch.get_rng_state()),
        "Python's random state": print_of(str(hash(random.getstate()))),
        "numpy's random state": print_of(str(hash(random_state.python_state()[1:]))),
    }


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
