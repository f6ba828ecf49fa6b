"""Layers on ranks that share the tokens of every sequence: Li et al. 2021 (arXiv 2105.13120), with ring
attention (Liu et al. 2023, arXiv 2310.01889) or an exchange of tokens for heads (Jacobs et al. 2023, arXiv
2309.14509).

Activations are split by tokens, parameters are whole on every rank, or split by vocabulary. All layers take a
:class:`SequenceMesh`, have ``from_dense(dense, mesh)`` and ``to_dense()``, keep the dense layer's parameter
names and mark each parameter with how it lies (:mod:`smp_lite.nn.layout`).
"""

from __future__ import annotations

from .all_to_all import all_to_all_attention
from .attention import SequenceAttention
from .layers import SequenceEmbedding, SequenceLayerNorm, SequenceLinear, SequenceRMSNorm
from .loss import cross_entropy_sequence
from .mesh import SequenceMesh
from .ring import ring_attention
from .vocabulary import SequenceClassifier, SequenceVocabEmbedding

__all__ = [
    "SequenceAttention",
    "SequenceClassifier",
    "SequenceEmbedding",
    "SequenceLayerNorm",
    "SequenceLinear",
    "SequenceMesh",
    "SequenceRMSNorm",
    "SequenceVocabEmbedding",
    "all_to_all_attention",
    "cross_entropy_sequence",
    "ring_attention",
]
