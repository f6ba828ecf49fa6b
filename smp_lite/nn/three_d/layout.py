"""The two layouts of a tensor on a 3D mesh, and the errors where one meets a layer that takes the other."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Layout3D", "LayoutError", "check_layout", "tagged"]

# Not an attribute of the tensor: with those a recorded module is no longer one call.
_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class LayoutError(ValueError):
    """A tensor of one layout where a layer takes the other."""


class Layout3D(Enum):
    """Where rows and features of a tensor lie on a :class:`~smp_lite.nn.three_d.Mesh3D`.

    The parts have one shape in both, so a wrong one is no error of shapes. That is why every layer is told
    the layout that it takes, says what it gives (``takes``, ``gives``), and marks the tensors that it gives.
    """

    IN = "in"
    """Rows over weight and input (the weight's index is the major one), features over output."""
    OUT = "out"
    """Rows over weight and output, features over input."""

    @property
    def swapped(self) -> Layout3D:
        """The other one: what a product gives."""
        return Layout3D.OUT if self is Layout3D.IN else Layout3D.IN

    @classmethod
    def of(cls, layout: Any) -> Layout3D:
        """A layout, or its name.

        Raises:
            ValueError: there is none of this name.
        """
        try:
            return cls(layout)
        except ValueError:
            raise ValueError(f"layout={layout!r}: it is Layout3D.IN ('in') or Layout3D.OUT ('out')") from None


def tagged(x: torch.Tensor, layout: Layout3D, size: int) -> torch.Tensor:
    """Marks a new tensor with its layout. What is computed from it is not marked, and so not checked."""
    if size > 1:
        _layouts[x] = layout
    return x


def check_layout(where: str, x: torch.Tensor, layout: Layout3D) -> None:
    """Raises LayoutError where a tensor is marked with the other layout."""
    found = _layouts.get(x, layout)
    if found is not layout:
        raise LayoutError(
            f"{where} takes layout {layout.value!r}, and got a tensor of layout {found.value!r}: every "
            "product swaps the layout, so the next layer must take the other one (layout=...)"
        )
