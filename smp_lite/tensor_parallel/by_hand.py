"""Models that are built of layers split over ranks: what of them would silently give other results."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..errors import SMPError
from ..nn.keeping import KeepsLayouts
from ..nn.layout import ParameterLayout, layout_of
from ..nn.plans.draws import module_draws
from ..record.parameters.away import is_away
from ..session import Session

__all__ = ["refuse_exchanged", "refuse_other_axes", "refuse_whole_dropout"]


def refuse_other_axes(session: Session, module: nn.Module) -> None:
    """Gradients are reduced, and parts told from copies, by the names of the job's axes.

    Raises:
        SMPError: a parameter is split over ranks by axes that are not the session's.
    """
    sizes = dict(session.topology.axes)
    for name, parameter in module.named_parameters():
        layout = layout_of(parameter)
        if layout is None:
            continue
        for axis in (*layout.axes, *layout.partial_over):
            parts = axis.name.split("+")
            joined = len(parts) > 1 and any(axis is other for other in layout.partial_over)
            if axis.size > 1 and (joined or not all(part in sizes for part in parts)):
                raise SMPError(
                    f"{name} lies over an axis {axis.name!r}, and the axes of this job are "
                    f"{', '.join(sizes)}: its gradient would not be reduced. Make the mesh of the session's "
                    "axes (session.axis(...); smp_lite.systems.colossal.tensor_mesh()), not of bare ranks"
                )


def refuse_exchanged(module: nn.Module) -> None:
    """A parameter that a script puts in the place of a part has no layout, so it would pass for a whole one:
    reduced as replicas do, and saved as one rank has it.

    Raises:
        SMPError: a split layer has another parameter than it was split with, or computes one from others.
    """
    for prefix, part in module.named_modules():
        if not isinstance(part, KeepsLayouts):
            continue
        for own, layout in part.__dict__.get("smp_layouts", {}).items():
            if all(axis.size == 1 for axis in (*layout.axes, *layout.partial_over)):
                continue
            name = f"{prefix}.{own}" if prefix else own
            if own not in part._parameters:
                raise SMPError(
                    f"{name} is split over ranks, and is not a parameter of its {_kind(part)} any more: "
                    "something computes it from other tensors (torch.nn.utils.parametrize, weight_norm, "
                    "spectral_norm, prune), which have this rank's part alone and would pass for the whole. "
                    f"Where it is to have that, let {prefix or 'the layer'} be one of torch's, which is whole"
                )
            held = part._parameters[own]
            if held is None or is_away(held):
                continue
            found = layout_of(held)
            if found is None or _lies(found) != _lies(layout):
                raise SMPError(
                    f"{name} is another parameter, of shape {list(held.shape)}, than the one that was split "
                    "over ranks: it would pass for a whole one, and each rank has its part. Change the "
                    f"numbers of the one that is there (with torch.no_grad(): {name}.mul_(0.5), for "
                    "example), or exchange the whole one, before the layer is split"
                )


def _kind(module: nn.Module) -> str:
    """Also of one whose class ``torch.nn.utils.parametrize`` has derived."""
    kind = type(module)
    return (kind.__bases__[0] if nn.utils.parametrize.is_parametrized(module) else kind).__name__


def _lies(layout: ParameterLayout) -> tuple[object, ...]:
    """What two parameters that lie alike have in common."""
    names = [tuple((axis.name, axis.ranks) for axis in axes) for axes in (*layout.dims, layout.partial_over)]
    flat = layout.flat if layout.flat is None else layout.flat.name
    return layout.shape, names, layout.sections, layout.padded, flat


def refuse_whole_dropout(mode: str | None, module: nn.Module) -> None:
    """Where activations are parts, all ranks would drop the same places of different parts.

    Args:
        mode: of the tensor parallelism: one whose activations are parts.
        module: the model.

    Raises:
        SMPError: it has a module of torch's that draws: a dropout that drops something, a random activation.
    """
    for name, part in module.named_modules():
        if module_draws(name, part) is not None and not hasattr(part, "mesh"):
            does, way_out = "draw the same numbers for", "another activation"
            if isinstance(part, _DropoutNd):
                does, way_out = "drop the same places of", "smp_lite.nn.grid.PartDropout(p, mesh), or p=0"
            raise SMPError(
                f"{name} is torch's {type(part).__name__}, and in mode {mode!r} each rank has a part of the "
                f"activations: all would {does} different parts, as one process would not: use {way_out}"
            )
