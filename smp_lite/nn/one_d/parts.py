"""What the layers split over one axis share: parameters that hold parts, and the errors for sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from ...comm.groups.axis import Axis
from ..keeping import KeepsLayouts, digest_of_whole
from ..layout import ParameterLayout, layout_of, part_of, whole_of
from ..replaced import take_attributes

__all__ = [
    "ONE_RANK",
    "SplitModule",
    "check_divides",
    "layout_over",
    "nearest_sizes",
    "next_multiple",
    "shallow_copy",
    "whole",
]

ONE_RANK = Axis("one", (0,), 0)
"""No splitting: a layer over this axis is its dense counterpart."""

M = TypeVar("M", bound=nn.Module)


class SplitModule(KeepsLayouts):
    """A module that was dense, and holds this rank's parts of its parameters."""

    def keep_parts(
        self, layouts: Mapping[str, ParameterLayout], shared: dict[int, nn.Parameter] | None = None
    ) -> None:
        """Lets go of the dense parameters of these names, and holds this rank's parts in their place.

        Args:
            shared: parts by the identity of their dense parameter, so that tied parameters stay one.
        """
        shared = {} if shared is None else shared
        wholes: dict[str, int] = {}
        for name, layout in layouts.items():
            dense = self._parameters[name]
            if dense is None:
                continue
            if id(dense) not in shared:
                part = nn.Parameter(part_of(dense, layout), requires_grad=dense.requires_grad)
                take_attributes(part, dense, f"{name} of a {type(self).__name__}")
                shared[id(dense)] = part
            self._parameters[name] = shared[id(dense)]
            if (digest := digest_of_whole(dense, layout)) is not None:
                wholes[name] = digest
        self.remember(layouts, wholes)


def check_no_hooks(name: str, dense: nn.Module) -> None:
    """
    Raises:
        ValueError: the module or a parameter of its own has hooks, or another forward than its class, which
            would see one rank's part of what they were written for.
    """
    kinds: tuple[str, ...] = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    if not nn.utils.parametrize.is_parametrized(dense):  # which is told by name
        kinds += ("_state_dict_hooks", "_state_dict_pre_hooks")
        kinds += ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    parameters = [parameter for parameter in dense._parameters.values() if parameter is not None]
    if any(vars(dense).get(kind) for kind in kinds) or any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters
    ):
        raise ValueError(
            f"{name} has hooks, which would see one rank's part of its input, output, parameters or state: "
            "remove them before it is split, or leave it out"
        )
    if "forward" in vars(dense):
        raise ValueError(
            f"{name} has been given another forward, which a layer that is split does not have: take it off "
            "before it is split, or leave it out"
        )


def shallow_copy(kind: type[M], dense: nn.Module) -> M:
    """A module of another class with the attributes of a dense one, and its very parameters."""
    check_no_hooks(f"the {type(dense).__name__}", dense)
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    own = {name: value for name, value in vars(dense).items() if name not in vars(layer)}
    layer.__dict__.update(own)
    layer._parameters.update(dense._parameters)
    return layer.train(dense.training)


def next_multiple(size: int, parts: int) -> int:
    """The smallest multiple of ``parts`` that is not below ``size``."""
    return -(-size // parts) * parts


def nearest_sizes(size: int, parts: int) -> str:
    """``"8 or 12"``: the multiples around a size that is none."""
    below, above = size // parts * parts, next_multiple(size, parts)
    return f"{below} or {above}" if below else f"{above}"


def check_divides(what: str, size: int, axis: Axis, way_out: str = "") -> None:
    """
    Raises:
        ValueError: the axis's ranks cannot share ``size`` equally; names the nearest sizes.
    """
    if size % axis.size:
        raise ValueError(
            f"{what} is {size}, which the {axis.size} ranks of axis {axis.name!r} cannot share equally; the "
            f"nearest that they can: {nearest_sizes(size, axis.size)}{way_out}"
        )


def layout_over(
    tensor: Tensor,
    axis: Axis,
    dim: int | None,
    *,
    sections: tuple[int, ...] | None = None,
    padded: int | None = None,
    partial: bool = False,
) -> ParameterLayout:
    """Of a whole tensor that is split along one dimension, or along none.

    Args:
        sections, padded: of that dimension, as in :class:`~smp_lite.nn.layout.ParameterLayout`.
        partial: each rank's gradient is a summand.
    """
    dims = tuple((axis,) if i == dim else () for i in range(tensor.dim()))
    found_sections = {dim: sections} if sections is not None and dim is not None else {}
    pads = padded is not None and dim is not None and padded != tensor.shape[dim]
    found_padded = {dim: padded} if pads and padded is not None and dim is not None else {}
    return ParameterLayout(
        tuple(tensor.shape), dims, (axis,) if partial else (), found_sections, found_padded
    )


def whole(parameter: nn.Parameter) -> nn.Parameter:
    """The dense parameter again; collective over the axes that split it."""
    layout = layout_of(parameter)
    tensor = parameter.detach().clone() if layout is None else whole_of(parameter, layout)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
