"""A model without data (``torch.device("meta")``) becomes one that is initialized later.

One process would do: ``to_empty``, and the modules' own ``reset_parameters`` (``_reset_parameters``), inner
modules first, as in ``nn.Module.apply``; a ``transformers`` model inside is initialized by its own rules,
``initialize_weights``. The same is done here under :func:`~.context.deferring`. Parameters stay the same
objects, and tied ones tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import SMPError
from .context import deferring
from .dispatch import is_deferred, script_attributes
from .replay import is_written, plainly

__all__ = ["check_filled", "initialise_meta", "unfilled"]


def initialise_meta(root: nn.Module, is_part: Callable[[torch.Tensor], bool] = lambda tensor: False) -> bool:
    """Gives a model on meta deferred parameters and buffers; False: it has none on meta.

    Args:
        root: the model.
        is_part: of a parameter: whether it is one rank's part of the model's, which modules would initialise
            as if it were all. Nothing is written to those.
    """
    metas = {id(tensor): tensor for tensor in (*root.parameters(), *root.buffers()) if _is_bare(tensor)}
    if not metas:
        return False
    bare = [
        m
        for m in root.modules()
        if any(id(t) in metas for t in (*m._parameters.values(), *m._buffers.values()))
    ]
    for tensor in metas.values():
        _become_empty(tensor, dict(tensor.__dict__))
    with deferring(), torch.no_grad():
        _initialise(root, {id(module) for module in bare})
    for tensor in metas.values():
        if is_part(tensor):
            _become_empty(tensor, script_attributes(tensor))
    return True


def _become_empty(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """It waits from now on, and nothing is written to it yet."""
    with deferring():
        empty: Any = torch.empty_like(tensor, device="cpu")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
    empty.__dict__.update(attributes)
    with plainly():
        torch.utils.swap_tensors(tensor, empty)


def _is_bare(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_meta


def _initialise(module: nn.Module, bare: set[int]) -> None:
    own_rules = getattr(module, "initialize_weights", None)
    if callable(own_rules) and callable(getattr(module, "_init_weights", None)):
        for part in module.modules():
            part.__dict__.pop("_is_hf_initialized", None)  # it was, without data
        own_rules()
        return
    for child in module.children():
        _initialise(child, bare)
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset) and any(id(part) in bare for part in module.modules()):
            reset()
            return


def unfilled(root: nn.Module) -> list[str]:
    """Names of deferred parameters and buffers to which nothing has been written."""
    return [
        name
        for name, tensor in (*root.named_parameters(), *root.named_buffers())
        if is_deferred(tensor) and not is_written(tensor.smp_memory)  # type: ignore[attr-defined]
    ]


def check_filled(root: nn.Module, filled_later: Iterable[str] = ()) -> None:
    """Raises SMPError where nothing is written to a parameter or buffer before the first step.

    Args:
        root: a model that was on meta.
        filled_later: names that a state dict will fill.
    """
    later = set(filled_later)
    lacking = [name for name in unfilled(root) if name not in later]
    if lacking:
        raise SMPError(
            f"{', '.join(lacking[:5])} of a model that was built on the meta device: nothing initializes "
            "them, neither reset_parameters() of their module nor rules of transformers (nor a rank its "
            "part alone of what is split already). Give the module a reset_parameters(), load a checkpoint "
            "before the first step, or build the model under "
            "smp.delay_param_initialization instead of torch.device('meta')"
        )
