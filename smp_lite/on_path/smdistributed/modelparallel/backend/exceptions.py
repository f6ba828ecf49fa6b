"""The errors by whose names SageMaker's training toolkit tells a library's failure from a script's."""

from smp_lite.errors import PeerFailed, SMPError, SMPMismatch, SMPTimeout

__all__ = ["PeerFailed", "SMPError", "SMPMismatch", "SMPTimeout"]
