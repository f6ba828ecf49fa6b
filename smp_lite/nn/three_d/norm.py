"""Norms on a 3D mesh."""

from __future__ import annotations

import torch
from torch import nn

from ...comm.groups.axis import Axis
from ..grid.checks import check_divides
from ..grid.norm import SplitLayerNorm, SplitRMSNorm, check_norm
from ..layout import ParameterLayout
from .layout import Layout3D
from .linear import Shared3D
from .mesh import Mesh3D

__all__ = ["LayerNorm3D", "RMSNorm3D"]


class _Norm3D(Shared3D):
    def _take(self, dense: nn.LayerNorm | nn.RMSNorm, mesh: Mesh3D, layout: Layout3D | str) -> None:
        self._place(mesh, layout, swaps=False)
        self.features, self.eps = check_norm(dense), dense.eps
        i, r, c = self._over
        check_divides(f"{type(self).__name__}: features", self.features, (c,))
        lies = ParameterLayout((self.features,), ((c,),), (i, r))
        self._hold(dense, {name: lies for name, parameter in dense.named_parameters()})

    def _features_axis(self) -> Axis:
        return self._over[2]

    def _here(self, vector: torch.Tensor) -> torch.Tensor:
        return vector


class LayerNorm3D(_Norm3D, SplitLayerNorm):
    """``torch.nn.LayerNorm`` of ``(..., features / d)``; takes and gives one layout.

    Args:
        features: a multiple of d.
        mesh: the ranks that share it.
        layout: of input and result.
        eps, elementwise_affine, bias: as in torch's.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        features: int,
        mesh: Mesh3D,
        layout: Layout3D | str,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense = nn.LayerNorm(features, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self._take(dense, mesh, layout)

    @classmethod
    def from_dense(cls, dense: nn.LayerNorm, mesh: Mesh3D, layout: Layout3D | str) -> LayerNorm3D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh, layout)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input(input, self.features)
        return self._given(super().forward(input))


class RMSNorm3D(_Norm3D, SplitRMSNorm):
    """``torch.nn.RMSNorm`` of ``(..., features / d)``; arguments as of :class:`LayerNorm3D`.

    ``eps`` of None is the machine epsilon of the input's dtype.
    """

    def __init__(
        self,
        features: int,
        mesh: Mesh3D,
        layout: Layout3D | str,
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.RMSNorm(features, eps, elementwise_affine, device=device, dtype=dtype), mesh, layout)

    @classmethod
    def from_dense(cls, dense: nn.RMSNorm, mesh: Mesh3D, layout: Layout3D | str) -> RMSNorm3D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh, layout)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input(input, self.features)
        return self._given(super().forward(input))
