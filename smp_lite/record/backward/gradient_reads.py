"""Python code within a backward that looks at the gradients of parameters, or sets them.

A hook may look at another parameter's gradient, which in one process has arrived by then, or has not. Where
that parameter belongs to another stage there is none here, and where to another visit of the stage, backwards
of other microbatches have added to it. So this is an error, whatever the hook does with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import SMPError
from ..code.frames import users_line
from ..parameters.placement import Placement
from ..values.meant import meant
from .part import Part

__all__ = ["GradientReads", "refuse_reads_elsewhere"]

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
