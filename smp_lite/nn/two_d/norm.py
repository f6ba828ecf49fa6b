"""Norms on a 2D or 2.5D mesh."""

from __future__ import annotations

import torch
from torch import nn

from ...comm.groups.axis import Axis
from ..grid.checks import check_divides
from ..grid.norm import SplitLayerNorm, SplitRMSNorm, check_norm
from .linear import Shared2D
from .mesh import SummaMesh

__all__ = ["LayerNorm2D", "RMSNorm2D"]


class _Norm2D(Shared2D):
    def _features_axis(self) -> Axis:
        return self.mesh.col

    def _here(self, vector: torch.Tensor) -> torch.Tensor:
        return self._along_features(vector)


class LayerNorm2D(_Norm2D, SplitLayerNorm):
    """``torch.nn.LayerNorm`` over features that lie over ``mesh.col``; of any rows.

    Args:
        features: a multiple of q^2 if there are parameters, of q else.
        mesh: the ranks that share it.
        eps, elementwise_affine, bias: as in torch's.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        features: int,
        mesh: SummaMesh,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense = nn.LayerNorm(features, eps, elementwise_affine, bias, device=device, dtype=dtype)
        _take(self, dense, mesh)

    @classmethod
    def from_dense(cls, dense: nn.LayerNorm, mesh: SummaMesh) -> LayerNorm2D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        _take(layer, dense, mesh)
        return layer


class RMSNorm2D(_Norm2D, SplitRMSNorm):
    """``torch.nn.RMSNorm`` over features that lie over ``mesh.col``; arguments as of :class:`LayerNorm2D`.

    ``eps`` of None is the machine epsilon of the input's dtype.
    """

    def __init__(
        self,
        features: int,
        mesh: SummaMesh,
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _take(self, nn.RMSNorm(features, eps, elementwise_affine, device=device, dtype=dtype), mesh)

    @classmethod
    def from_dense(cls, dense: nn.RMSNorm, mesh: SummaMesh) -> RMSNorm2D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        _take(layer, dense, mesh)
        return layer


def _take(layer: LayerNorm2D | RMSNorm2D, dense: nn.LayerNorm | nn.RMSNorm, mesh: SummaMesh) -> None:
    layer.mesh, layer.features, layer.eps = mesh, check_norm(dense), dense.eps
    vectors = [name for name, parameter in dense._parameters.items() if parameter is not None]
    layer._hold(dense, {name: layer._vector("features", layer.features) for name in vectors})
    check_divides(f"{type(layer).__name__}: features", layer.features, (mesh.col,))
