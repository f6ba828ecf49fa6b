"""Inputs that general rules cannot know, by the class of the model or of its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.sweep.inputs import Context

__all__ = ["SPECIAL"]

Maker = Callable[["Context"], Any]

N = 4
"""Samples."""


def _normal(*shape: int) -> Maker:
    """Random numbers for each sample."""
    return lambda c: c.normal(N, *shape)


def _tokens(*shape: int) -> Maker:
    return lambda c: c.tokens(N, *shape)


def _images(*before: int) -> Maker:
    """Several images for each sample."""
    return lambda c: c.normal(N, *before, *c.image_shape)


def _frames(length: int) -> Maker:
    """Features of sounds, time before frequency."""

    def make(c: Context) -> Any:
        names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mel_bins")
        return c.normal(N, length, c.find(*names, default=16, within=c.audio))

    return make


def _constant(value: Any) -> Maker:
    return lambda c: value


def _ones(*shape: int) -> Maker:
    return lambda c: torch.ones(N, *shape, dtype=torch.long)


NONE = _constant(None)

_SERIES = {
    "past_values": _normal(10),
    "past_time_features": _normal(10, 0),
    "past_observed_mask": lambda c: torch.ones(N, 10),
    "future_values": _normal(4),
    "future_time_features": _normal(4, 0),
}

_SPEECH = {"input_features": _frames(32), "input_features_mask": NONE}

SPECIAL: dict[str, dict[str, Maker]] = {
    "ASTConfig": {"input_values": _frames(64)},
    "AutoformerConfig": _SERIES,
    "CanaryConfig": _SPEECH,
    "ClapConfig": {"input_features": _normal(1, 64, 16)},
    "ClapAudioConfig": {"input_features": _normal(1, 64, 16)},
    "CohereAsrConfig": _SPEECH,
    "ColModernVBertConfig": {"pixel_values": _images(1)},
    "CsmConfig": {"input_ids": _tokens(8, 4), "labels": NONE},
    "DacConfig": {"input_values": _normal(1, 2000)},
    "DecisionTransformerConfig": {
        "states": _normal(5, 17),
        "actions": _normal(5, 4),
        "rewards": _normal(5, 1),
        "returns_to_go": _normal(5, 1),
        "timesteps": _tokens(5),
        "attention_mask": _ones(5),
    },
    "DiaConfig": {"decoder_input_ids": _tokens(6, 9)},
    "EfficientLoFTRConfig": {"pixel_values": _images(2)},
    "EncodecConfig": {"input_values": _normal(1, 2000)},
    "Idefics2Config": {"pixel_values": _images(1)},
    "Idefics3Config": {"pixel_values": _images(1)},
    "InformerConfig": _SERIES,
    "LightGlueConfig": {"pixel_values": _images(2)},
    "MimiConfig": {"input_values": _normal(1, 2000)},
    "ModernVBertConfig": {"pixel_values": _images(1)},
    "SmolVLMConfig": {"pixel_values": _images(1)},
    "SuperGlueConfig": {"pixel_values": _images(2)},
    "TimeSeriesTransformerConfig": _SERIES,
    "TimesformerConfig": {"pixel_values": _images(2)},
    "UltraVBertConfig": {"pixel_values": _images(1)},
}
"""Makers of inputs by name; one that gives None leaves the input out."""
