"""What a model says of itself that its inputs depend on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["LENGTH", "NUM_SAMPLES", "Context", "Maker"]

NUM_SAMPLES = 4
LENGTH = 8
"""Of texts, without placeholders for images or sounds."""


class Context:
    """What inputs depend on.

    Attributes:
        model: the model.
        config: its configuration.
        text, vision, audio: the parts of it, itself where it has none.
        names: parameters of its forward.
        wanted: those that get a value, with what makes it.
        made: inputs that are there already, by name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        self.text = self.config.get_text_config()
        self.vision = _part(self.config, "vision", "image", "backbone", "encoder")
        self.audio = _part(self.config, "audio", "encoder", "speech")
        self.names = tuple(inspect.signature(model.forward).parameters)
        self.wanted: dict[str, Callable[[Context], Any]] = {}
        self.made: dict[str, Any] = {}
        self.generator = torch.Generator().manual_seed(7)

    def find(self, *names: str, default: Any = None, within: PreTrainedConfig | None = None) -> Any:
        """The first of these fields in the configuration or a part of it."""
        for config in [*([within] if within else []), self.config, *_parts(self.config)]:
            for name in names:
                value = getattr(config, name, None)
                if value is not None and value != []:
                    return value
        return default

    def tokens(self, *shape: int, high: int | None = None, low: int = 3) -> Tensor:
        """Random tokens; none of those that stand for something."""
        vocab_size = self.find("vocab_size", default=96, within=self.text)
        return torch.randint(low, high or max(low + 1, min(vocab_size, 48)), shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(*shape, generator=self.generator)

    def hidden(self, length: int = LENGTH) -> Tensor:
        """Hidden states of a text."""
        return self.normal(NUM_SAMPLES, length, self.find("hidden_size", "d_model", within=self.text))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        size = self.find("image_size", "img_size", "input_size", within=self.vision)
        if size is None or (isinstance(size, int) and size < 4):
            size = 32
        height, width = size[-2:] if isinstance(size, list | tuple) else (size, size)
        channels = self.find("num_channels", "in_channels", "in_chans", default=3, within=self.vision)
        return (channels if isinstance(channels, int) else 3), height, width


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _parts(value)


def _part(config: PreTrainedConfig, *kinds: str) -> PreTrainedConfig:
    for kind in kinds:
        for name, value in vars(config).items():
            if isinstance(value, PreTrainedConfig) and kind in name:
                return value
    return config


Maker = Callable[[Context], Any]
"""Makes one input; None where there is nothing to give."""
