"""Which cases of a grid are run always, and which by ``make test-all`` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """Every so many always; the others are marked ``thorough``."""
    return [
        pytest.param(value, marks=pytest.mark.thorough if place % number else ())
        for place, value in enumerate(values)
    ]
