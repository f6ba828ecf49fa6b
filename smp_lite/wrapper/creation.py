"""How a model is built: ``smp.model_creation`` and its parts, as far as they mean something without tensor
parallelism and delayed initialisation.

Follows the SMP API reference ("smdistributed.modelparallel.torch.model_creation"). Scripts put every model
into ``model_creation``, distributed or not, with options for kernels of distributed modules.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import SMPError
from ..record.source_line import warn_once_at_user_line

__all__ = ["delay_param_initialization", "model_creation", "set_tensor_parallelism", "tensor_parallelism"]

_OPTIONS = frozenset(
    [
        *("fused_softmax", "fused_dropout", "fused_bias_gelu", "flash_attention", "triton_flash_attention"),
        *("attention_in_fp32", "fp32_residual_addition", "query_key_layer_scaling", "use_alibi"),
        *("distribute_embedding", "zero_init"),
    ]
)
"""Of distributed modules; without them they choose nothing."""


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **options: Any
) -> Iterator[None]:
    """Within: models are built with parameters of ``dtype``.

    Args:
        tensor_parallelism: whether modules are to be distributed; True is not supported yet.
        dtype: torch's default dtype inside; None: as it is.
        options: of distributed modules; taken, and without effect.

    Raises:
        SMPError: ``tensor_parallelism=True``.
        TypeError: ``dtype`` is no floating dtype.
    """
    _refuse("model_creation(tensor_parallelism=True)", tensor_parallelism)
    _look_at_options("model_creation", options)
    if dtype is None:
        yield
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"smp.model_creation: dtype must be a floating torch.dtype, got {dtype!r}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Within: modules are to be distributed over tensor-parallel ranks; only ``enabled=False`` yet.

    Raises:
        SMPError: ``enabled``.
    """
    _refuse("tensor_parallelism(enabled=True)", enabled)
    _look_at_options("tensor_parallelism", options)
    yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Whether a module is to be distributed over tensor-parallel ranks; only ``enabled=False`` yet.

    Raises:
        SMPError: ``enabled``.
    """
    _refuse("set_tensor_parallelism(..., enabled=True)", enabled)
    _look_at_options("set_tensor_parallelism", options)


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """A hint: parameters are made at once, in every process; each keeps its own stage's at the first step.

    What they are does not change; the memory is not saved yet.
    """
    if enabled:
        warn_once_at_user_line(
            "smp.delay_param_initialization is a hint here: every process makes the whole model before the "
            "first step, and needs the memory for it"
        )
    yield


def _refuse(what: str, enabled: bool) -> None:
    if enabled:
        raise SMPError(
            f"smp.{what}: tensor parallelism is not supported yet, at degree 1 neither. Write False (AWS's "
            "GPT scripts: --use_distributed_transformer 0), and cut the model into more partitions"
        )


def _look_at_options(caller: str, options: dict[str, Any]) -> None:
    """Scripts may pass options of modules that only they know; what may be a slip is said once."""
    for name in options.keys() - _OPTIONS:
        close = difflib.get_close_matches(name, _OPTIONS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        warn_once_at_user_line(f"smp.{caller}: no distributed module knows the option {name!r}{hint}")
