"""What one of AWS's own tests calls; it compares with files that only AWS has."""

from typing import Any

__all__ = ["dump_model", "verify"]


def dump_model(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


def verify(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""
