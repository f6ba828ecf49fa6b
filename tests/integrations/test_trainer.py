"""Training by ``smp_lite.integrations.transformers.Trainer`` against the plain Trainer in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.comparing import assert_same, both

PIPELINE = {"partitions": 2}
EVALUATED = {"eval_strategy": "epoch"}
ROUNDED = 2e-4
"""Sums of other order, after several steps of AdamW."""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "bert", "t5", "llama", "gpt2-untied", "token-bert", "regression"])
@pytest.mark.sampled(7)
def test_a_pipeline_is_the_plain_trainer_to_the_bit(tmp_path: Path, model: str) -> None:
    plain, ours = both(tmp_path, PIPELINE, 2, model=model, predicts=True, **EVALUATED)
    # The embedding of T5 is used three times, and its gradients are summed in another order.
    assert_same(plain, ours, 1e-6 if model == "t5" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {
            "gradient_accumulation_steps": 3,
            "weight_decay": 0.1,
            "optim": "adafactor",
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
        },
        {"bf16": True, "use_cpu": True},
        {"activation_checkpointing": True},
        {
            "train_sampling_strategy": "group_by_length",
            "label_smoothing_factor": 0.1,
            "neftune_noise_alpha": 5,
            "data_seed": 3,
        },
        {"optim": "sgd", "max_grad_norm": 0.05, "dataloader_num_workers": 1, "dataloader_drop_last": True},
        {"is_stream": True, "max_steps": 5, "optim": "rmsprop", "max_grad_norm": 0.0},
        {"has_loss_function": True, "gradient_accumulation_steps": 2, "optim": "adagrad"},
        {"include_num_input_tokens_seen": "all", "lr_scheduler_type": "reduce_lr_on_plateau"},
        {"prediction_loss_only": True, "eval_on_start": True, "logging_first_step": True, "adam_beta2": 0.9},
        {"evaluates_first": True, "own_optimizer": True, "trains_twice": True},
        {"model": "bert", "gradient_accumulation_steps": 2, "batch_eval_metrics": False, "eval_steps": 2},
    ],
)
@pytest.mark.sampled(6)
def test_training_arguments_mean_what_they_mean_to_the_plain_trainer(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    plain, ours = both(tmp_path, PIPELINE, 2, **{**EVALUATED, **arguments})
    assert_same(plain, ours)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("gpt2", {}),
        ("bert", {"gradient_accumulation_steps": 2}),
        ("token-bert", {}),
        ("t5", {}),
        ("gpt2", {"label_smoothing_factor": 0.1}),
        ("gpt2", {"has_loss_function": True}),
        ("several-labels", {}),
        ("regression", {"max_grad_norm": 0.05}),
        ("llama", {"bf16": True, "use_cpu": True}),
    ],
)
@pytest.mark.sampled(5)
def test_microbatches_make_the_loss_of_the_batch(
    tmp_path: Path, model: str, arguments: dict[str, Any]
) -> None:
    plain, ours = both(
        tmp_path, {"partitions": 2, "microbatches": 4}, 2, batch=8, model=model, **EVALUATED, **arguments
    )
    # bf16 rounds each microbatch's sums.
    assert_same(plain, ours, 0.05 if "bf16" in arguments else ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "parameters"),
    [
        ("token-bert", 2, {"partitions": 1, "microbatches": 2, "ddp": True}),
        ("gpt2", 4, {"partitions": 2, "microbatches": 2, "ddp": True}),
        ("t5", 4, {"partitions": 2, "ddp": True}),
        ("bert", 4, {"partitions": 1, "horovod": True}),
    ],
)
@pytest.mark.sampled(4)
def test_replicas_share_the_rows_of_the_plain_trainers_batch(
    tmp_path: Path, model: str, ranks: int, parameters: dict[str, Any]
) -> None:
    # 13 rows: in the last batch there is one, for the first replica alone.
    replicas = ranks // parameters["partitions"]
    plain, ours = both(
        tmp_path, parameters, ranks, replicas, batch=4, rows=13, model=model, predicts=True, **EVALUATED
    )
    assert_same(plain, ours, ROUNDED)
