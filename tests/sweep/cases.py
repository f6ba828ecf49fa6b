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

__all__ = ["Case", "cases", "in_dtype"]


@dataclass(frozen=True)
class Case:
    """One model class.

    Attributes:
        model_type: of its configuration.
        architecture: the class.
        labels: whether it gets labels and computes its own loss.
        scale: how small it is.
        dtype: of parameters.
    """

    model_type: str
    architecture: type[PreTrainedModel]
    labels: bool
    scale: Scale
    dtype: torch.dtype = torch.float32

    def module(self) -> PreTrainedModel:
        """The model, the same each time."""
        config = tiny(config_class(self.model_type), self.scale)
        torch.manual_seed(0)
        return self.architecture(config).train().to(self.dtype)

    def batch(self, module: PreTrainedModel) -> dict[str, Any]:
        """Keyword arguments of its forward, the same each time; may run parts of the model."""
        return inputs(module, labels=self.labels)


def in_dtype(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A batch with numbers of another precision."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def cases(model_type: str) -> Iterator[Case]:
    """In order of preference."""
    for architecture in architectures(model_type):
        for labels, scale in itertools.product((True, False), SCALES):
            yield Case(model_type, architecture, labels, scale)
