"""Numbers for people."""

from __future__ import annotations

import re

__all__ = ["human_bytes", "num_bytes"]

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def human_bytes(num_bytes: int) -> str:
    """``17 B``, ``1.5 KiB``, ``3.0 GiB``."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def num_bytes(value: object) -> object:
    """A text such as ``3 GiB`` or ``500MB`` as a number; everything else, and other texts, as it is."""
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", value, re.I) if isinstance(value, str) else None
    )
    if match is None or match[2].upper() not in _UNITS:
        return value
    return round(float(match[1]) * _UNITS[match[2].upper()])
