"""Which modules' parameters are brought together at once.

Repeated blocks are the natural units: the entries of the outermost lists of modules, and beside these every
module that holds no list. A unit that holds more than half of all is looked into, if there is a list in it.
Smaller units take less memory, larger ones fewer messages. (FSDP's users choose the same ones by hand.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from torch import nn

from ...comm.groups.axis import Axis
from ...nn.keeping import lay_anew
from ...nn.layout import layout_of
from ...record.parameters.placement import Placement
from .parameters import ShardedParameters, ShardGroup
from .slices import add_names

__all__ = ["Sharding", "choose_units", "shard"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_units(root: nn.Module) -> dict[str, int]:
    """Numbers the units of a model, by module name, in the model's order.

    Parameters of the modules around them belong to none.
    """
    total = _size(root)
    found: dict[str, int] = {}

    def visit(name: str, module: nn.Module, is_entry: bool) -> None:
        own = _size(module)
        if own == 0:
            return
        is_list = isinstance(module, _LISTS)
        if not _holds_list(module) or (is_entry and not is_list and 2 * own <= total):
            found.setdefault(name, len(found))
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, is_list)

    visit("", root, False)
    # A module that stands in two places has one name.
    names = {name for name, _ in root.named_modules()}
    return {name: number for name, number in found.items() if name in names}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _holds_list(module: nn.Module) -> bool:
    """Whether it is, or holds, a list of several modules with parameters."""
    return any(
        isinstance(part, _LISTS) and sum(_size(child) > 0 for child in part.children()) > 1
        for part in module.modules()
    )


@dataclass(frozen=True)
class Sharding:
    """Which parameters of a model lie in pieces.

    Attributes:
        axis: over which ranks.
        names: of the parameters; others stay whole.
        units: of the modules, by name (:func:`choose_units`).
        smallest: parameters of which a rank would hold fewer elements without sharding stay whole.
        max_live_elements: see :class:`~.parameters.ShardedParameters`.
        reduced_elements: most elements in one reduction of gradients; None: a unit's.
    """

    axis: Axis
    names: Collection[str]
    units: dict[str, int]
    smallest: int = 0
    max_live_elements: int | None = None
    reduced_elements: int | None = None


def shard(
    placement: Placement,
    parameters: Sequence[nn.Parameter],
    sharding: Sharding,
    kind: Callable[[nn.Parameter], Hashable],
    make: Callable[[Sequence[nn.Parameter]], None],
) -> ShardedParameters:
    """Makes the stage's parameters their pieces. Those with less than one element a rank stay whole.

    Args:
        placement: of the whole model.
        parameters: of the stages played here, the same on all ranks of the axis.
        sharding: what is wanted.
        kind: of a parameter; those of two kinds do not travel together.
        make: called with parameters that are about to be cut, so that no more than one group of them, and
            their pieces, need memory at a time; at last with those that stay whole.
    """
    members: dict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = {}
    for parameter in parameters:
        name = placement.alias(parameter)
        assert name is not None
        if name not in sharding.names or parameter.numel() < max(sharding.smallest, sharding.axis.size):
            continue
        if not parameter.is_floating_point():
            continue
        units = [placement.unit(module) for module in placement.holders(name)]
        unit = next((number for number in units if number is not None), None)
        key = (name if unit is None else unit, parameter.dtype, kind(parameter))
        members.setdefault(key, []).append((name, parameter))
    groups = []
    for found in members.values():
        make([parameter for _, parameter in found])
        groups.append(ShardGroup([name for name, _ in found], [p for _, p in found], sharding.axis))
    cut = {id(parameter) for group in groups for parameter in group.parameters}
    make([parameter for parameter in parameters if id(parameter) not in cut])
    for group in groups:
        for name, parameter in zip(group.names, group.parameters, strict=True):
            layout = layout_of(parameter)
            assert layout is not None
            for module in placement.holders(name):
                lay_anew(module, parameter, layout)
    for parameter in parameters:
        add_names(parameter, sharding.axis)
    tables = [(name, module._parameters) for name, module in placement.root.named_modules()]
    return ShardedParameters(groups, sharding.max_live_elements, tables)
