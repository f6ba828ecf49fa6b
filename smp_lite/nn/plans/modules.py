"""Modules of a model that is split by a plan, and that are no Linear or Embedding of torch.

Each class here is mixed in before the module's own, so what it overrides wraps the module's own.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from ...comm.groups.axis import Axis
from ...errors import SMPError
from ..autocast import cast_for_autocast
from ..layout import ParameterLayout
from ..one_d.operations import copy_to_ranks, gather_along, split_along, sum_over_ranks
from ..one_d.parts import SplitModule, check_divides, layout_over, next_multiple

__all__ = [
    "ColumnParallelConv1D",
    "IdentityShare",
    "RowParallelConv1D",
    "SplitHeads",
    "SplitParameters",
    "SummandModule",
    "SummedOutput",
    "WithSharedTail",
    "mix_in",
]


def mix_in(module: nn.Module, kind: type[nn.Module]) -> None:
    """Changes a module's class to one that is a ``kind`` too; all that it holds stays.

    A split layer of torch stands behind the module's own class, in place of torch's dense layer, and what
    wraps a module's forward before it.
    """
    own = type(module)
    if issubclass(kind, own):
        module.__class__ = kind
    elif not issubclass(own, kind):
        behind = issubclass(kind, nn.Linear | nn.Embedding | nn.Dropout)
        module.__class__ = _mixed(own, kind, own) if behind else _mixed(kind, own, own)


@functools.cache
def _mixed(first: type[nn.Module], second: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (first, second), {"__module__": own.__module__, "__doc__": own.__doc__})


class SplitParameters(SplitModule):
    """Bare parameters are split; the module's own code does the rest."""


class SplitHeads(nn.Module):
    """An attention of which this rank has some heads. Its output is whole, its attention weights are not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("output_attentions")
        if asked is None:
            asked = getattr(getattr(self, "config", None), "output_attentions", False)
        if asked or _captures_attentions():
            raise SMPError(
                f"output_attentions=True: each rank has some of the heads of {type(self).__name__}, and "
                "would return the attention weights of these alone: leave output_attentions out, or run the "
                "model for them without tensor parallelism"
            )
        return super().forward(*args, **kwargs)


def _captures_attentions() -> bool:
    """Whether a model of ``transformers`` that runs now keeps what its attentions return."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    kept = None if collector is None else collector.get()
    return bool(kept) and any("attentions" in str(key) for key in kept)


class ColumnParallelConv1D(SplitModule):
    """``transformers``' Conv1D, a linear layer with a transposed weight ``(in, out)``, split by output
    features."""

    @staticmethod
    def layouts(
        dense: Any,
        axis: Axis,
        *,
        gather_output: bool = False,
        sections: tuple[int, ...] | None = None,
        pad: bool = False,
    ) -> dict[str, ParameterLayout]:
        """As :meth:`smp_lite.nn.one_d.ColumnParallelLinear.layouts`."""
        if not pad:
            for size in sections or (dense.nf,):
                check_divides("Conv1D: the number of output features", size, axis)
        padded = next_multiple(dense.nf, axis.size) if pad else None
        return {
            "weight": layout_over(dense.weight, axis, 1, sections=sections, padded=padded),
            "bias": layout_over(dense.bias, axis, 0, sections=sections, padded=padded),
        }

    def split(self, axis: Axis, shared: dict[int, nn.Parameter] | None = None, **options: Any) -> None:
        """As :meth:`smp_lite.nn.one_d.ColumnParallelLinear.split`."""
        layouts = ColumnParallelConv1D.layouts(self, axis, **options)
        self.axis, self.gather_output = axis, options.get("gather_output", False)
        self.keep_parts(layouts, shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = copy_to_ranks(x, self.axis) @ self.weight + cast_for_autocast(self.bias)[0]
        if not self.gather_output:
            return output
        return gather_along(output, self.axis, -1, gradients="same").narrow(-1, 0, self.nf)


class RowParallelConv1D(SplitModule):
    """``transformers``' Conv1D split by input features."""

    @staticmethod
    def layouts(dense: Any, axis: Axis, *, input_is_parallel: bool = True) -> dict[str, ParameterLayout]:
        """As :meth:`smp_lite.nn.one_d.RowParallelLinear.layouts`."""
        check_divides("Conv1D: the number of input features", dense.weight.shape[0], axis)
        return {"weight": layout_over(dense.weight, axis, 0), "bias": layout_over(dense.bias, axis, None)}

    def split(self, axis: Axis, shared: dict[int, nn.Parameter] | None = None, **options: Any) -> None:
        """As :meth:`smp_lite.nn.one_d.RowParallelLinear.split`."""
        layouts = RowParallelConv1D.layouts(self, axis, **options)
        self.axis, self.input_is_parallel = axis, options.get("input_is_parallel", True)
        self.keep_parts(layouts, shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.input_is_parallel else split_along(x, self.axis, -1)
        return sum_over_ranks(x @ self.weight, self.axis) + cast_for_autocast(self.bias)[0]


class SummandModule(SplitModule):
    """What its own code computes is this rank's summand: of the output, and of the inputs' gradients.

    Mixtures of experts whose experts are all split: the routing weights are whole on every rank, and each
    computes with its part of every expert.
    """

    axis: Axis

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = [_copied(value, self.axis) for value in args]
        copied_too = {name: _copied(value, self.axis) for name, value in kwargs.items()}
        return sum_over_ranks(super().forward(*copied, **copied_too), self.axis)


class SummedOutput(SplitModule):
    """What its own code computes is this rank's summand of the output; its layers see to the input."""

    axis: Axis

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return sum_over_ranks(super().forward(*args, **kwargs), self.axis)


class IdentityShare(SplitModule):
    """An expert without weights in a :class:`SummandModule`: the ranks' outputs add up to what it gives."""

    axis: Axis

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(input / self.axis.size, *args, **kwargs)


class WithSharedTail(SplitModule):
    """A whole projection whose last features go to split heads directly, and the others to a split layer.

    Of the last ones (rotary keys in multi-head latent attention) each rank has a summand of the gradient; for
    the others the split layer adds them up.
    """

    axis: Axis
    smp_tail: int

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = super().forward(*args, **kwargs)
        head, tail = output.split([output.shape[-1] - self.smp_tail, self.smp_tail], -1)
        return torch.cat([head, copy_to_ranks(tail, self.axis)], -1)


def _copied(value: Any, axis: Axis) -> Any:
    return (
        copy_to_ranks(value, axis) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )
