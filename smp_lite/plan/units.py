"""Numbers for people."""

from __future__ import annotations


def human_bytes(num_bytes: int) -> str:
    """``17 B``, ``1.5 KiB``, ``3.0 GiB``."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
