"""What containers hold, read and put back without running code of theirs; when plain values are the same."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

__all__ = ["MISSING", "base_of", "contents_of", "refill", "same_plain"]

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""In the place of an attribute that is not there."""


def base_of(container: Any) -> Any:
    """The built-in class of a container, whose methods do nothing but what they say.

    A subclass's own may do anything: transformers' table of activations builds one for each item that is
    read, and its ``ModelOutput`` forbids to take items out.
    """
    bases = (OrderedDict, dict, list, tuple, deque, set, frozenset)
    return next(base for base in bases if isinstance(container, base))


def contents_of(container: Any) -> Any:
    """A dict, or a list, of what a dict, list, tuple, deque or set holds."""
    base = base_of(container)
    if isinstance(container, dict):
        return dict(base.items(container))
    return list(base.__iter__(container))


def refill(container: Any, contents: Any) -> None:
    """Makes a dict, list, deque or set hold these contents again."""
    base = base_of(container)
    base.clear(container)
    if isinstance(container, dict):
        for key, item in contents.items():
            base.__setitem__(container, key, item)
    elif isinstance(container, set):
        base.update(container, contents)
    else:
        base.extend(container, contents)


def same_plain(a: Any, b: Any) -> bool:
    """Whether no code could tell two plain values apart. 1 is not 1.0, and 0.0 is not -0.0."""
    kind = type(a)
    if kind is not type(b):
        return False
    return repr(a) == repr(b) if kind is float or kind is complex else bool(a == b)
