"""Names of SMP v1 whose features are not built: they import, and refuse when they are used.

A script imports everything at its top, and asks ``isinstance(module, smp.nn.FlashAttentionLayer)`` whether
or not it has any. So the name must be there, of the right kind, and say at its use what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import MissingAttribute, SMPError
from .names import Name, under

__all__ = ["missing_in", "refusal"]

_made: dict[str, Any] = {}


def refusal(name: Name) -> SMPError:
    """What the use of a refused name raises."""
    return SMPError(f"smp.{name.path} belongs to {name.says}")


def missing_in(module: str, full: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of SMP v1's.

    Args:
        module: its path below ``smp``; "" for ``smp`` itself.
        full: its name, for errors.
    """
    names = under(module)

    def __getattr__(attribute: str) -> Any:
        name = names.get(attribute)
        if name is None or name.status != "refused":
            raise AttributeError(f"module {full!r} has no attribute {attribute!r}")
        return _object(name)

    return __getattr__


def _object(name: Name) -> Any:
    """Always the same one: a class is compared by identity."""
    if name.kind == "attribute":
        raise MissingAttribute(str(refusal(name)))
    if name.path not in _made:
        _made[name.path] = _class(name) if name.kind == "class" else _function(name)
    return _made[name.path]


def _function(name: Name) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise refusal(name)

    function.__name__ = function.__qualname__ = name.path.rpartition(".")[2]
    function.__doc__ = f"Not supported yet: it belongs to {name.says}."
    return function


def _class(name: Name) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise refusal(name)

    last = name.path.rpartition(".")[2]
    doc = f"Not supported yet: it belongs to {name.says}."
    return type(last, (_Missing,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})


class _Missing:
    """No module is an instance of it; classes derived from it refuse to be made too."""
