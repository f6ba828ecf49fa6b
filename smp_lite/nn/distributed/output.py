"""``smp.nn.DistributedTransformerOutputLayer``: the feed-forward half of a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .attention import add_residual, check_norms, hidden_dropout
from .base import DistributedModule, check_known
from .norm import DistributedLayerNorm
from .projections import FromParts, ToParts, initialise

__all__ = ["DistributedTransformerOutputLayer"]

_TANH = functools.partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    # Hugging Face's names of other ones; the models there have them.
    "gelu_new": _TANH,
    "gelu_pytorch_tanh": _TANH,
    "silu": F.silu,
    "swish": F.silu,
}


class DistributedTransformerOutputLayer(DistributedModule):
    """Two linear layers with an activation between them, dropout, residual connection and layer norms.

    Input and output ``(N, S, H)``. Parts: ``dense1`` (split in dimension 0), ``dense2`` (dimension 1),
    ``pre_layernorm`` and ``layernorm``, each if asked for.

    Args:
        hidden_size, intermediate_size: features outside and between.
        hidden_dropout_prob: of the output before the residual.
        activation: ``gelu`` or ``relu``; also ``gelu_new``, ``gelu_pytorch_tanh``, ``silu``.
        layernorm_epsilon, initializer_range, use_normal_initialization, pre_layernorm, post_layernorm,
            fp32_residual_addition, add_residual, fused: as of
            :class:`~smp_lite.nn.distributed.DistributedAttentionLayer`.

    Raises:
        SMPError: ``smp.init()`` was not called.
        CannotShare: the ranks cannot share ``intermediate_size``, or with ``optimize: "memory"``
            ``hidden_size``, equally.
        ValueError: no norm at all, or another activation.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        *,
        add_residual: bool = True,
        **fused: object,
    ) -> None:
        super().__init__()
        check_known("DistributedTransformerOutputLayer", fused)
        if add_residual:
            check_norms("DistributedTransformerOutputLayer", pre_layernorm, post_layernorm)
        if activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(
                f"DistributedTransformerOutputLayer: activation={activation!r} is none of {known}"
            )
        region = self.region
        region.check_shares("DistributedTransformerOutputLayer: intermediate_size", intermediate_size)
        if region.splits_features:
            region.check_shares("DistributedTransformerOutputLayer: hidden_size", hidden_size)
        self.activation, self.hidden_dropout_prob = activation, hidden_dropout_prob
        self.fp32_residual_addition, self.add_residual = fp32_residual_addition, add_residual
        self.enters = self.leaves = True
        self.dense1 = ToParts(hidden_size, intermediate_size)
        self.dense2 = FromParts(intermediate_size, hidden_size)
        if use_normal_initialization:
            initialise(self, initializer_range)
        self.dense1.split()
        self.dense2.split()
        if pre_layernorm:
            self.pre_layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon, inside=True)
        if post_layernorm:
            self.layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon, inside=True)
        self.has_pre_layernorm, self.has_post_layernorm = pre_layernorm, post_layernorm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        region = self.region
        x = self.enter(hidden) if self.enters else hidden
        found = self.dense1(self.pre_layernorm(x) if self.has_pre_layernorm else x)
        found = self.dense2(ACTIVATIONS[self.activation](found))
        found = hidden_dropout(found, self.hidden_dropout_prob, self.training, region)
        if self.add_residual:
            found = add_residual(found, x, in_fp32=self.fp32_residual_addition)
        if self.has_post_layernorm:
            found = self.layernorm(found)
        return region.leave(found) if self.leaves else found
