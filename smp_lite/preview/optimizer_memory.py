"""What an optimizer keeps, and needs while it steps, found by two steps on fake parameters.

The first step makes the state, the second one finds it there, as nearly all steps do. Numbers that the
optimizer looks at (its own step count) are a half. What cannot step like that (LBFGS wants a closure) is
estimated: see :func:`smp_lite.wrapper.cutting.schedules.optimizer_states`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from ..record.describe.live_bytes import LiveBytes
from ..record.describe.metadata import MetadataInference
from ..record.values.calls import Arguments

__all__ = ["OptimizerMemory", "optimizer_memory"]


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of the state, and of what a step needs on top while it runs; None: not known."""

    state: int
    running: int


def optimizer_memory(
    optimizer: torch.optim.Optimizer,
    stepping: Collection[torch.Tensor],
    stand_in_of: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter,
) -> OptimizerMemory:
    """Steps a copy of the optimizer on fakes of those of its parameters that have a gradient.

    Args:
        optimizer: any torch optimizer; it is left as it is.
        stepping: parameters of one stage that get gradients.
        stand_in_of: gives what is stepped in the place of a parameter (a master weight), which is counted
            with the state, and its gradient with what a step needs.

    Raises:
        Exception: whatever the optimizer raises on fake tensors.
    """
    inference = MetadataInference()
    wanted = {id(parameter) for parameter in stepping}
    twin = object.__new__(type(optimizer))  # copy.copy() would drop attributes of its own
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    for name in vars(optimizer):
        if name.startswith("_optimizer_step_") and name.endswith("_hooks"):
            twin.__dict__[name] = OrderedDict()
    groups = []
    made: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        members = [parameter for parameter in group["params"] if id(parameter) in wanted]
        fakes = [_fake(stand_in_of(parameter), inference) for parameter in members]
        made += fakes
        groups.append({**group, "params": fakes, **_kernels(group, fakes)})
    twin.param_groups = groups
    live = _OptimizerBytes([*made, *[fake.grad for fake in made if fake.grad is not None]])
    with inference.mode, live:
        twin.step()
        state = live.peak = live.alive
        twin.step()
    masters = sum(
        stand_in.numel() * stand_in.element_size()
        for parameter in stepping
        if (stand_in := stand_in_of(parameter)).dtype != parameter.dtype
    )
    return OptimizerMemory(state + masters, live.peak - state + masters)


def _fake(parameter: torch.Tensor, inference: MetadataInference) -> torch.nn.Parameter:
    fake = torch.nn.Parameter(inference.fake_arguments(Arguments.of((parameter.detach(),), {}))[0][0])
    with inference.mode:
        fake.grad = torch.empty_like(fake)
    return fake


def _kernels(group: Mapping[str, Any], fakes: list[torch.nn.Parameter]) -> dict[str, bool]:
    """Where nobody says otherwise torch steps all tensors of a device at once, but not fake ones."""
    left_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
    kinds = _get_foreach_kernels_supported_devices()
    if left_open and not group.get("differentiable") and all(fake.device.type in kinds for fake in fakes):
        return {"foreach": True}
    return {}


class _OptimizerBytes(LiveBytes):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5
        return super().__torch_dispatch__(func, types, args, dict(kwargs or {}))
