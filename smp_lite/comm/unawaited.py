"""What is under way and nobody waits for: its memory stays until it has ended.

A rank that fails posts its part of a collective and goes on. Its peers may come to theirs much later, when
whoever has posted it is gone: a step, a model, a session. MPI writes into the memory all the same, so the
process keeps it.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["keep", "let_go_of_ended"]


class _Pending(Protocol):
    def done(self) -> bool: ...


_kept: list[tuple[_Pending, Any]] = []


def keep(pending: _Pending, memory: Any, *, look: bool = True) -> None:
    """``memory`` lives until ``pending`` has ended; ``look`` whether others have, which may call MPI."""
    if look:
        let_go_of_ended()
    _kept.append((pending, memory))


def let_go_of_ended() -> None:
    """Looks what has ended by now."""
    if _kept:
        _kept[:] = [item for item in _kept if not item[0].done()]
