"""Colossal-AI's pipeline schedules: one step of an engine, cut into microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import SMPError
from ..record.values.microbatch import StepOutput
from ..steps.step_function import StepFunction, step
from .context import colossal_plan
from .engine import Engine

__all__ = ["InterleavedPipelineSchedule", "PipelineSchedule"]

_Result = tuple[Any, Any, torch.Tensor | None]


class PipelineSchedule:
    """One forward, one backward (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", arXiv 2104.04473, section 2.2).

    Args:
        num_microbatches: into how many parts each batch is cut; it must divide the batch.
        sync_data: accepted. All ranks of a replica must load the same batch, which is checked; a rank that
            has none may give tensors of other shapes in its place, and gets that of the first stage.

    Raises:
        ValueError: it is no whole number of 1 or more.
        SMPError: the configuration has another ``num_microbatches``, or ``num_model_chunks``.
    """

    def __init__(self, num_microbatches: int, sync_data: bool = True) -> None:
        _check_count("num_microbatches", num_microbatches)
        self.num_microbatches, self.sync_data = num_microbatches, bool(sync_data)
        _, plan = colossal_plan(type(self).__name__)
        said = plan.said("microbatches")
        if not said.is_default and plan.microbatches.count != num_microbatches:
            raise SMPError(
                f"{type(self).__name__}(num_microbatches={num_microbatches}), and the configuration has "
                f"{said.key}={plan.microbatches.count}: leave one of them out"
            )
        self._steps: WeakKeyDictionary[Engine, dict[bool, StepFunction]] = WeakKeyDictionary()

    @property
    def num_chunks(self) -> int:
        """Stages on each pipeline rank that the engine's model must have."""
        return 1

    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
    ) -> _Result:
        """Takes a batch and runs it. Collective over the ranks of a replica, and over all for gradients.

        Gradients are means over microbatches and replicas, and are added to those that are there
        (``engine.zero_grad()``); ``engine.step()`` is the caller's.

        Args:
            engine: of :func:`~smp_lite.colossal.initialize`.
            data_iter: gives pairs of data and label: tensors, or dicts of them, of which data then goes to
                the model by keyword.
            forward_only: without gradients.
            return_loss: False: the criterion is not called; with ``forward_only`` alone.

        Returns:
            On the ranks of the last stage the output and the label, microbatches one after another, and the
            sum over microbatches of their losses divided by their number. (Where the model gives this rank's
            part of an output, that is this rank's part.) ``(None, None, None)`` on the others.

        Raises:
            ValueError: no loss, but a backward.
            TypeError: ``data_iter`` is no iterator, or gives no pairs.
            SMPError: the model has other chunks, or the step failed.
        """
        if not return_loss and not forward_only:
            raise ValueError("return_loss=False needs forward_only=True: a backward begins at the loss")
        session, plan = colossal_plan(type(self).__name__)
        if engine.num_chunks != self.num_chunks and plan.pp_size > 1:
            raise SMPError(
                f"{type(self).__name__} is for {self.num_chunks} chunk(s) on each pipeline rank, and the "
                f"model has {engine.num_chunks}: build it with num_chunks={self.num_chunks}, or use "
                f"{_schedule_for(engine.num_chunks)}"
            )
        data, label = _next_batch(data_iter)
        if session.cfg.microbatches != self.num_microbatches:
            # Each schedule has its own count: training and evaluation may differ.
            session.cfg = session.cfg.model_copy(update={"microbatches": self.num_microbatches})
        function = self._step_of(engine, return_loss)
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            output, labels, loss = function(data, label, is_training=not forward_only)
        if session.stage_of(session.rank) != plan.pp_size - 1:
            return None, None, None
        return _joined(output), _joined(labels), None if loss is None else loss.reduce_mean()

    def _step_of(self, engine: Engine, has_loss: bool) -> StepFunction:
        by_loss = self._steps.setdefault(engine, {})
        if has_loss not in by_loss:
            model, criterion = engine.model, engine.criterion

            def run(data: Any, label: Any, is_training: bool) -> tuple[Any, Any, Any]:
                output = model(**data) if isinstance(data, Mapping) else model(data)
                loss = criterion(output, label) if has_loss else None
                if loss is not None and is_training:
                    model.backward(loss)
                return output, label, loss

            by_loss[has_loss] = step(run)
        return by_loss[has_loss]


class InterleavedPipelineSchedule(PipelineSchedule):
    """The same over several stages on each rank (section 2.2 of the same paper).

    Args:
        num_microbatches: as of :class:`PipelineSchedule`, and a multiple of the number of pipeline ranks.
        num_model_chunks: with how many the model was built.
        sync_data: as of :class:`PipelineSchedule`.
    """

    def __init__(self, num_microbatches: int, num_model_chunks: int, sync_data: bool = True) -> None:
        super().__init__(num_microbatches, sync_data)
        _check_count("num_model_chunks", num_model_chunks)
        self.num_model_chunks = num_model_chunks
        _, plan = colossal_plan("InterleavedPipelineSchedule")
        if num_microbatches % plan.pp_size:
            above = -(-num_microbatches // plan.pp_size) * plan.pp_size
            raise ValueError(
                f"InterleavedPipelineSchedule: num_microbatches={num_microbatches} must be a multiple of the "
                f"pipeline size {plan.pp_size}; for example {above}"
            )

    @property
    def num_chunks(self) -> int:
        return self.num_model_chunks


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: it is a whole number of 1 or more")


def _schedule_for(num_chunks: int) -> str:
    if num_chunks == 1:
        return "PipelineSchedule"
    return f"InterleavedPipelineSchedule(num_model_chunks={num_chunks})"


def _next_batch(data_iter: Any) -> tuple[Any, Any]:
    if not isinstance(data_iter, Iterator):
        raise TypeError(
            f"forward_backward_step takes an iterator of batches, got {type(data_iter).__name__}: give it "
            "iter(train_dataloader), made once for each epoch"
        )
    batch = next(data_iter)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise TypeError(
            f"forward_backward_step: a batch is a pair of data and label, got a {type(batch).__name__}{size}"
        )
    return batch[0], batch[1]


def _joined(value: Any) -> Any:
    """Microbatches one after another, in the structure of one."""
    if isinstance(value, StepOutput):
        return value.stack() if value.outputs[0].dim() == 0 else value.concat()
    if isinstance(value, Mapping):
        return {key: _joined(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_joined(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
