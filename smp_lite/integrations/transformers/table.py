"""What becomes of each field of ``TrainingArguments``: it works, changes nothing, or is refused by name.

Every field of the transformers installed is in one of the three lists (a test sees to it). A field that is in
none, of a newer transformers or of a class of the script's own, is refused where it is not at its default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...errors import SMPError
from ...session import Session

__all__ = ["NO_EFFECT", "OPTIMIZERS", "REFUSED", "WORKS", "check_arguments", "refused"]

_WORKS = """
output_dir do_train do_eval do_predict resume_from_checkpoint
per_device_train_batch_size per_device_eval_batch_size num_train_epochs max_steps
gradient_accumulation_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
label_smoothing_factor label_names neftune_noise_alpha bf16
activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
gradient_checkpointing_kwargs seed data_seed full_determinism use_cpu accelerator_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
train_sampling_strategy length_column_name
logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics
eval_strategy eval_steps eval_delay prediction_loss_only eval_on_start eval_do_concat_batches
eval_accumulation_steps include_for_metrics batch_eval_metrics
save_only_model save_strategy save_steps save_on_each_node save_total_limit
load_best_model_at_end metric_for_best_model greater_is_better
ignore_data_skip restore_callback_states_from_checkpoint
push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
ddp_bucket_cap_mb ddp_broadcast_buffers
"""
WORKS = frozenset(_WORKS.split())

NO_EFFECT = {
    "average_tokens_across_devices": "tokens are counted over the whole batch, as in one process",
    "ddp_find_unused_parameters": "parameters without gradient are always found",
    "ddp_static_graph": "an optimisation of DDP",
    "eval_use_gather_object": "nothing is gathered: each rank has the outputs of the whole batch",
    "local_rank": "ranks are those of smp.init()",
    "optim_target_modules": "of optimizers that are refused",
    "tf32": "of GPUs",
    "torch_empty_cache_steps": "of memory that a GPU's allocator keeps",
    "torch_compile_backend": "of torch_compile, which is refused",
    "torch_compile_mode": "of torch_compile, which is refused",
    "liger_kernel_config": "of use_liger_kernel, which is refused",
    "fsdp_config": "of fsdp, which is refused",
}

_SHARDED = (
    "the library does that itself: sharded parameters by a configuration with an fsdp axis, pipelines and "
    "replicas "
    "by smp.init({...})"
)
_WHOLE_EVALUATION = (
    "it casts the whole model, which lies on several ranks: leave it out, and use bf16=True to compute in "
    "half "
    "precision"
)

REFUSED = {
    "auto_find_batch_size": (
        "memory ends on one rank alone: choose per_device_train_batch_size, or more microbatches"
    ),
    "bf16_full_eval": _WHOLE_EVALUATION,
    "ddp_backend": 'write "ddp_dist_backend" in the parameters of smp.init()',
    "ddp_timeout": "how long a rank waits for another is smp.set_watchdog(seconds), or SMP_LITE_WATCHDOG_S",
    "debug": "it reads what each module computes, which lies on other ranks: run the plain Trainer for it",
    "deepspeed": _SHARDED,
    "enable_jit_checkpoint": (
        "its signal comes to each rank at another moment: let a callback set control.should_save and "
        "control.should_training_stop where smp.should_stop() is true"
    ),
    "fp16": "without a GPU fp16 is not there in the plain Trainer either: use bf16=True with use_cpu=True",
    "fp16_full_eval": _WHOLE_EVALUATION,
    "fsdp": _SHARDED,
    "parallelism_config": _SHARDED,
    "torch_compile": "modules are recorded as they are, and a compiled one is none of them: leave it out",
    "use_cache": "a cache of keys and values is changed by every block, on several ranks: leave it out",
    "use_liger_kernel": "it replaces the forward of modules by kernels of GPUs: leave it out",
}

OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd"})
"""Of ``optim``; others need GPUs, packages of their own, or all parameters in one process."""

_IS_DEFAULT = (None, False, "", [], {}, 1800)
"""What a refused field may be; 1800 is ``ddp_timeout``'s."""


def check_arguments(args: Any, session: Session) -> None:
    """Refuses what is not supported.

    Raises:
        SMPError: naming the argument, its value and the way out.
    """
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in REFUSED:
            if not any(value == default for default in _IS_DEFAULT):
                raise refused(field.name, value, REFUSED[field.name])
        elif field.name not in WORKS and field.name not in NO_EFFECT and value != _default_of(field):
            raise refused(field.name, value, "it is not known here: leave it at its default")
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer not in OPTIMIZERS:
        raise refused(
            "optim",
            optimizer,
            f"choose one of {', '.join(sorted(OPTIMIZERS))}, or give optimizers=(your own, None)",
        )
    for key in ("fp16", "bf16"):
        if args.bf16 and getattr(session.cfg, key, False):
            raise refused(
                "bf16",
                True,
                f'"{key}": True of smp.init() does that already, for parameters and optimizer too: leave '
                "one out",
            )


def _default_of(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def refused(name: str, value: Any, way_out: str) -> SMPError:
    return SMPError(f"TrainingArguments({name}={value!r}) is not supported by smp_lite's Trainer: {way_out}")
