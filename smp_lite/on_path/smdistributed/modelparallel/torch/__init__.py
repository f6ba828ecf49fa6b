"""``import smdistributed.modelparallel.torch as smp``: the names of ``smp_lite``, the same objects."""

from typing import Any

import smp_lite

from . import amp, exceptions, model, nn, optimizers, patches, state_mod, utils  # noqa: F401

__all__ = smp_lite.__all__


def __getattr__(name: str) -> Any:
    return getattr(smp_lite, name)


def __dir__() -> list[str]:
    return sorted({*dir(smp_lite), *globals()})
