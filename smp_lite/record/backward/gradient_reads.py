"""Python code within a backward that looks at the gradients of parameters, or sets them.

A hook may look at another parameter's gradient, which in one process has arrived by then, or has not. Where
that parameter belongs to another stage there is none here, and where to another visit of the stage, backwards
of other microbatches have added to it. So this is an error, whatever the hook does with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import SMPError
from ..code.frames import users_line
from ..parameters.placement import Placement
from ..values.meant import meant
from ..values.torch_functions import is_metadata
from .part import Part

__all__ = ["GradientReads", "refuse_reads_elsewhere", "refuse_reads_of_changing"]

_OF_GRADIENTS = tuple(
    access
    for attribute in (Tensor.grad, Tensor._grad)
    for access in (attribute.__get__, attribute.__set__, attribute.__delete__)
)


class GradientReads(TorchFunctionMode):
    """Within a backward: tells of each tensor whose ``grad`` Python code reads or sets (hooks, own autograd
    functions)."""

    def __init__(self, on_read: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_GRADIENTS:
            self._on_read(args[0])
        return meant(func)(*args, **(kwargs or {}))


class _TensorReads(TorchFunctionMode):
    """Tells of each tensor that is given to a torch function for more than what it knows without its data."""

    def __init__(self, on_read: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = meant(func)
        # On fake tensors kernels are Python too, and none of the user's.
        is_real = torch._C._len_torch_dispatch_stack() == 0
        if is_real and not is_metadata(func, getattr(func, "__name__", "")):
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, Tensor):
                    self._on_read(value)
        return func(*args, **(kwargs or {}))


def refuse_reads_of_changing(buffers: Mapping[int, str]) -> TorchFunctionMode:
    """Around a part of a backward.

    Args:
        buffers: names, by id, of those that forwards of the step change.

    Returns:
        A mode that raises where one of them is read: forwards of later microbatches have changed it by then.
    """

    def look(tensor: Any) -> None:
        if id(tensor) in buffers:
            raise SMPError(
                f"the buffer {buffers[id(tensor)]!r} is read at {users_line()}, in code that runs within a "
                "backward (a hook, an autograd function's backward), and changed by forwards of the step: in "
                "one process each backward comes after its own forward, here forwards of other microbatches "
                "come between. Save what the backward needs (ctx.save_for_backward(buffer.clone()), a clone "
                "in the hook's closure), or set microbatches to 1"
            )

    return _TensorReads(look)


def refuse_reads_elsewhere(
    placement: Placement, part: Part, may_be_partial: Collection[str], *, is_repeated: bool
) -> GradientReads:
    """Around a part of a backward.

    Args:
        placement: of the parameters.
        part: that runs.
        may_be_partial: parameters that may be read in one of several parts that give them gradients.
        is_repeated: whether the step has several microbatches.

    Returns:
        A mode that raises where the gradient of a parameter is read or set that another part gives.
    """

    def look(tensor: Any) -> None:
        name = placement.alias(tensor)
        if name is None:
            return
        stage = placement.parameter_stage[name]
        if stage != part.stage_index:
            raise _error(
                name,
                part,
                f"that parameter belongs to stage {stage}, and stages run their backwards at the same time, "
                "and may be on several ranks. Place both on one stage (smp.set_partition)",
            )
        owners = placement.owners_of_parameter(name)
        is_partial = bool(owners & part.here) and bool(owners & part.elsewhere)
        if is_partial and name in may_be_partial:
            return
        if is_partial or (is_repeated and not part.has_all_of(owners)):
            raise _error(
                name,
                part,
                "that parameter is used in another part of the model on that stage, and such parts do not "
                "run one after the other for each microbatch. Set virtual_stages to 1, place them side by "
                "side (smp.set_partition)",
            )

    return GradientReads(look)


def _error(name: str, part: Part, why: str) -> SMPError:
    return SMPError(
        f"the gradient of the parameter {name!r} is read or set at {users_line()}, in code that runs within "
        f"a backward on stage {part.stage_index} (a hook, an autograd function's backward), where it is not "
        f"what it is in one process: {why}, or look at gradients between model.backward() and "
        "optimizer.step(), outside the step function"
    )
