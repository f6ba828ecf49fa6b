"""How a model is built: ``smp.model_creation`` and its parts.

Follows the SMP API reference ("smdistributed.modelparallel.torch.model_creation", tensor parallelism API).
Scripts put every model into ``model_creation``, distributed or not, with options for kernels of distributed
modules.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .. import session as session_module
from ..deferred import deferring
from ..errors import SMPError
from ..record.code.source_line import warn_once_at_user_line
from ..tensor_parallel.marks import Mark, mark, marking
from ..tensor_parallel.options import known_options

__all__ = ["delay_param_initialization", "model_creation", "set_tensor_parallelism", "tensor_parallelism"]


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **options: Any
) -> Iterator[None]:
    """Within: models are built with parameters of ``dtype``, to be distributed or not, and without memory as
    in :func:`delay_param_initialization` if the parameter ``delayed_parameter_initialization`` is True.

    Args:
        tensor_parallelism: whether modules are to be distributed, as by :func:`tensor_parallelism`.
        dtype: torch's default dtype inside; None: as it is.
        options: of distributed modules.

    Raises:
        TypeError: ``dtype`` is no floating dtype.
    """
    delay = deferring() if _is_configured() else contextlib.nullcontext()
    with _distributing("model_creation", tensor_parallelism, options), delay:
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
    """Within: modules that are made are to be distributed over the tensor-parallel ranks.

    A context, or a decorator of the function that makes the model; the innermost one wins. Modules are
    replaced in ``smp.DistributedModel()``: of nested ones the outermost that has a distributed counterpart
    (torch's Linear and Embedding, transformers' GPT-2, GPT-J, GPT-Neo, BERT and RoBERTa, and what
    ``smp.tp_register`` names), except where a module inside is made with ``enabled=False``, weights are
    shared with a module outside, or the ranks cannot share its sizes, which a warning says. At degree 1
    modules are replaced too, with the same results.

    In SMP the new modules have new weights. Here they keep those of the modules that they replace, wherever
    names and shapes say which is which, so that training equals that of the model in one process.

    Args:
        enabled: False: modules made inside stay as they are, whatever stands around.
        options: arguments of the distributed modules, which go before those that the original module gives
            them; each takes those that it knows.
    """
    with _distributing("tensor_parallelism", enabled, options):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Whether a module, with everything in it, is to be distributed, as by :func:`tensor_parallelism`.

    Args:
        module: before ``smp.DistributedModel``.

    Raises:
        TypeError: it is no module.
        SMPError: it has been wrapped already.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.set_tensor_parallelism needs a module, got {module!r}")
    model = session_module.current().model if session_module.is_initialized() else None
    if enabled and model is not None and any(part is module for part in model.modules()):
        raise SMPError(
            "smp.set_tensor_parallelism was called after smp.DistributedModel, which replaces modules: call "
            "it before"
        )
    _look_at_options("set_tensor_parallelism", options)
    mark(module, Mark(bool(enabled), options))


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Within: models are built without memory (:mod:`smp_lite.deferred`).

    Each rank makes its own part when the model is partitioned: in the first step, with one partition in
    ``smp.DistributedModel()``. Parameters are those of plain construction, to the bit, whatever the
    partition, and torch's generator goes on from where plain construction leaves it: random numbers are drawn
    at once, and dropped, so building takes as long as without delay. A context, or a decorator of the
    function that makes the model.

    Args:
        enabled: False: models made inside are made at once, whatever stands around.
    """
    with deferring(bool(enabled)):
        yield


def _is_configured() -> bool:
    """Whether the configuration asks for delay in ``model_creation``."""
    return session_module.is_initialized() and bool(
        session_module.current().cfg.delayed_parameter_initialization
    )


@contextlib.contextmanager
def _distributing(caller: str, enabled: bool, options: dict[str, Any]) -> Iterator[None]:
    _look_at_options(caller, options)
    with marking(Mark(bool(enabled), options)):
        yield


def _look_at_options(caller: str, options: dict[str, Any]) -> None:
    """Scripts may pass options of modules that only they know; what may be a slip is said once."""
    for name in options.keys() - known_options():
        close = difflib.get_close_matches(name, known_options(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        warn_once_at_user_line(f"smp.{caller}: no distributed module knows the option {name!r}{hint}")
