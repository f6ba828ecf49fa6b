"""A script as those of transformers' examples: the Trainer, and nothing of model parallelism in it.

It runs alone in plain torch, and under `smp-lite run` with the Trainer's own support of SMP v1.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

VOCABULARY = 101
LENGTH = 12
LABELS = 3
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH + 2,
    "num_labels": LABELS,
    # Random numbers are drawn in another order over several stages; without them all is equal.
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclass
class ScriptArguments:
    results: str = field(metadata={"help": "file for what the run found, as JSON"})
    # The parser of this version of transformers knows no `str | None`.
    model: str = field(default="", metadata={"help": "folder of a saved model; none: a new one"})
    stop_after: int = field(default=0, metadata={"help": "the step after which training stops; 0: the last"})
    replicas_order: bool = field(
        default=False, metadata={"help": "the order of samples that replicas have together"}
    )


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of several lengths, padded."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(4, VOCABULARY, (samples, LENGTH), generator=generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples, 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.tokens[self.mask == 0] = 1  # RoBERTa's padding
        self.labels = self.tokens.sum(1) % LABELS
        self.tokens[:, 0] = 4 + self.labels  # something to learn

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.tokens[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


class ExactTrainer(Trainer):
    """Notes losses that are not rounded: what the Trainer logs has four digits."""

    replicas_order = False
    noted = 0.0

    def log(self, logs: dict[str, float]) -> None:
        if "loss" in logs:
            logs["exact_loss"] = self._total_loss_scalar - self.noted  # doubles: no digit of a float is lost
            self.noted = self._total_loss_scalar
        super().log(logs)

    def _get_train_sampler(self) -> Sampler[int] | None:
        if self.replicas_order:  # of N replicas each takes every Nth sample of this order
            return DistributedSampler(self.train_dataset, num_replicas=1, rank=0, seed=self.args.seed)
        return super()._get_train_sampler()


class StopAfter(TrainerCallback):
    """Ends training early, at the learning rates of a training that goes on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        control.should_training_stop = state.global_step >= self.step


def compute_metrics(found: EvalPrediction) -> dict[str, float]:
    probabilities = torch.from_numpy(found.predictions).softmax(1)
    chosen = probabilities.gather(1, torch.from_numpy(found.label_ids)[:, None])
    return {
        "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean()),
        "probability": chosen.mean().item(),
    }


def main() -> None:
    script, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    if script.model:
        model = RobertaForSequenceClassification.from_pretrained(script.model)
    else:
        model = RobertaForSequenceClassification(RobertaConfig(**CONFIG))
    trainer = ExactTrainer(
        model=model,
        args=arguments,
        train_dataset=RandomTokens(64, seed=1),
        eval_dataset=RandomTokens(24, seed=2),
        compute_metrics=compute_metrics,
        callbacks=[StopAfter(script.stop_after)] if script.stop_after else [],
    )
    trainer.replicas_order = script.replicas_order
    results: dict[str, Any] = {}
    if arguments.do_train:
        outcome = trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", outcome.metrics)
        trainer.save_state()
        results["history"] = trainer.state.log_history
    if arguments.do_eval:
        results["metrics"] = trainer.evaluate()
    if arguments.do_predict:
        predicted = trainer.predict(RandomTokens(16, seed=3))
        results["predictions"] = np.asarray(predicted.predictions).tolist()
    if trainer.is_world_process_zero():
        os.makedirs(os.path.dirname(script.results), exist_ok=True)
        with open(script.results, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
