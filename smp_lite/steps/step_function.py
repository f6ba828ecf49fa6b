"""``@smp.step``: a function that runs once for each microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import session as session_module
from ..errors import SMPError
from ..record.values.inputs import inputs_here
from ..record.values.microbatch import Splitter
from .batch_owner import BatchOwner
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
        self.function = function
        self.detach_outputs = detach_outputs
        self._splitter = splitter or Splitter(function, non_split_inputs or (), input_split_axes)
        self.__name__ = getattr(function, "__name__", "step")
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._static: StaticSteps = {}

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
        context = StepContext(session, inputs, session.steps_run, is_handed_over=is_handed)
        session.step = context
        try:
            if session.checker is None:
                result = context.run(self.function, self.detach_outputs, self._static)
            else:
                result = session.checker.run(
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
        session.steps_run += 1
        if session.model is not None:
            session.model.after_step(context)
        return result


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
