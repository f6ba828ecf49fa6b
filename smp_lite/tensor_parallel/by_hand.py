"""Models that are built of layers split over ranks: what of them would silently give other results."""

from __future__ import annotations

from torch import nn

from ..errors import SMPError
from ..nn.layout import layout_of
from ..session import Session

__all__ = ["refuse_other_axes", "refuse_whole_dropout"]

_DROPOUT = (nn.modules.dropout._DropoutNd,)


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


def refuse_whole_dropout(mode: str | None, module: nn.Module) -> None:
    """Where activations are parts, all ranks would drop the same places of different parts.

    Args:
        mode: of the tensor parallelism: one whose activations are parts.
        module: the model.

    Raises:
        SMPError: it has a dropout of torch's that drops something.
    """
    for name, part in module.named_modules():
        if isinstance(part, _DROPOUT) and part.p > 0 and not hasattr(part, "mesh"):
            raise SMPError(
                f"{name} is torch's {type(part).__name__}, and in mode {mode!r} each rank has a part of the "
                "activations, of which all would drop the same places, as one process would not: use "
                "smp_lite.nn.grid.PartDropout(p, mesh), or p=0"
            )
