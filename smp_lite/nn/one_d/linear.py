"""Linear layers split over one axis by output or by input features (Shoeybi et al. 2019, section 3).

One of each kind, with elementwise functions between them, cost one all-reduce in forward and one in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...comm.groups.axis import Axis
from ..autocast import cast_for_autocast
from ..layout import ParameterLayout
from .operations import copy_to_ranks, gather_along, reduce_scatter_along, split_along, sum_over_ranks
from .parts import SplitModule, check_divides, layout_over, next_multiple, shallow_copy, whole

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "SharedRowsLinear", "join_sections"]


class _SplitLinear(SplitModule, nn.Linear):
    """What they share. ``in_features`` and ``out_features`` are those of the whole layer."""

    axis: Axis

    def to_dense(self) -> nn.Linear:
        """The whole layer; collective over the axis."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        dense.weight = whole(self.weight)
        if self.bias is not None:
            dense.bias = whole(self.bias)
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, axis={self.axis.name!r}, ranks={self.axis.size}"


class ColumnParallelLinear(_SplitLinear):
    """``torch.nn.Linear`` split by output features.

    The input ``(..., in_features)`` is whole on every rank. The output is ``(..., out_features / ranks)``,
    this rank's features; with ``gather_output`` it is whole. In backward the input's gradient is summed over
    the ranks.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``; weights are drawn as it
            draws them, so the same seed gives the same layer.
        axis: the ranks that share it.
        gather_output: every rank gets all output features.
        sections: sizes of several matrices that stand one after another in the output (query, key and value
            in one); each is split for itself, and a rank's output has its part of each.
        sequence_parallel: the input is this rank's part ``(..., sequence / ranks, in_features)``; it is
            gathered, and its gradient scattered, along the dimension before the last (Korthikanti et al.).
        pad: ``out_features`` need not divide: zero rows are added. For a vocabulary; without
            ``gather_output`` the last ranks' output then has padding at its end, which
            :func:`~smp_lite.nn.one_d.vocab_parallel_cross_entropy` ignores.

    Raises:
        ValueError: the ranks cannot share the output features (or a section) equally; names the nearest
            sizes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        axis: Axis,
        gather_output: bool = False,
        sections: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        pad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.split(
            axis,
            gather_output=gather_output,
            sections=sections,
            sequence_parallel=sequence_parallel,
            pad=pad,
        )

    @classmethod
    def from_dense(
        cls,
        dense: nn.Linear,
        axis: Axis,
        *,
        gather_output: bool = False,
        sections: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        pad: bool = False,
    ) -> ColumnParallelLinear:
        """This rank's part of a layer that all ranks hold; arguments as in the constructor."""
        layer = shallow_copy(cls, dense)
        layer.split(
            axis,
            gather_output=gather_output,
            sections=sections,
            sequence_parallel=sequence_parallel,
            pad=pad,
        )
        return layer

    @classmethod
    def layouts(
        cls,
        dense: nn.Linear,
        axis: Axis,
        *,
        gather_output: bool = False,
        sections: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        pad: bool = False,
    ) -> dict[str, ParameterLayout]:
        """How the parameters of a dense layer would lie; raises as the constructor does."""
        if sections is not None and pad:
            raise ValueError(f"sections={list(sections)} with pad=True: padding would move sections")
        if sections is not None and sum(sections) != dense.out_features:
            raise ValueError(
                f"sections={list(sections)} add up to {sum(sections)}, out_features is {dense.out_features}"
            )
        if not pad:
            what = "out_features" if sections is None else "a section of the output features"
            for size in sections or (dense.out_features,):
                check_divides(f"{cls.__name__}: {what}", size, axis)
        padded = next_multiple(dense.out_features, axis.size) if pad else None
        found = None if sections is None else tuple(sections)
        return {
            name: layout_over(parameter, axis, 0, sections=found, padded=padded)
            for name, parameter in (("weight", dense.weight), ("bias", dense.bias))
            if parameter is not None
        }

    def split(self, axis: Axis, shared: dict[int, nn.Parameter] | None = None, **options: Any) -> None:
        """Keeps this rank's part of the dense parameters that it holds so far.

        Args:
            shared: see :meth:`~smp_lite.nn.one_d.parts.SplitModule.keep_parts`.
            options: of the constructor.
        """
        layouts = ColumnParallelLinear.layouts(self, axis, **options)
        self.axis = axis
        self.gather_output = options.get("gather_output", False)
        self.sequence_parallel = options.get("sequence_parallel", False)
        sections = options.get("sections")
        self.sections = None if sections is None else tuple(sections)
        self.keep_parts(layouts, shared)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            x = gather_along(input, self.axis, -2, gradients="summand")
        else:
            x = copy_to_ranks(input, self.axis)
        output = F.linear(x, self.weight, self.bias)
        if not self.gather_output:
            return output
        found = gather_along(output, self.axis, -1, gradients="same")
        return join_sections(found, self.axis, self.sections).narrow(-1, 0, self.out_features)


def join_sections(gathered: torch.Tensor, axis: Axis, sections: tuple[int, ...] | None) -> torch.Tensor:
    """The ranks' features, one rank after another, in the order of the sections."""
    if sections is None or axis.size == 1:
        return gathered
    sizes = [size // axis.size for size in sections]
    by_rank = [part.split(sizes, -1) for part in gathered.chunk(axis.size, -1)]
    return torch.cat([piece for section in zip(*by_rank, strict=True) for piece in section], -1)


class RowParallelLinear(_SplitLinear):
    """``torch.nn.Linear`` split by input features.

    The input is this rank's features, ``(..., in_features / ranks)``, as a column-parallel layer leaves them;
    the output ``(..., out_features)`` is the sum over the ranks, whole on every one, with the bias added
    once.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        axis: the ranks that share it.
        input_is_parallel: False: the input has all features on every rank; each takes its own.
        sequence_parallel: the output is this rank's part ``(..., sequence / ranks, out_features)`` along the
            dimension before the last. Then the bias meets only its rank's tokens, and the ranks' gradients of
            it are summands.

    Raises:
        ValueError: the ranks cannot share the input features equally; names the nearest sizes. In forward:
            the input has another number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        axis: Axis,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.split(axis, input_is_parallel=input_is_parallel, sequence_parallel=sequence_parallel)

    @classmethod
    def from_dense(
        cls, dense: nn.Linear, axis: Axis, *, input_is_parallel: bool = True, sequence_parallel: bool = False
    ) -> RowParallelLinear:
        """This rank's part of a layer that all ranks hold; arguments as in the constructor."""
        layer = shallow_copy(cls, dense)
        layer.split(axis, input_is_parallel=input_is_parallel, sequence_parallel=sequence_parallel)
        return layer

    @classmethod
    def layouts(
        cls, dense: nn.Linear, axis: Axis, *, input_is_parallel: bool = True, sequence_parallel: bool = False
    ) -> dict[str, ParameterLayout]:
        """How the parameters of a dense layer would lie; raises as the constructor does."""
        check_divides(f"{cls.__name__}: in_features", dense.in_features, axis)
        layouts = {"weight": layout_over(dense.weight, axis, 1)}
        if dense.bias is not None:
            layouts["bias"] = layout_over(dense.bias, axis, None, partial=sequence_parallel)
        return layouts

    def split(self, axis: Axis, shared: dict[int, nn.Parameter] | None = None, **options: Any) -> None:
        """As :meth:`ColumnParallelLinear.split`."""
        layouts = RowParallelLinear.layouts(self, axis, **options)
        self.axis = axis
        self.input_is_parallel = options.get("input_is_parallel", True)
        self.sequence_parallel = options.get("sequence_parallel", False)
        self.keep_parts(layouts, shared)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input if self.input_is_parallel else split_along(input, self.axis, -1)
        summand = F.linear(x, self.weight)
        if self.sequence_parallel:
            output = reduce_scatter_along(summand, self.axis, -2)
        else:
            output = sum_over_ranks(summand, self.axis)
        return output if self.bias is None else output + cast_for_autocast(self.bias)[0]


class SharedRowsLinear(_SplitLinear):
    """``torch.nn.Linear`` that every rank holds whole, to compute only some output features, perhaps the same
    as another rank (key and value heads, where there are fewer than ranks).

    The ranks' gradients of its parameters are summands, and so are those of its input, which backward adds up
    where ``copies_input`` says that nobody else does.
    """

    @classmethod
    def from_dense(
        cls, dense: nn.Linear, axis: Axis, *, rows: range, copies_input: bool = True
    ) -> SharedRowsLinear:
        """The layer on this rank, which computes output features ``rows``."""
        layer = shallow_copy(cls, dense)
        layer.split(axis, rows=rows, copies_input=copies_input)
        return layer

    @classmethod
    def layouts(
        cls, dense: nn.Linear, axis: Axis, *, rows: range, copies_input: bool = True
    ) -> dict[str, ParameterLayout]:
        """How the parameters of a dense layer would lie."""
        return {
            name: layout_over(parameter, axis, None, partial=True)
            for name, parameter in (("weight", dense.weight), ("bias", dense.bias))
            if parameter is not None
        }

    def split(self, axis: Axis, shared: dict[int, nn.Parameter] | None = None, **options: Any) -> None:
        """As :meth:`ColumnParallelLinear.split`."""
        layouts = SharedRowsLinear.layouts(self, axis, **options)
        rows: range = options["rows"]
        self.axis, self.rows = axis, slice(rows.start, rows.stop)
        self.copies_input = options.get("copies_input", True)
        self.keep_parts(layouts, shared)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = copy_to_ranks(input, self.axis) if self.copies_input else input
        return F.linear(x, self.weight[self.rows], None if self.bias is None else self.bias[self.rows])
