"""torch's checkpoints in container code, around calls of several stages.

The code in them is recorded once. Each module that it calls whole is recorded under a checkpoint of its own,
which its owner computes again (:mod:`..describe.checkpointed_calls`); what is computed between the modules is
kept. Gradients are the same. What the second forward of one process would change again is not: running
statistics, attributes, lists. That is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...errors import SMPError
from ..code.readers import Readers

__all__ = [
    "Region",
    "inside_reentrant",
    "is_inside_checkpoint",
    "is_inside_reentrant",
    "refuse_effect",
    "refuse_node_hook",
    "refuse_saved_hooks",
]

_CHANGES = ("sets ", "changes ", "fills ", "may take ", "may fill ", "adds or removes ", "binds ")
_depth = 0


@contextlib.contextmanager
def inside_reentrant(function: Any) -> Iterator[None]:
    """Within: the function runs that a reentrant checkpoint was given."""
    global _depth
    region = Region(function) if torch.is_grad_enabled() else None
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
    if region is not None:
        region.leave()


class Region:
    """What a checkpointed function is given to run once more: what it could change, before it runs.

    Args:
        function: a function, a method or a module.
    """

    def __init__(self, function: Any) -> None:
        owner = getattr(function, "__self__", function)
        readers = Readers(owner if isinstance(owner, nn.Module) else None, ())
        readers.add_function(function)
        self._label = getattr(function, "__name__", type(function).__name__)
        self._copy = readers.complete().copy()

    def leave(self) -> None:
        """It has run.

        Raises:
            SMPError: something has changed, as the second run would change it again.
        """
        text = self._copy.changed()
        if text is not None:
            raise _again(self._label, text)


def refuse_effect(label: str, effect: str) -> None:
    """A call, or the line that runs now, does something beside computing: ``sets x.count``.

    Raises:
        SMPError: a checkpoint lies around it.
    """
    if effect.startswith(_CHANGES) and is_inside_checkpoint():
        raise _again(label, effect)


def is_inside_reentrant() -> bool:
    """Whether the line that runs now is a reentrant checkpoint's; others show by their hooks."""
    return _depth > 0


def is_inside_checkpoint() -> bool:
    """Whether the line that runs now would run once more in backward."""
    return torch.is_grad_enabled() and (_depth > 0 or _is_checkpointed())


def _again(label: str, effect: str) -> SMPError:
    return SMPError(
        f"{label} {effect} inside a checkpoint around calls of several stages: these run once here, and in "
        "one process the second forward does it again. Leave it out of the checkpoint, or call checkpoint() "
        "inside modules that lie on one stage"
    )


def _is_checkpointed() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and str(getattr(hooks[0], "__module__", "")) == "torch.utils.checkpoint"


def refuse_saved_hooks() -> None:
    """``with saved_tensors_hooks(...)`` in recorded code, with functions of the user's.

    Raises:
        SMPError: what autograd saves of calls that run later would not go through them.
    """
    raise SMPError(
        "torch.autograd.graph.saved_tensors_hooks() around calls of several stages has no effect on them, "
        "and would change gradients in one process: use it inside a module that lies on one stage, or around "
        "the call of the step function"
    )


def refuse_node_hook() -> None:
    """``with node_creation_hook(...)`` in recorded code.

    Raises:
        SMPError: calls that run later would make their nodes without it.
    """
    raise SMPError(
        "torch.autograd.graph.node_creation_hook() around calls of several stages would see none of "
        "their nodes, which are made later: use it inside a module that lies on one stage"
    )
