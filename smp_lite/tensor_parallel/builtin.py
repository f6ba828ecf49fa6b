"""The classes that can be distributed out of the box: torch's Linear and Embedding, and transformers'."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ..nn.distributed import DistributedEmbedding, DistributedLinear
from .registry import Registration

__all__ = ["builtin"]


def _linear_arguments(module: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (module.in_features, module.out_features, module.bias is not None), {}


def _embedding_arguments(module: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = {name: getattr(module, name) for name in names}
    return (module.num_embeddings, module.embedding_dim), options


_TORCH = {
    nn.Linear: Registration(DistributedLinear, arguments=_linear_arguments),
    nn.Embedding: Registration(DistributedEmbedding, arguments=_embedding_arguments),
}


def builtin(kind: type[nn.Module]) -> Registration | None:
    """Of a class that nobody has registered."""
    if kind in _TORCH:
        return _TORCH[kind]
    if not kind.__module__.startswith("transformers.") or "transformers" not in sys.modules:
        return None
    from .huggingface import of_class

    return of_class(kind)
