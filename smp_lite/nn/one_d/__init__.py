"""Layers split over one axis of ranks (1D tensor parallelism): Shoeybi et al. 2019, "Megatron-LM: Training
Multi-Billion Parameter Language Models Using Model Parallelism" (arXiv 1909.08053), and its sequence-parallel
form: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198).

Every layer has ``from_dense(dense, axis)`` and ``to_dense()``, keeps the dense layer's parameter names, and
marks each parameter with how it lies (:mod:`smp_lite.nn.layout`).
"""

from __future__ import annotations

from .attention import Attention
from .cross_entropy import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from .dropout import FeatureParallelDropout
from .embedding import FeatureParallelEmbedding, VocabParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .norms import SequenceParallelLayerNorm, SequenceParallelRMSNorm
from .operations import copy_to_ranks, gather_along, reduce_scatter_along, split_along, sum_over_ranks

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "FeatureParallelDropout",
    "FeatureParallelEmbedding",
    "RowParallelLinear",
    "SequenceParallelLayerNorm",
    "SequenceParallelRMSNorm",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "copy_to_ranks",
    "gather_along",
    "reduce_scatter_along",
    "split_along",
    "sum_over_ranks",
    "vocab_parallel_cross_entropy",
]
