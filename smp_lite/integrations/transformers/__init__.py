"""``Trainer``: that of transformers 5, over stages, replicas, split layers and sharded parameters.

``from smp_lite.integrations.transformers import Trainer`` in the place of transformers' own, before
``TrainingArguments`` are made. transformers and accelerate are needed here and nowhere else in the library.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .upstream import prepare

    prepare()
    from .trainer import Trainer

    return Trainer


def __dir__() -> list[str]:
    return __all__
