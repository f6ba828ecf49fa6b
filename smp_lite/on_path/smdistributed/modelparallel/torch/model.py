from smp_lite.wrapper.distributed_model import DistributedModel

__all__ = ["DistributedModel"]
