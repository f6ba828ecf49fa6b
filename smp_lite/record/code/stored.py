"""Where objects of torch's and of Python's own classes keep what their methods give.

Code that calls ``scheduler.get_last_lr()`` or ``event.is_set()`` does not mention the attributes that it
reads by that, so for these classes it is known which they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["stored_in"]

_Entry = tuple[dict[str, Any] | None, Any, str]
"""(namespace, key, text), or (None, object, text) where there is no namespace; the text follows a name."""


def stored_in(value: Any) -> Iterable[_Entry] | None:
    """The namespaces and keys, or the objects, in which it keeps what can be read by it; None: not known."""
    kind = type(value)
    if isinstance(value, torch.optim.Optimizer):
        return [
            (group, key, f".param_groups[{i}][{key!r}]")
            for i, group in enumerate(value.param_groups)
            for key in group
            if key != "params"
        ]
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
        return [(value.__dict__, key, f".{key}") for key in value.__dict__]
    if isinstance(value, threading.Event):
        return [(value.__dict__, "_flag", "")]
    if kind.__module__ == "multiprocessing.sharedctypes":
        return [(None, value.get_obj(), "")]
    return None
