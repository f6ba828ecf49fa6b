"""Any number of ``.module`` ends at the user's module.

Scripts write ``model.module.module.transformer``: SMP, and their own wrappers for fp16, had more layers than
there are here. But whoever walks to the innermost module (``while hasattr(model, "module")``, as transformers
does in every ``save_pretrained``) must come to an end. So the wrapped module has a ``module``, itself, where
code names the attribute, and has none where a function asks for it. What code does is told by the instruction
that it is at.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

__all__ = ["end_hops"]

_NAMED = frozenset(dis.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap)


def end_hops(module: nn.Module) -> Callable[[], None] | None:
    """Lets ``module.module`` be the module itself; a ``module`` of its own stays what it is.

    Returns:
        What takes it back; None: there is nothing to take back.
    """
    kind = type(module)
    if hasattr(module, "module"):
        return None
    kind.module = _Hop(module)  # type: ignore[attr-defined]

    def take_back() -> None:
        if isinstance(vars(kind).get("module"), _Hop):
            del kind.module  # type: ignore[attr-defined]

    return take_back


class _Hop:
    """On the class, so that copies of the module and its other instances have none; what an instance sets
    under that name goes before it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is self._module and _is_named(sys._getframe(1)):
            return instance
        raise AttributeError(f"{owner.__name__!r} object has no attribute 'module'")


def _is_named(frame: FrameType) -> bool:
    return frame.f_code.co_code[frame.f_lasti] in _NAMED
