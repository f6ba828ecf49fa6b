"""State that was made or loaded before the partition follows its parameters to the device."""

from __future__ import annotations

import torch

from ...devices import is_host
from ...record.parameters.away import is_away

__all__ = ["follow_parameters"]


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Moves what an optimizer keeps of each parameter to where the parameter is now.

    Numbers without dimensions, such as how many steps there were, stay on the CPU, where torch has them too,
    unless the optimizer's kernels read them there (``fused``, ``capturable``).
    """
    for group in optimizer.param_groups:
        reads_all = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            if is_away(parameter) or is_host(parameter.device):
                continue
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict):
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (value.dim() or reads_all):
                    state[key] = value.to(parameter.device)
