"""Layers on a d x d x d mesh of ranks (3D: Bian et al. 2021, arXiv 2105.14450).

Activations are split over all ranks, in one of two layouts; every product takes one and gives the other
(:class:`Layout3D`). All layers take a :class:`Mesh3D` and the layout of their input, have
``from_dense(dense, mesh, layout)`` and ``to_dense()``, keep the dense layer's parameter names and mark each
parameter with how it lies (:mod:`smp_lite.nn.layout`).
"""

from __future__ import annotations

from .attention import Attention3D
from .embedding import Embedding3D, VocabEmbedding3D
from .flow import Residual3D, Sequential3D
from .layout import Layout3D, LayoutError
from .linear import Classifier3D, Linear3D
from .loss import cross_entropy_3d
from .mesh import Mesh3D
from .norm import LayerNorm3D, RMSNorm3D

__all__ = [
    "Attention3D",
    "Classifier3D",
    "Embedding3D",
    "LayerNorm3D",
    "Layout3D",
    "LayoutError",
    "Linear3D",
    "Mesh3D",
    "RMSNorm3D",
    "Residual3D",
    "Sequential3D",
    "VocabEmbedding3D",
    "cross_entropy_3d",
]
