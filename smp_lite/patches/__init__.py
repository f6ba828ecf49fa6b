"""``smp.patches``: what SMP v1 keeps under this name."""

from . import checkpoint

__all__ = ["checkpoint"]
