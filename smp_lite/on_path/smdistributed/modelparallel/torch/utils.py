from smp_lite.utils import get_distribution_axis, rmsg

__all__ = ["get_distribution_axis", "rmsg"]
