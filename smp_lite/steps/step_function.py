"""``@smp.step``: a function that runs once for each microbatch."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from typing import Any

import torch

from .. import session as session_module
from ..errors import SMPError
from ..record.values.inputs import inputs_here
from ..record.values.microbatch import Splitter
from ..session import Session
from .batch_owner import BatchOwner
from .loader_batches import check_samples
from .static_steps import StaticSteps
from .step_context import StepContext


class StepFunction:
    """What ``@smp.step`` makes of a function.

    A callable object and no function on purpose: it is not bound as a method, so a class body may hold
    one that is called as ``self.train_step(model, batch)`` without a ``self`` parameter (SMPTrainer of
    AWS's own examples does that).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        non_split_inputs: list[str] | None = None,
        input_split_axes: dict[str, int] | None = None,
        detach_outputs: bool = True,
        splitter: Splitter | None = None,
    ) -> None:
        _check_options(non_split_inputs, input_split_axes, detach_outputs)
        self.function = function
        self.detach_outputs = detach_outputs
        self._splitter = splitter or Splitter(function, non_split_inputs or (), input_split_axes)
        self.__name__ = getattr(function, "__name__", "step")
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._static: StaticSteps = {}
        self._trains: dict[tuple[bool, bool], bool] = {}  # whether its last call of that mode had a backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = session_module.current()
        if session.step is not None:
            raise SMPError("a step function was called inside another step function: call it outside")
        if session.model is not None and session.model.is_gathered:
            raise SMPError("a step function was called inside smp.gathered(): leave it first")
        if session.model is not None:
            session.model.before_step()
        bound = self._splitter.bind(args, kwargs)
        share = "PP" if session.has_own_batches else "MP"  # who gets the same batch
        if session.world is not None and len(session.group(share)) > 1:
            if session.batch_owner is None:
                session.batch_owner = BatchOwner(session.world, share)
            bound.arguments = session.batch_owner.settle(bound.arguments)
        bound.arguments = inputs_here(bound.arguments)
        inputs = self._splitter.split(bound, session.cfg.microbatches)
        is_handed = session.batch_owner is not None and session.batch_owner.hands_over
        mode = torch.is_grad_enabled(), session.model is None or session.model.training
        trains = self._trains.get(mode, all(mode))
        context = StepContext(session, inputs, session.steps_run, is_handed_over=is_handed, trains=trains)
        session.step = context
        ordinary = contextlib.nullcontext() if session.model is None else session.model.parts_as_ordinary()
        with ordinary:
            result = self._run(session, context, inputs)
        if context.has_backward:  # evaluation may have other sizes
            check_samples(lambda: self._splitter.samples(*inputs[0]) if inputs else set())
        self._trains[mode] = context.has_backward
        session.steps_run += 1
        if session.model is not None:
            session.model.after_step(context)
        return result

    def _run(self, session: Session, context: StepContext, inputs: list[Any]) -> Any:
        """The function on all microbatches."""
        try:
            if session.checker is None:
                return context.run(self.function, self.detach_outputs, self._static)
            return session.checker.run(
                session,
                self.function,
                inputs,
                lambda: context.run(self.function, self.detach_outputs, self._static),
            )
        except BaseException as error:
            context.abandon(error)
            raise
        finally:
            session.step = None


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: list[str] | None = None,
    input_split_axes: dict[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorates a function that runs the model on one batch; it then runs once for each microbatch.

    ``@smp.step``, ``@smp.step()`` and ``@smp.step(...)`` all work. Collective over the mp group: all its
    ranks must call the function with the same batch, or those that load none with tensors of other shapes
    in its place; then it is that of pp rank 0 (:mod:`.batch_owner`).

    Args:
        function: called once for each microbatch with that part of the batch.
        non_split_inputs: names of arguments that are never cut.
        input_split_axes: batch axis by argument name; 0 for the others.
        detach_outputs: returned tensors are detached. False: with one partition they keep their graph, and
            its memory; with several a backward through them, outside of the step, is an error.

    Returns:
        The function's result with each tensor replaced by a :class:`StepOutput`, valid on every mp rank.

    Raises:
        TypeError: an option is of another kind.
        ValueError: an option names an argument that the function does not have, or two name the same.
    """

    def decorate(found: Callable[..., Any]) -> StepFunction:
        return StepFunction(
            found,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )

    if function is None:
        return decorate
    if not callable(function):
        raise TypeError(
            "smp.step takes its options by keyword: @smp.step(non_split_inputs=[...], input_split_axes={...})"
        )
    return decorate(function)


def _check_options(non_split_inputs: Any, input_split_axes: Any, detach_outputs: Any) -> None:
    """
    Raises:
        TypeError: an option is of another kind than the decorator takes.
        ValueError: an argument is in both ``non_split_inputs`` and ``input_split_axes``.
    """
    names = () if non_split_inputs is None else non_split_inputs
    axes = {} if input_split_axes is None else input_split_axes
    if not isinstance(detach_outputs, bool):
        # A text such as "no" would count as True.
        raise _wrong("detach_outputs", detach_outputs, "write True or False")
    is_list = isinstance(names, Collection) and not isinstance(names, str | bytes | Mapping)
    if not is_list or not all(isinstance(name, str) for name in names):
        way_out = "give a list of names of the function's arguments, as in non_split_inputs=['mask']"
        raise _wrong("non_split_inputs", non_split_inputs, way_out)
    if not isinstance(axes, Mapping):
        way_out = "give a dictionary of axes by argument name, as in input_split_axes={'x': 1}"
        raise _wrong("input_split_axes", input_split_axes, way_out)
    for name, axis in axes.items():
        if not isinstance(name, str):
            raise _wrong("input_split_axes", axes, f"its key {name!r} must be the name of an argument")
        if isinstance(axis, bool) or not isinstance(axis, Integral):
            way_out = f"the axis of {name!r} must be a whole number, as in {{{name!r}: 0}}"
            raise _wrong("input_split_axes", axes, way_out)
        if name in names:
            raise ValueError(
                f"smp.step: argument {name!r} is in non_split_inputs, so it is not cut, and in "
                f"input_split_axes, so it is cut along axis {axis}: leave it out of one of them"
            )


def _wrong(option: str, value: object, way_out: str) -> TypeError:
    return TypeError(f"smp.step: {option}={reprlib.repr(value)} ({type(value).__name__}): {way_out}")
