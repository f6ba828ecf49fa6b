"""Layers split over one axis and called one after another: what stands between one that gives parts of
features and the one that takes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from ..errors import SMPError
from ..nn.one_d import ColumnParallelLinear, FeatureParallelDropout, RowParallelLinear
from ..nn.plans.functions import ACTIVATIONS

__all__ = ["refuse_mixing_features"]

_ONE_BY_ONE = (*ACTIVATIONS, nn.Threshold, FeatureParallelDropout)


def refuse_mixing_features(model: nn.Module) -> None:
    """Of modules that are called one after another: of an ``nn.Sequential``, and of a ``ModelFromConfig`` of
    Colossal-AI.

    A softmax or a norm without parameters takes any number of features, so it would silently go over this
    rank's alone.

    Args:
        model: the whole model.

    Raises:
        SMPError: a module that may look across features stands behind a column-parallel layer that gives its
            part.
    """
    # Imported by whoever uses it; importing it here would be a circle.
    kind = getattr(sys.modules.get("smp_lite.colossal.building"), "ModelFromConfig", None)
    for name, part in model.named_modules():
        if isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward:
            _check(name, part.named_children())
        elif kind is not None and isinstance(part, kind) and type(part).forward is kind.forward:
            _check(f"{name}.layers" if name else "layers", part.layers.named_children())


def _check(prefix: str, children: Iterator[tuple[str, nn.Module]]) -> None:
    giver: str | None = None
    for own, part in _flat(prefix, children):
        if isinstance(part, ColumnParallelLinear):
            giver = None if part.gather_output or part.axis.size == 1 else own
        elif isinstance(part, RowParallelLinear):
            giver = None
        elif giver is not None and type(part) is nn.Dropout:
            if part.p > 0:
                raise SMPError(
                    f"{own} is torch's Dropout behind {giver}, which gives each rank its part of the "
                    "features: all ranks would drop the same places of other features, as one process would "
                    "not. Use smp_lite.nn.one_d.FeatureParallelDropout(p, axis=...), or p=0"
                )
        elif giver is not None and type(part) not in _ONE_BY_ONE:
            kind = type(part).__name__
            raise SMPError(
                f"{own} is a {kind} behind {giver}, which gives each rank its part of the features: "
                f"{kind} is not known to take each feature by itself, and may give other results. Give "
                f"{giver} gather_output=True, and the row layer behind it parallel_input=False"
            )


def _flat(prefix: str, children: Iterator[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Modules within a Sequential stand in the line of those around it."""
    for name, part in children:
        full = f"{prefix}.{name}" if prefix else name
        if type(part) is nn.Sequential:
            yield from _flat(full, part.named_children())
        else:
            yield full, part
