"""Which options of ``smp.tensor_parallelism`` and the like a distributed module takes.

The options of one context go to whatever is distributed in it, a Linear and a language model: each gets those
that its constructor knows, and others pass it by. (SMP v1's scripts also give some that no module has.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..nn import distributed

__all__ = ["known_options", "taken_by"]

_GIVES_THE_REST_TO: dict[type[nn.Module], type[nn.Module]] = {
    distributed.DistributedTransformerLMHead: distributed.DistributedTransformer,
    distributed.DistributedTransformer: distributed.DistributedTransformerLayer,
}
_HINTS = frozenset(
    ["zero_init", "triton_flash_attention", "fused_softmax", "fused_dropout", "fused_bias_gelu"]
)
"""How SMP v1 made parameters, and which kernels it took: no result depends on them."""


def taken_by(kind: type[nn.Module], options: dict[str, Any]) -> dict[str, Any]:
    """Those that a module of this class is to be made with."""
    kind = next(base for base in kind.__mro__ if "__init__" in vars(base))  # hooks make classes of their own
    names, takes_all = _names_of(kind)
    is_ours = kind in _ours()
    return {
        name: value
        for name, value in options.items()
        if name in names or (takes_all and (not is_ours or name.startswith("fused_")))
    }


def known_options() -> frozenset[str]:
    """Those that some distributed module takes, or may be told in vain."""
    return _HINTS.union(*(_names_of(kind)[0] for kind in _ours()))


@functools.cache
def _names_of(kind: type[nn.Module]) -> tuple[frozenset[str], bool]:
    """Names of arguments of its constructor, and whether it takes others."""
    parameters: Iterable[inspect.Parameter] = inspect.signature(kind).parameters.values()
    kinds = {parameter.name: parameter.kind for parameter in parameters}
    names = {name for name, each in kinds.items() if each is not inspect.Parameter.VAR_KEYWORD}
    if kind in _GIVES_THE_REST_TO:
        names |= _names_of(_GIVES_THE_REST_TO[kind])[0]
    return frozenset(names), inspect.Parameter.VAR_KEYWORD in kinds.values()


@functools.cache
def _ours() -> frozenset[type[nn.Module]]:
    found = (getattr(distributed, name) for name in distributed.__all__)
    return frozenset(each for each in found if isinstance(each, type) and issubclass(each, nn.Module))
