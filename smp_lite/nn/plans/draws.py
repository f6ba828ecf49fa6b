"""Which functions draw random numbers, as the code of a forward calls them.

All ranks draw from the same random stream. What is drawn for this rank's part of the features would so be the
same for every rank's part, where one process draws for all features.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from .source import words

__all__ = ["RateOf", "draws", "module_draws"]

RateOf = Callable[[ast.expr], float | None]
"""The number that an expression stands for; None: the code does not show it."""

_ALWAYS = words(
    """
    bernoulli bernoulli_ binomial poisson multinomial normal normal_ uniform_ exponential_ geometric_ cauchy_
    log_normal_ random_ rand randn randint randperm rand_like randn_like randint_like gumbel_softmax
    sample rsample sample_n
    trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_
    """
)

_DROPOUTS = words(
    """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
    dropout_ feature_dropout_ alpha_dropout_ feature_alpha_dropout_
    """
)
_OFF_BY_DEFAULT = words("alpha_dropout feature_alpha_dropout")
"""Those of ``torch.nn.functional`` that are told nothing drop nothing."""


def draws(name: str, node: ast.Call, rate_of: RateOf) -> str | None:
    """What a function of this name draws in this call; None: nothing.

    Torch draws nothing for dropout with probability 0, or that is not training.
    """
    if ".random." in ast.unparse(node.func) or name in _ALWAYS:
        return f"draws random numbers ({_shown(node)})"
    if name in _DROPOUTS:
        on = _given(node, 2, "training", "train")
        trains = (0.0 if name in _OFF_BY_DEFAULT else 1.0) if on is None else rate_of(on)
        given = _given(node, 1, "p")
        rate = 0.5 if given is None else rate_of(given)
        return None if trains == 0.0 or rate == 0.0 else f"applies dropout ({_shown(node)})"
    if name == "scaled_dot_product_attention":
        given = _given(node, 4, "dropout_p")
        return None if given is None or rate_of(given) == 0.0 else f"applies dropout ({_shown(node)})"
    if name in ("rrelu", "rrelu_"):
        on = _given(node, 3, "training")
        return None if on is None or rate_of(on) == 0.0 else f"draws random numbers ({_shown(node)})"
    return None


def module_draws(name: str, module: nn.Module) -> str | None:
    """The same of calling a module of torch's; whether it is training may change."""
    if isinstance(module, _DropoutNd) and module.p:
        return f"applies dropout ({name}, p={module.p})"
    if isinstance(module, nn.RReLU) and module.lower != module.upper:
        return f"draws random numbers ({name}, {module})"
    return None


def _given(node: ast.Call, place: int, *names: str) -> ast.expr | None:
    for keyword in node.keywords:
        if keyword.arg in names:
            return keyword.value
    return node.args[place] if len(node.args) > place else None


def _shown(node: ast.AST) -> Any:
    return ast.unparse(node)[:120]
