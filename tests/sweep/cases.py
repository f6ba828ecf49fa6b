"""What can be trained for a model type."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.sweep.architectures import architectures, config_class
from tests.sweep.configurations import SCALES, Scale, tiny
from tests.sweep.inputs import inputs

__all__ = ["Case", "cases"]


@dataclass(frozen=True)
class Case:
    """One model class with inputs.

    Attributes:
        model_type: of its configuration.
        architecture: the class.
        labels: whether it gets labels and computes its own loss.
        scale: how small it is.
        dtype: of parameters and inputs that are not whole numbers.
    """

    model_type: str
    architecture: type[PreTrainedModel]
    labels: bool
    scale: Scale
    dtype: torch.dtype = torch.float32

    def build(self) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model, the same each time, and the keyword arguments of its forward."""
        config = tiny(config_class(self.model_type), self.scale)
        torch.manual_seed(0)
        module = self.architecture(config).train()
        batch = inputs(module, labels=self.labels)
        return module.to(self.dtype), {name: self._converted(value) for name, value in batch.items()}

    def _converted(self, value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_real else value


def cases(model_type: str) -> Iterator[Case]:
    """In order of preference."""
    for architecture in architectures(model_type):
        for labels, scale in itertools.product((True, False), SCALES):
            yield Case(model_type, architecture, labels, scale)
