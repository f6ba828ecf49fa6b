import smp_lite.nn.huggingface.bert
from smp_lite.nn.huggingface.bert import *  # noqa: F403

__all__ = smp_lite.nn.huggingface.bert.__all__
