import smp_lite.nn.huggingface.gptj
from smp_lite.nn.huggingface.gptj import *  # noqa: F403

__all__ = smp_lite.nn.huggingface.gptj.__all__
