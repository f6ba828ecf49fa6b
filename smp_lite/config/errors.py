"""The one error type of the configuration, and how a complaint is put.

The texts of the SageMaker SDK's own checks are kept word for word where it has one, because people
search for them; what they lack (the value found, its type, the way out) follows on the same line.
"""

from __future__ import annotations

import reprlib

__all__ = ["ConfigError", "complaint"]


class ConfigError(ValueError):
    """A mistake in the configuration, told in one readable line."""


def complaint(text: str, key: str, value: object, way_out: str) -> str:
    """Returns ``text``, what was given for ``key`` (a long value shortened), and the way out."""
    return f"{text} Got {key}={reprlib.repr(value)} ({type(value).__name__}): {way_out}"
