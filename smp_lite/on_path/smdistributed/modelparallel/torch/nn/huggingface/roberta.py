import smp_lite.nn.huggingface.roberta
from smp_lite.nn.huggingface.roberta import *  # noqa: F403

__all__ = smp_lite.nn.huggingface.roberta.__all__
