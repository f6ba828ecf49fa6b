"""Which cases of a grid are run always, which by ``make test-all`` alone, and which not with ``--device``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["marked", "one_in"]


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """Every so many always; the others are marked ``thorough``."""
    return [
        pytest.param(value, marks=pytest.mark.thorough if place % number else ())
        for place, value in enumerate(values)
    ]


def marked(mark: str, names: Iterable[str], *which: str) -> list[Any]:
    """The names, of which some have the mark."""
    return [pytest.param(n, marks=getattr(pytest.mark, mark) if n in which else ()) for n in names]
