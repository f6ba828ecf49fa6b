import smp_lite.nn
from smp_lite.nn import *  # noqa: F403

from . import huggingface as huggingface

__getattr__ = smp_lite.nn.__getattr__
