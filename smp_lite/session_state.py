"""``smp.state``: the session under the name that SMP scripts know."""

from __future__ import annotations

from typing import Any

from . import session as session_module

__all__ = ["STATE"]


class State:
    """Reads and sets attributes of the session; there before ``smp.init()``, when nothing can be read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(session_module.current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(session_module.current(), name, value)

    def __repr__(self) -> str:
        return (
            repr(session_module.current())
            if session_module.is_initialized()
            else "<smp.state before smp.init()>"
        )


STATE = State()
