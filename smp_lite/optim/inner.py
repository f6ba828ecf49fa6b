"""What a ``DistributedOptimizer`` wraps: an optimizer of torch, or a script's own object around one.

AWS's older scripts wrap their own ``FP16_Optimizer``: no ``torch.optim.Optimizer``, but one around one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..errors import SMPError

__all__ = ["OptimizerLike", "check_around", "check_copies", "check_methods", "torch_optimizer"]

_DEEPEST = 8
_warned: set[type] = set()


@runtime_checkable
class OptimizerLike(Protocol):
    """What an object must have to be wrapped."""

    param_groups: list[dict[str, Any]]

    def step(self, closure: Any = None) -> Any: ...

    def zero_grad(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def check_methods(optimizer: Any) -> None:
    """Raises TypeError unless it has an optimizer's methods."""
    if not isinstance(optimizer, OptimizerLike):
        needed = ["param_groups", "step", "zero_grad", "state_dict", "load_state_dict"]
        lacks = [name for name in needed if not hasattr(optimizer, name)]
        raise TypeError(
            f"smp.DistributedOptimizer wraps an optimizer, got {type(optimizer).__name__}, which has no "
            f"{', '.join(lacks)}"
        )


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, or the one of torch that it has as its attribute ``optimizer``.

    Raises:
        TypeError: there is none.
    """
    found = optimizer
    for _ in range(_DEEPEST):
        # One that never called torch's __init__ has no hooks: it only passes for an optimizer (Lookahead).
        if isinstance(found, torch.optim.Optimizer) and hasattr(found, "_optimizer_step_pre_hooks"):
            return found
        found = getattr(found, "optimizer", None)
    raise TypeError(
        f"smp.DistributedOptimizer: {type(optimizer).__name__} is no torch.optim.Optimizer and has none "
        "as its attribute 'optimizer', so what it steps cannot be told: wrap the inner optimizer, or derive "
        "it from torch.optim.Optimizer"
    )


def check_around(optimizer: Any, inner: torch.optim.Optimizer) -> None:
    """Looks at an object around an optimizer that will step one stage's parameters.

    Raises:
        SMPError: it has parameter groups of its own, which go on to hold all of the model's.
    """
    if optimizer is inner:
        return
    kind = type(optimizer).__name__
    groups = optimizer.param_groups
    if len(groups) != len(inner.param_groups) or any(a is not b for a, b in zip(groups, inner.param_groups)):
        raise SMPError(
            f"{kind}.param_groups are not those of the {type(inner).__name__} inside it, so over several "
            "partitions it would go on to hold parameters of other stages: let it return "
            "self.optimizer.param_groups, or use partitions=1"
        )
    if type(optimizer) not in _warned:
        _warned.add(type(optimizer))
        warnings.warn(
            f"whether {kind}.step() treats each parameter by itself could not be found out. If it looks at "
            "all of them at once (a norm over all gradients), training over several partitions differs from "
            "one process",
            stacklevel=4,
        )


def check_copies(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Looks at what it steps before the model is cut over stages.

    Raises:
        SMPError: copies of the model's parameters (masters of a script's own) instead of these.
    """
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = set(map(id, model.parameters()))
    is_own = any(id(parameter) in own for parameter in given)
    if not is_own and given and Counter(p.shape for p in given) == Counter(p.shape for p in trained):
        raise SMPError(
            f"{type(optimizer).__name__} steps none of the model's parameters, but tensors of the same "
            "shapes: copies of them (master weights?), made before the model was cut over stages, which get "
            "no gradients of other stages. Build it with model.parameters(), and let fp16: True or bf16: "
            "True keep master weights; or use partitions=1"
        )
