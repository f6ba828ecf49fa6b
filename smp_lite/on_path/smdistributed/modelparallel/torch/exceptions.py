from smp_lite.errors import PeerFailed, SMPError, SMPMismatch, SMPTimeout

__all__ = ["PeerFailed", "SMPError", "SMPMismatch", "SMPTimeout"]
