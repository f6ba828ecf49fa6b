"""What cannot be the plain Trainer's result is refused when the Trainer is made."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import SMPError

__all__ = ["check_accelerator", "check_model"]


def check_accelerator(accelerator: Any) -> None:
    """What environment variables ask accelerate for, beside ``TrainingArguments``.

    Raises:
        SMPError: it would wrap or compile the model.
    """
    state = accelerator.state
    asked = {
        "ACCELERATE_USE_DEEPSPEED": getattr(state, "deepspeed_plugin", None) is not None,
        "ACCELERATE_USE_FSDP": getattr(state, "fsdp_plugin", None) is not None,
        "ACCELERATE_DYNAMO_BACKEND": state.dynamo_plugin.backend.value.lower() != "no",
    }
    for variable, is_on in asked.items():
        if is_on:
            raise SMPError(
                f"the environment variable {variable} is not supported by smp_lite's Trainer: unset it"
            )


def check_model(model: nn.Module, num_cuts: int) -> None:
    """Refuses models whose batches or parameters are not like others'.

    Args:
        model: to be trained.
        num_cuts: in how many parts a batch is cut, over replicas and microbatches.

    Raises:
        SMPError: naming the module or attribute.
    """
    name = type(model).__name__
    if getattr(model, "hf_device_map", None) is not None:
        raise SMPError(f"{name} was loaded with device_map, which spreads it over devices: load it without")
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise SMPError(f"{name} is quantized, which is not supported by smp_lite's Trainer: load it without")
    if (
        getattr(model, "is_distributed_loading_by_transformers", False)
        or (getattr(model, "tp_size", None) or 1) > 1
    ):
        raise SMPError(
            f"{name} was split by transformers (tp_plan, distributed_config): load it whole, and write "
            "tensor_parallel_degree or a plan for smp.init()"
        )
    if num_cuts == 1:
        return
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            raise SMPError(
                f"{path} ({type(module).__name__}) takes the statistics of the rows that it sees, and a "
                "batch is cut "
                f"into {num_cuts} parts, so the result would not be the plain Trainer's: use "
                '"microbatches": 1 and one replica, or another norm'
            )
