"""The errors that a user of the library can meet."""

from __future__ import annotations


class SMPError(RuntimeError):
    """A rule of the library was broken; the text says which and what to do instead."""


class SMPTimeout(SMPError):
    """Something waited longer than the watchdog allows; the text says for whom."""


class MissingAttribute(SMPError, AttributeError):
    """An attribute whose feature is not there yet; ``hasattr`` says no."""


class SMPMismatch(SMPError):
    """Ranks that must do the same did different things."""


class PeerFailed(SMPError):
    """Another rank failed first, with an error of its own that says why."""
