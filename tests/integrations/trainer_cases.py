"""One training of a tiny model, by the plain Trainer in one process or by ours in the ranks of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainingArguments

import smp_lite as smp
from tests.integrations.trainer_models import MODELS, Rows, Stream, gpt2


class Order(TrainerCallback):
    """Which events came."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.events.append("step")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.events.append("evaluate")

    def on_save(self, *_: Any, **__: Any) -> None:
        self.events.append("save")


def metrics(found: Any) -> dict[str, float]:
    predictions = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    return {"mean": float(np.mean(predictions.astype("float64")))}


def sum_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"]
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")
    return total / num_items_in_batch


def make(
    parameters: dict[str, Any] | None,
    folder: str,
    *,
    model: str = "gpt2",
    batch: int = 4,
    rows: int = 14,
    is_stream: bool = False,
    has_loss_function: bool = False,
    callbacks: list[Any] | None = None,
    **arguments: Any,
) -> Any:
    """A Trainer; the plain one where there are no parameters."""
    if parameters is None:
        kind = transformers.Trainer
    else:
        if not smp.is_initialized():
            smp.init(parameters)
        from smp_lite.integrations.transformers import Trainer as kind
    torch.manual_seed(0)
    net = MODELS[model]()
    train, evaluated = Rows(model, rows, 1), Rows(model, 7, 2)
    given = {
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "report_to": "none",
        **arguments,
    }
    return kind(
        model=net,
        args=TrainingArguments(output_dir=folder, **given),
        train_dataset=Stream(train) if is_stream else train,
        eval_dataset=evaluated,
        compute_metrics=metrics,
        compute_loss_func=sum_loss if has_loss_function else None,
        callbacks=callbacks,
    )


def logs_of(trainer: Any) -> list[dict[str, float]]:
    """What was logged, but for times."""
    times = ("runtime", "per_second", "preparation")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in times)}
        for entry in trainer.state.log_history
    ]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Of the whole model."""
    found = trainer.model_wrapped.state_dict()
    return {name: tensor.clone() for name, tensor in found.items()}


def train(
    parameters: dict[str, Any] | None,
    folder: str,
    *,
    resumes: bool = False,
    predicts: bool = False,
    saves: bool = False,
    evaluates_first: bool = False,
    own_optimizer: bool = False,
    trains_twice: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """What a training comes to: logs, weights, events, predictions."""
    order = Order()
    trainer = make(parameters, folder, callbacks=[order], **arguments)
    if evaluates_first:
        trainer.evaluate()
    if own_optimizer:
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.01, weight_decay=0.1)
    if trains_twice:
        trainer.train()
    result = trainer.train(resume_from_checkpoint=resumes)
    found = {
        "logs": logs_of(trainer),
        "loss": result.training_loss,
        "weights": weights_of(trainer),
        "events": order.events,
    }
    if predicts:
        predicted = trainer.predict(trainer.eval_dataset)
        found["predictions"] = predicted.predictions
        found["labels"] = predicted.label_ids
        found["test"] = {k: v for k, v in predicted.metrics.items() if k in ("test_loss", "test_mean")}
        found["evaluated"] = trainer.evaluate()["eval_loss"]
    if saves:
        trainer.save_model(str(Path(folder) / "final"))
        trainer.save_state()
    return found


def refusal(parameters: dict[str, Any], folder: str, *, trains: bool = False, **arguments: Any) -> str:
    """What is told."""
    try:
        trainer = make(parameters, folder, **arguments)
        if trains:
            trainer.train()
    except (smp.SMPError, ValueError) as error:
        return str(error)
    return ""


class At(TrainerCallback):
    """On one rank: saves in step 2, stops in step 3."""

    def __init__(self, rank: int) -> None:
        self.is_here = smp.rank() == rank
        self.saves = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.is_here:
            control.should_save = state.global_step == 2
            control.should_training_stop = state.global_step == 3

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saves = state.global_step


def stopped_by(parameters: dict[str, Any], folder: str, rank: int) -> tuple[int, list[str], int]:
    trainer = make(parameters, folder)
    callback = At(rank)
    trainer.add_callback(callback)
    trainer.train()
    kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return trainer.state.global_step, kept, callback.saves


def stopped_early(parameters: dict[str, Any], folder: str) -> int:
    """By a metric that gets better on rank 1, and worse on rank 0."""
    trainer = make(
        parameters,
        folder,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="own",
        greater_is_better=True,
        callbacks=[transformers.EarlyStoppingCallback(2)],
    )
    values = iter(range(1, 100))
    sign = 1 if smp.rank() else -1
    trainer.compute_metrics = lambda _: {"own": float(sign * next(values))}
    trainer.train()
    return trainer.state.global_step


def other_rows(parameters: dict[str, Any], folder: str) -> str:
    trainer = make(parameters, folder)
    trainer.train_dataset = Rows("gpt2", 14, 10 + smp.rank())
    try:
        trainer.train()
    except smp.SMPError as error:
        return str(error)
    return ""


def told_of(parameters: dict[str, Any], folder: str, what: str) -> str:
    """The error where rank 1 is given something else."""
    of_rank: dict[str, Any] = {}
    smp.init(parameters)
    if smp.rank() == 1:
        of_rank = {"rows": {"rows": 18}, "learning_rate": {"learning_rate": 0.5}}.get(what, {})
    trainer = make(parameters, folder, eval_strategy="epoch", **of_rank)
    if smp.rank() == 1 and what == "eval_rows":
        trainer.eval_dataset = Rows("gpt2", 5, 2)
    try:
        trainer.train()
    except smp.SMPError as error:
        return str(error)
    return ""


def roles(parameters: dict[str, Any], folder: str) -> tuple[bool, bool, bool]:
    trainer = make(parameters, folder)
    return trainer.is_world_process_zero(), trainer.args.should_save, trainer.args.should_log


def made_too_early() -> str:
    from accelerate import PartialState

    smp.init({"partitions": 2, "ddp": True})
    # As accelerate sees the job if nobody tells it otherwise.
    PartialState(cpu=True)
    from smp_lite.integrations.transformers import Trainer

    try:
        Trainer(gpt2(), None)
    except smp.SMPError as error:
        return str(error)
    return ""
