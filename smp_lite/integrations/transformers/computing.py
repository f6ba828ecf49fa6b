"""Forward, backward and evaluation of one batch, over stages, microbatches and replicas."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from transformers import Trainer as PlainTrainer
from transformers.trainer_pt_utils import nested_detach

from ...devices import home
from ...errors import SMPMismatch
from ...session import Session
from ...steps.input_digests import input_digest
from ...steps.step_context import CHECK_EVERY_STEPS, FIRST_CHECKED_STEPS
from .agreement import exchange
from .arguments import data_kind, data_rank, data_size
from .composition import Composition, count_labels, label_values
from .rows import Rows, cut, join, number_of_rows
from .steps import Piece, per_piece, pieces_of, step_over_pieces

__all__ = ["Computing"]


class Computing(PlainTrainer):
    """``training_step`` and ``prediction_step``."""

    _session: Session

    def _set_up_steps(self) -> None:
        self._batches_seen = 0
        self._train_pieces = step_over_pieces(self._train_piece)
        self._evaluate_pieces = step_over_pieces(self._evaluate_piece)
        self._composition = Composition(
            lambda inputs: count_labels(*self._labels_of(inputs)),
            lambda inputs: label_values(*self._labels_of(inputs)),
            self._losses_of_rows,
            is_half=self.accelerator.mixed_precision != "no" or self._is_half,
        )
        self._ignored: list[str] = []
        self._wants_outputs = self._wants_loss = True

    # One microbatch, inside a step --------------------------------------------------------------------------

    def _train_piece(self, piece: Piece) -> torch.Tensor:
        model = self.model_wrapped
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, _own(piece.inputs), num_items_in_batch=piece.num_items)
        if piece.weight is not None:
            loss = loss * piece.weight.to(loss.dtype)
        if piece.divisor is not None:
            loss = loss / piece.divisor.to(loss.dtype)
        model.backward(loss)
        return loss

    def _evaluate_piece(self, piece: Piece) -> tuple[Any, Any]:
        """(loss or None, outputs or None)."""
        with self.compute_loss_context_manager():
            if self._wants_loss:
                loss, outputs = self.compute_loss(
                    self.model_wrapped,
                    _own(piece.inputs),
                    return_outputs=True,
                    num_items_in_batch=piece.num_items,
                )
                loss = loss.detach().mean()
            else:
                loss, outputs = None, self.model_wrapped(**piece.inputs)
        if not self._wants_outputs:
            return loss, None
        left_out = [*self._ignored, "loss"] if self._wants_loss else self._ignored
        if isinstance(outputs, dict):
            return loss, tuple(value for key, value in outputs.items() if key not in left_out)
        return loss, tuple(outputs[1:]) if self._wants_loss else outputs

    # A batch ------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a batch of all replicas; returns its loss, the same on every rank."""
        inputs = self._prepare_inputs(inputs)
        self._check_batch(inputs)
        num_rows = number_of_rows(inputs)
        cuts = self._cuts(num_rows, self.args.per_device_train_batch_size)
        if not model.partitioned and sum(map(len, cuts)) > 1:
            self._partition_by(pieces_of(inputs, num_rows, cuts[data_rank()], num_items_in_batch), True)
        weights = self._weights(inputs, num_rows, num_items_in_batch, cuts)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        counting = [rows for rows, weight in zip(chain(*cuts), chain(*weights), strict=True) if weight]
        pieces = pieces_of(
            inputs,
            num_rows,
            cuts[data_rank()],
            num_items_in_batch,
            # Gradients are means over replicas.
            [weight * data_size() for weight in weights[data_rank()]],
            None if self._is_scaled(num_items_in_batch) else self.current_gradient_accumulation_steps,
            self._row_that_counts(inputs, counting),
        )
        loss = self._train_pieces(pieces).reduce_sum()
        return self._mean_over_replicas(loss)

    def _is_scaled(self, num_items: Any) -> bool:
        """Whether the loss need not be divided by the number of batches of an optimizer step; as transformers
        decides it."""
        if self.current_gradient_accumulation_steps == 1 and self.loss_is_scaled_for_ga is None:
            return True
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return (
            self.model_accepts_loss_kwargs and num_items is not None
        ) or self.compute_loss_func is not None

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """(loss, outputs, labels) of a batch of all replicas, the same on every rank."""
        has_labels = bool(self.label_names) and all(inputs.get(k) is not None for k in self.label_names)
        returns_loss = inputs.get("return_loss")
        if returns_loss is None:
            returns_loss = self.can_return_loss
        has_loss = has_labels or (not self.label_names and returns_loss)
        inputs = self._prepare_inputs(inputs)
        self._check_batch(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = (
                getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]) if config else []
            )
        labels = None
        if has_loss:
            labels = nested_detach(tuple(inputs.get(name) for name in self.label_names))
            labels = labels[0] if len(labels) == 1 else labels

        num_rows = number_of_rows(inputs)
        cuts = self._cuts(num_rows, self.args.per_device_eval_batch_size)
        num_items = self._get_num_items_in_batch([inputs], self.args.device) if has_loss else None
        if not model.partitioned:
            self._partition_by(pieces_of(inputs, num_rows, cuts[data_rank()], num_items), has_loss)
        weights = self._weights(inputs, num_rows, num_items, cuts) if has_loss else None
        own = cuts[data_rank()]
        found = self._evaluated(
            pieces_of(inputs, num_rows, own, num_items), has_loss, not prediction_loss_only, ignore_keys
        )
        loss = None
        if weights is not None:
            terms = [
                part if weight == 1.0 else part * weight
                for (part, _), weight in zip(found, weights[data_rank()], strict=True)
                if weight
            ]
            loss = self._sum_over_replicas(
                sum(terms[1:], terms[0]) if terms else torch.tensor(0.0, device=home())
            )
        if prediction_loss_only:
            return loss, None, None
        outputs = self._outputs_of_replicas(
            [(rows, part) for rows, (_, part) in zip(own, found, strict=True) if rows.count]
        )
        if isinstance(outputs, tuple) and len(outputs) == 1:
            outputs = outputs[0]
        return loss, outputs, labels

    def _evaluated(
        self, pieces: list[Piece], wants_loss: bool, wants_outputs: bool, ignored: list[str]
    ) -> list[tuple[Any, Any]]:
        """(loss, outputs) of each piece."""
        self._wants_loss, self._wants_outputs, self._ignored = wants_loss, wants_outputs, ignored
        with torch.no_grad():
            return per_piece(self._evaluate_pieces(pieces), len(pieces))

    def _partition_by(self, pieces: list[Piece], wants_loss: bool) -> None:
        """The first step cuts the model by what its batch costs; it must not be one that only tries a loss,
        on two rows and without gradients."""
        self.model_wrapped.eval()
        self._wants_loss, self._wants_outputs = wants_loss, False
        with torch.enable_grad():
            self._evaluate_pieces(pieces)

    # Cuts and weights ---------------------------------------------------------------------------------------

    def _cuts(self, num_rows: int, per_replica: int) -> list[list[Rows]]:
        return cut(num_rows, data_size(), self._session.cfg.microbatches, per_replica)

    def _weights(
        self, inputs: Any, num_rows: int, num_items: Any, cuts: list[list[Rows]]
    ) -> list[list[float]]:
        """For each replica, of each of its cuts."""
        some = [rows for own in cuts for rows in own if rows.count]
        flat = iter(self._composition.weights(inputs, num_rows, num_items, some))
        return [[next(flat) if rows.count else 0.0 for rows in own] for own in cuts]

    def _row_that_counts(self, inputs: Any, cuts: list[Rows]) -> int:
        """A row whose loss is a number: one with labels, if there is one."""
        counts = count_labels(*self._labels_of(inputs))
        if counts is not None and any(counts):
            return next(row for row, count in enumerate(counts) if count)
        return cuts[0].start if cuts else 0

    def _labels_of(self, inputs: Any) -> tuple[Any, bool]:
        """The labels that losses count, and whether the first of each row is none."""
        if "shift_labels" in inputs:
            return inputs["shift_labels"], False
        return inputs.get("labels"), self._loss_shifts_labels

    def _losses_of_rows(self, inputs: Any, both: list[Rows], num_items: Any) -> list[float]:
        """Of two sets of rows together, and of each; in evaluation, over the stages."""
        whole = dict(inputs)
        parts = pieces_of(whole, number_of_rows(whole), both, num_items)
        together = Piece(_stacked(both, [part.inputs for part in parts]), num_items, None, None)
        model = self.model_wrapped
        was_training = model.training
        model.eval()
        try:
            found = self._evaluated([together], True, False, []) + self._evaluated(parts, True, False, [])
        finally:
            model.train(was_training)
        return [loss.item() for loss, _ in found]

    # Replicas -----------------------------------------------------------------------------------------------

    def _check_batch(self, inputs: Any) -> None:
        """All ranks must have the same batch, from which each takes its rows; in the first steps, and then
        now and then."""
        number = self._batches_seen
        self._batches_seen += 1
        if number >= FIRST_CHECKED_STEPS and number % CHECK_EVERY_STEPS:
            return
        own = input_digest([((), {"inputs": inputs})])
        found = exchange(self._session, own, "WORLD", "a batch of the Trainer")
        if len(set(found)) > 1:
            other = next(rank for rank, digest in enumerate(found) if digest != found[0])
            raise SMPMismatch(
                f"the Trainer's batch differs between rank 0 and rank {other}: every rank must have the same "
                "dataset, in the same order, with the same random numbers. The Trainer gives each replica "
                "its "
                "rows of the batch; do not split the dataset by smp.dp_rank() or smp.rank()"
            )

    def _sum_over_replicas(self, own: torch.Tensor) -> torch.Tensor:
        found = exchange(self._session, own.detach(), data_kind(), "the loss of a batch")
        return sum(found[1:], found[0])

    def _mean_over_replicas(self, own: torch.Tensor) -> torch.Tensor:
        return own.detach() if data_size() == 1 else self._sum_over_replicas(own) / data_size()

    def _outputs_of_replicas(self, own: list[tuple[Rows, Any]]) -> Any:
        """Of all rows of the batch."""
        found = exchange(self._session, own, data_kind(), "the outputs of a batch")
        return join([(Rows(*rows), part) for theirs in found for rows, part in theirs])


def _own(inputs: Any) -> Any:
    """A mapping that compute_loss may take labels out of."""
    return type(inputs)(dict(inputs)) if not isinstance(inputs, dict) else dict(inputs)


def _stacked(rows: list[Rows], parts: list[Any]) -> Any:
    return join(list(zip(rows, parts, strict=True)), "inputs")
