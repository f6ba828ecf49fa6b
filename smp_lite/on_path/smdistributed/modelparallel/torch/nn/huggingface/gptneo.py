import smp_lite.nn.huggingface.gptneo
from smp_lite.nn.huggingface.gptneo import *  # noqa: F403

__all__ = smp_lite.nn.huggingface.gptneo.__all__
