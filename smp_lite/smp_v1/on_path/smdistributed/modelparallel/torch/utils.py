from smp_lite.smp_v1.utils import get_distribution_axis, rmsg

__all__ = ["get_distribution_axis", "rmsg"]
