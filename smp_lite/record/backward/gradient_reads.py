"""Python code within a backward that looks at the gradients of parameters, or sets them.

A hook may look at another parameter's gradient, which in one process has arrived by then, or has not. Where
that parameter belongs to another stage there is none here, and where to another visit of the stage, backwards
of other microbatches have added to it. So this is an error, whatever the hook does with it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import SMPError
from ..code.frames import users_line
from ..parameters.placement import Placement
from ..values.meant import meant
from ..values.memory import storage_of
from ..values.torch_functions import is_metadata
from .part import Part

__all__ = ["GradientReads", "parameter_reads", "refuse_reads_elsewhere", "refuse_reads_of_changing"]

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


class _Gradient:
    """In the place of ``Parameter.grad``: tells of who reads or sets it. A function mode would switch torch's
    fused kernels off."""

    def __init__(self, on_read: Callable[[Any], None]) -> None:
        self._on_read = on_read

    def __get__(self, tensor: Any, owner: type) -> Any:
        if tensor is None:
            return self
        self._on_read(tensor)
        return Tensor.grad.__get__(tensor, owner)

    def __set__(self, tensor: Any, value: Any) -> None:
        self._on_read(tensor)
        Tensor.grad.__set__(tensor, value)

    def __delete__(self, tensor: Any) -> None:
        self._on_read(tensor)
        Tensor.grad.__delete__(tensor)


@contextlib.contextmanager
def parameter_reads(on_read: Callable[[Any], None]) -> Iterator[None]:
    """Within: tells of each parameter whose ``grad`` Python code reads or sets."""
    own = {name: vars(nn.Parameter)[name] for name in ("grad", "_grad") if name in vars(nn.Parameter)}
    for name in ("grad", "_grad"):
        setattr(nn.Parameter, name, _Gradient(on_read))
    try:
        yield
    finally:
        for name in ("grad", "_grad"):
            if name in own:
                setattr(nn.Parameter, name, own[name])
            else:
                delattr(nn.Parameter, name)


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
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, Tensor):
                        self._on_read(item)
        return func(*args, **(kwargs or {}))


def refuse_reads_of_changing(buffers: Mapping[int, str]) -> TorchFunctionMode:
    """Around a part of a backward.

    Args:
        buffers: names, by id, of those that forwards of the step change.

    Returns:
        A mode that raises where one of them is read: forwards of later microbatches have changed it by then.
    """

    def look(tensor: Any) -> None:
        memory = storage_of(tensor)
        if memory is not None and memory in buffers and not _computes_again():
            raise SMPError(
                f"the buffer {buffers[memory]!r} is read at {users_line()}, in code that runs within a "
                "backward (a hook, an autograd function's backward), and changed by forwards of the step: in "
                "one process each backward comes after its own forward, here forwards of other microbatches "
                "come between. Save what the backward needs (ctx.save_for_backward(buffer.clone()), a clone "
                "in the hook's closure), or set microbatches to 1"
            )

    return _TensorReads(look)


def _computes_again() -> bool:
    """Whether a checkpoint runs forward code, which reads what it has read before."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


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
