"""What the layers over a grid of ranks share: axes, parameters, norms, dropout, the loss, attention.

The layers themselves: :mod:`smp_lite.nn.two_d` (2D and 2.5D), :mod:`smp_lite.nn.three_d` and
:mod:`smp_lite.nn.sequence`.
"""

from __future__ import annotations

from .dropout import PartDropout

__all__ = ["PartDropout"]
