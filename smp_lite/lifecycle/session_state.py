"""``smp.state``: the session under the name that SMP scripts know."""

from __future__ import annotations

from typing import Any

from .. import session as session_module
from ..errors import MissingAttribute
from ..smp_v1.missing import refusal
from ..smp_v1.names import under

__all__ = ["state"]

_MISSING = under("state_mod.state")


class State:
    """Reads and sets attributes of the session; there before ``smp.init()``, when nothing can be read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _MISSING:
            raise MissingAttribute(str(refusal(_MISSING[name])))
        if not session_module.is_initialized():
            raise MissingAttribute(f"smp.state.{name}: call smp.init() first")
        return getattr(session_module.current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(session_module.current(), name, value)

    def __repr__(self) -> str:
        return (
            repr(session_module.current())
            if session_module.is_initialized()
            else "<smp.state before smp.init()>"
        )


state = State()
