import smp_lite.nn.huggingface.gpt2
from smp_lite.nn.huggingface.gpt2 import *  # noqa: F403

__all__ = smp_lite.nn.huggingface.gpt2.__all__
