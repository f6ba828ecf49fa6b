from smp_lite.amp import GradScaler

__all__ = ["GradScaler"]
