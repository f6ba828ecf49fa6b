"""What lay once at places that code mentions, to say afterwards what of it has changed."""

from __future__ import annotations

from typing import Any

from ..state.places import Place
from ..state.python_state import PythonState

__all__ = ["Copy"]


class Copy:
    """Of places and objects.

    Args:
        roots: objects and their names.
        places: beside them.
        passed_over: kinds of objects that are not looked into.
    """

    def __init__(
        self, roots: list[tuple[Any, str]], places: list[Place], passed_over: tuple[type, ...]
    ) -> None:
        self._state = PythonState(passes_over=lambda value: isinstance(value, passed_over))
        for value, name in roots:
            self._state.add(value, name)
        self._places = [(place, place.get()) for place in places]

    def changed(self) -> str | None:
        """The first thing that is no longer as it was, in words."""
        for place, old in self._places:
            if place.get() != old:
                return f"sets {place.name}"
        return self._state.changed()
