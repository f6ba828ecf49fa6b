"""``Trainer``: see :mod:`smp_lite.integrations.transformers`.

Source: transformers 5, ``trainer.py``. What it does in one process stays its own; only what is distributed is
done otherwise here: computing (:mod:`.computing`), files (:mod:`.saving`), decisions (:mod:`.agreement`).
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from ... import api
from ...errors import SMPError
from ...optim.norms.whole_model import clip_grad_norm_
from ...optim.optimizer import DistributedOptimizer
from ...session import current
from ...wrapper.distributed_model import DistributedModel
from .agreement import agreeing, of_rank_0, same_arguments, same_everywhere
from .arguments import data_size, of_this_rank
from .checks import check_accelerator, check_model
from .computing import Computing
from .saving import Saving
from .table import check_arguments
from .upstream import alone

__all__ = ["Trainer"]


class _Steps:
    """The optimizer, as accelerate's ``optimizer_step_was_skipped`` asks it."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def step_was_skipped(self) -> bool:
        return bool(self._optimizer.overflow)


class Trainer(Computing, Saving):
    """``transformers.Trainer`` over the ranks of an smp job; arguments as there.

    ``per_device_train_batch_size`` is of one replica: a batch of the job has as many rows for each. Every
    rank is given the same model, dataset and arguments, after ``smp.init``.

    Raises:
        SMPError: ``smp.init()`` was not called, or an argument asks for what is not supported; it is named.
    """

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *more: Any, **keywords: Any
    ) -> None:
        self._session = current()
        alone()
        args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args, self._session)
        if isinstance(model, DistributedModel):
            raise SMPError("Trainer: give it the model itself; it calls smp.DistributedModel")
        super().__init__(model, of_this_rank(args), *more, **keywords)
        check_model(self.model, num_cuts=data_size() * self._session.cfg.microbatches)
        self.callback_handler.call_event = agreeing(self._session, self.callback_handler.call_event)
        self._set_up_steps()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)
        unwrap = self.accelerator.unwrap_model

        def unwrap_model(model: Any, *args: Any, **kwargs: Any) -> Any:
            return unwrap(model.module if isinstance(model, DistributedModel) else model, *args, **kwargs)

        self.accelerator.unwrap_model = unwrap_model

    def is_world_process_zero(self) -> bool:
        return api.rank() == 0

    def is_local_process_zero(self) -> bool:
        return api.local_rank() == 0

    # Model and optimizer ------------------------------------------------------------------------------------

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The distributed model, the same one each time."""
        if self._wrapper is not None and self._wrapper.module is self.model:
            return self._wrapper
        wrapper = self._session.model
        count = getattr(self.model, "num_parameters", None)
        self._num_parameters = None if count is None else count(exclude_embeddings=True)
        if wrapper is None:
            wrapper = DistributedModel(
                self.model,
                average_grads_across_microbatches=False,  # losses are weighted, see .composition
                bucket_cap_mb=self.args.ddp_bucket_cap_mb or 25,
                broadcast_buffers=self.args.ddp_broadcast_buffers is not False,
            )
            if wrapper.module is not self.model:
                raise SMPError(
                    f"Trainer: tensor parallelism has put {type(wrapper.module).__name__} in the place of "
                    "the whole "
                    f"model {type(self.model).__name__}, which the Trainer saves and configures: mark "
                    "modules "
                    "inside it, or use a plan"
                )
            self.accelerator.prepare_model(wrapper, device_placement=False)
        elif wrapper.module is not self.model:
            raise SMPError(
                "Trainer: there is a DistributedModel of another model already, and a job has one: give the "
                "Trainer "
                "that model, or call smp.reset() and smp.init() first. (With model_init, train() makes a "
                "new model "
                "each time, so it runs once, and before evaluate())"
            )
        self.model_wrapped = wrapper
        return wrapper

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Collective over all ranks.

        Raises:
            SMPMismatch: the ranks were given other arguments or datasets.
        """
        same_arguments(self._session, self.args, resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        length = len(train_dataloader) if has_length(train_dataloader) else None
        lengths = {
            "the number of steps": str(max_steps),
            "the number of batches of train_dataset": str(length),
        }
        same_everywhere(self._session, lengths, "Trainer.train")
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        model = self._wrap_model(self.model)
        self.create_optimizer()
        if not isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer = DistributedOptimizer(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        # What the learning rate waits for, where gradients have overflowed.
        self.accelerator._optimizers.append(_Steps(self.optimizer))
        if resume_from_checkpoint is not None:
            self._same_folder(resume_from_checkpoint)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return model, train_dataloader

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._clip(model, math.inf) if grad_norm is None else grad_norm

    def _clip(self, model: Any, max_norm: float) -> Any:
        if self._is_half:
            return self.optimizer.clip_master_grads(max_norm)
        return clip_grad_norm_(model.parameters(), max_norm)

    @property
    def _is_half(self) -> bool:
        """Whether smp.init() asked for half-precision parameters, which have masters."""
        cfg = self._session.cfg
        return bool(getattr(cfg, "fp16", False) or getattr(cfg, "bf16", False))

    def floating_point_ops(self, inputs: Any) -> int:
        """As transformers counts, with the parameters of the whole model; afterwards a rank has its part."""
        main_input = getattr(self.model, "main_input_name", "input_ids")
        if self._num_parameters is None or main_input not in inputs:
            return 0
        return 6 * inputs[main_input].numel() * self._num_parameters

    # Metrics ------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Metrics of the whole dataset, rank 0's on every rank. Collective over all ranks."""
        return of_rank_0(self._session, super().evaluate(*args, **kwargs), "Trainer.evaluate")

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        length = len(dataloader) if has_length(dataloader) else None
        rows = len(dataloader.dataset) if has_length(getattr(dataloader, "dataset", None)) else None
        lengths = {"the number of batches": str(length), "the number of rows": str(rows)}
        same_everywhere(self._session, lengths, "Trainer: evaluation")
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        metrics = of_rank_0(self._session, output.metrics, "Trainer: metrics")
        return output._replace(metrics=metrics)

    # Refused ------------------------------------------------------------------------------------------------

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise SMPError(
            "Trainer.hyperparameter_search is not supported: a job has one DistributedModel. Start a job "
            "for each "
            "trial"
        )
