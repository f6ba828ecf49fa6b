"""The slice of a parameter that is this rank's, under the names that scripts of SMP know from DeepSpeed.

A parameter of n elements is padded with zeros to a multiple of d, the number of ranks that share it, and each
rank has ceil(n / d) consecutive ones (SMP 1.11, sharded data parallelism). That is what lies here of a
sharded parameter. One that stays whole has slices too, since checkpoints and scripts make no difference; its
memory is padded, so that the slice is a view. Of one that lies in another order than that of its indices
(channels last) no view is a slice: its ``ds_tensor`` says so.

Names are those of Rajbhandari et al.'s DeepSpeed: ``ds_shape`` and ``ds_numel`` of the whole, and
``ds_tensor``, an ordinary tensor with this rank's slice and a ``ds_numel`` of its own.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ...comm.groups.axis import Axis
from ...errors import MissingAttribute
from ...nn.guarding import plain
from ...nn.layout import layout_of

__all__ = ["NoSlice", "add_names", "announce_names", "slice_of"]


def slice_of(parameter: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's slice of what the ranks of the axis hold together; of a padded or sharded one a view.

    Args:
        parameter: whole on each rank of the axis, or in pieces over it.
        axis: of the ranks.
    """
    row = plain(parameter)
    layout = layout_of(parameter)
    if layout is not None and layout.flat is not None:
        return row
    length = -(-row.numel() // axis.size)
    start = row.storage_offset() + length * axis.index
    room = row.untyped_storage().nbytes() // row.element_size() - row.storage_offset()
    if row.is_contiguous() and room == length * axis.size:
        return row.as_strided((length,), (1,), start)
    padded = row.new_zeros(length * axis.size)
    padded[: row.numel()] = row.reshape(-1)
    return padded[length * axis.index : length * (axis.index + 1)]


def add_names(parameter: nn.Parameter, axis: Axis) -> None:
    """Gives a parameter its names, and padded memory if it is whole; it has been cut already."""
    layout = layout_of(parameter)
    if layout is None or layout.flat is None:
        shape = tuple(parameter.shape)
        if not parameter.is_contiguous():  # kernels are chosen by how it lies
            _name(parameter, shape, NoSlice(-(-parameter.numel() // axis.size), _IN_ANOTHER_ORDER))
            return
        with torch.no_grad():
            length = -(-parameter.numel() // axis.size)
            padded = parameter.data.new_zeros(length * axis.size)
            padded[: parameter.numel()] = parameter.data.reshape(-1)
            # As it was, where a length of one may have any stride.
            parameter.data = padded.as_strided(shape, parameter.stride())
    else:
        shape = layout.part_shape
    mine = slice_of(parameter, axis)
    mine.ds_numel = mine.numel()  # type: ignore[attr-defined]
    _name(parameter, shape, mine)


def announce_names(parameter: nn.Parameter, num_ranks: int) -> None:
    """Before it is cut: sizes are known, contents are not."""
    _name(parameter, tuple(parameter.shape), NoSlice(-(-parameter.numel() // num_ranks), _NOT_CUT_YET))


def _name(parameter: nn.Parameter, shape: tuple[int, ...], mine: object) -> None:
    parameter.ds_shape = torch.Size(shape)  # type: ignore[attr-defined]
    parameter.ds_numel = math.prod(shape)  # type: ignore[attr-defined]
    parameter.ds_tensor = mine  # type: ignore[attr-defined]


_NOT_CUT_YET = (
    "over several partitions a parameter is cut into slices by the first step, and only those of a rank's "
    "own partition have them there: ask after it, for model.local_parameters()"
)
_IN_ANOTHER_ORDER = (
    "this parameter is small and stays whole, and its memory is not in the order of its indices (channels "
    "last, or transposed), so no view of it is this rank's slice: read the parameter itself"
)


class NoSlice:
    """In the place of a slice that is not there.

    Attributes:
        ds_numel: that it would have.
    """

    def __init__(self, ds_numel: int, reason: str) -> None:
        self.ds_numel, self._reason = ds_numel, reason

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingAttribute(f"parameter.ds_tensor.{name}: {self._reason}")
