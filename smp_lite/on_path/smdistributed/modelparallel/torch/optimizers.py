from smp_lite.optim.fused import FusedLAMB, FusedLamb, FusedNovoGrad

__all__ = ["FusedLAMB", "FusedLamb", "FusedNovoGrad"]
