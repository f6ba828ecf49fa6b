"""Layers on a q x q grid of ranks (2D, SUMMA: Xu et al. 2021, arXiv 2104.05343), and on d layers of such
grids (2.5D, Tesseract: Wang et al. 2021, arXiv 2105.14500).

Activations are split over all ranks: the batch over rows (and layers), features over columns. Every layer
takes and gives that layout, so they follow one another in any number. All take a :class:`Mesh2D` or a
:class:`Mesh25D`, have ``from_dense(dense, mesh)`` and ``to_dense()``, keep the dense layer's parameter names
and mark each parameter with how it lies (:mod:`smp_lite.nn.layout`).
"""

from __future__ import annotations

from .attention import Attention2D
from .embedding import Embedding2D, VocabEmbedding2D
from .linear import Classifier2D, Linear2D
from .loss import cross_entropy_2d
from .mesh import Mesh2D, Mesh25D
from .norm import LayerNorm2D, RMSNorm2D

__all__ = [
    "Attention2D",
    "Classifier2D",
    "Embedding2D",
    "LayerNorm2D",
    "Linear2D",
    "Mesh2D",
    "Mesh25D",
    "RMSNorm2D",
    "VocabEmbedding2D",
    "cross_entropy_2d",
]
