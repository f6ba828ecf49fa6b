"""The modules of SMP v1's tensor parallelism: ``smp.nn.Distributed*``.

They follow the SMP API reference ("smdistributed.modelparallel.torch tensor parallelism API", SMP 1.6 to
1.15): names of modules and parameters, arguments and their defaults, input and output tuples. A module is
split over the tensor-parallel ranks of the session. How its activations lie inside is one :class:`Region`.
"""

from __future__ import annotations

from .attention import DistributedAttentionLayer
from .base import DistributedModule
from .embedding import DistributedEmbedding
from .flash import FlashAttentionLayer
from .linear import DistributedLinear
from .lm_head import DistributedTransformerLMHead
from .norm import DistributedLayerNorm
from .output import DistributedTransformerOutputLayer
from .region import CannotShare, Region
from .transformer import DistributedTransformer, DistributedTransformerLayer

__all__ = [
    "CannotShare",
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "Region",
]
