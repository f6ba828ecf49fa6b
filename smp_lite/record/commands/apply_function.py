"""``SomeFunction.apply`` of an autograd function, as something that can be recorded."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["ApplyFunction"]


class ApplyFunction:
    """``SomeFunction.apply`` as a recordable callable; equal for the same class."""

    def __init__(self, cls: type[torch.autograd.Function]) -> None:
        self.cls = cls
        self.__name__ = f"{cls.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApplyFunction) and self.cls is other.cls

    def __hash__(self) -> int:
        return hash(self.cls)
