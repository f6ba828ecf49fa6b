"""Inputs for a model, from the parameters of its ``forward`` and its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.sweep.context import LENGTH, NUM_SAMPLES, Context, Maker
from tests.sweep.special_inputs import SPECIAL

__all__ = ["NoLabelsError", "inputs"]

GRID = (1, 4, 4)
"""Frames, rows and columns of patches in an image, for models that take patches."""


class NoLabelsError(Exception):
    """No labels are known for a model."""


def inputs(model: PreTrainedModel, *, labels: bool) -> dict[str, Tensor]:
    """Keyword arguments of ``forward``, samples first.

    Args:
        model: any.
        labels: also those that make it compute its loss.

    Raises:
        NoLabelsError: it wants labels, and none are known for it.
    """
    context = Context(model)
    architecture = type(model).__name__
    made = context.made
    special = {**SPECIAL.get(type(model.config).__name__, {}), **SPECIAL.get(architecture, {})}
    required = _required(model, "forward", "get_image_features", "get_audio_features")
    for name in context.names:
        make = special[name] if name in special else _MAKERS.get(name)
        if make is None and name in required and name not in special:
            make = _REQUIRED.get(name)
        if make is not None:
            context.wanted[name] = make
    for name in sorted(context.wanted, key=_order):
        value = context.wanted[name](context)
        if value is not None:
            made[name] = value
    _add_placeholders(context)
    if labels and not any("labels" in name for name in made):
        made.update(_labels(context, architecture))
    return made


def _required(model: PreTrainedModel, *methods: str) -> set[str]:
    """Parameters without a default of those methods that the model has."""
    return {
        name
        for method in methods
        if hasattr(model, method)
        for name, parameter in inspect.signature(getattr(model, method)).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }


def _order(name: str) -> int:
    return list(_MAKERS).index(name) if name in _MAKERS else -1


# Placeholders -----------------------------------------------------------------------------------------------

_PLACEHOLDERS = (
    ("image_token_id", "image_token_index", "get_image_features", "pixel_values"),
    ("audio_token_id", "audio_token_index", "get_audio_features", "input_"),
)


def _add_placeholders(context: Context) -> None:
    """Puts as many image and audio tokens into the text as the model makes of its images and sounds."""
    if "input_ids" not in context.made:
        return
    for field, other_field, method_name, prefix in _PLACEHOLDERS:
        token = context.find(field, other_field)
        method = _method(context.model, method_name)
        if token is None or method is None:
            continue
        wanted = inspect.signature(method).parameters
        given = {
            name: value for name, value in context.made.items() if name in wanted and name != "input_ids"
        }
        if not any(name.startswith(prefix) for name in given):
            continue
        with torch.no_grad():
            features = method(**given)
        if isinstance(features, dict):
            features = features.get("pooler_output", features.get("last_hidden_state"))
        count = _rows(features) // NUM_SAMPLES
        ids = context.made["input_ids"]
        placeholders = torch.full((NUM_SAMPLES, count), token, dtype=ids.dtype)
        context.made["input_ids"] = torch.cat([ids[:, :1], placeholders, ids[:, 1:]], dim=1)
    ids = context.made["input_ids"]
    if "mm_token_type_ids" in context.names and "mm_token_type_ids" not in context.made:
        image, audio = (
            context.find(f"{kind}_token_id", f"{kind}_token_index", default=-1) for kind in ("image", "audio")
        )
        context.made["mm_token_type_ids"] = (ids == image).long() + 3 * (ids == audio).long()
    for name in ("attention_mask", "token_type_ids"):
        if name in context.made:
            fill = torch.ones_like if name == "attention_mask" else torch.zeros_like
            context.made[name] = fill(ids)


def _method(model: PreTrainedModel, name: str) -> Callable[..., Any] | None:
    """Of the model or of the first module in it that has one."""
    return next((getattr(module, name) for module in model.modules() if hasattr(module, name)), None)


def _rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    return sum(_rows(part) for part in features)


# Labels -----------------------------------------------------------------------------------------------------


def _labels(context: Context, architecture: str) -> dict[str, Tensor]:
    if "labels" not in context.names:
        raise NoLabelsError
    classes = context.config.num_labels or 2
    one_each = torch.arange(NUM_SAMPLES) % classes
    if architecture.endswith("ForCTC"):
        return {"labels": context.tokens(NUM_SAMPLES, 2)}
    if "TokenClassification" in architecture:
        return {
            "labels": torch.randint(0, classes, context.made["input_ids"].shape, generator=context.generator)
        }
    if "ObjectDetection" in architecture:
        raise NoLabelsError
    if "Segmentation" in architecture:
        _, height, width = context.image_shape
        return {
            "labels": torch.randint(0, classes, (NUM_SAMPLES, height, width), generator=context.generator)
        }
    if "Classification" in architecture:
        return {"labels": one_each}
    if "MultipleChoice" in architecture:
        return {"labels": one_each}
    if context.config.is_encoder_decoder or "Seq2Seq" in architecture:
        return {"labels": context.tokens(NUM_SAMPLES, 6)}
    if "input_ids" in context.made:
        return {"labels": context.made["input_ids"].clone()}
    raise NoLabelsError


# Makers -----------------------------------------------------------------------------------------------------


def _input_ids(c: Context) -> Tensor:
    return c.tokens(NUM_SAMPLES, LENGTH)


def _attention_mask(c: Context) -> Tensor | None:
    return torch.ones_like(c.made["input_ids"]) if "input_ids" in c.made else None


def _bbox(c: Context) -> Tensor:
    corner = torch.randint(0, 50, (NUM_SAMPLES, LENGTH, 2), generator=c.generator)
    return torch.cat([corner, corner + 10], dim=-1)


def _pixel_values(c: Context) -> Tensor:
    """Images; flat patches where the model takes their grid with them."""
    if {"image_grid_thw", "grid_thw"} & set(c.names):
        return _patches(c)
    return c.normal(NUM_SAMPLES, *c.image_shape)


def _patches(c: Context) -> Tensor:
    patch = c.find("patch_size", default=8, within=c.vision)
    frames = c.find("temporal_patch_size", "patch_temporal", default=1, within=c.vision)
    return c.normal(NUM_SAMPLES * GRID[0] * GRID[1] * GRID[2], c.image_shape[0] * frames * patch * patch)


def _grid(c: Context) -> Tensor:
    return torch.tensor([GRID] * NUM_SAMPLES)


def _image_sizes(c: Context) -> Tensor:
    return torch.tensor([c.image_shape[1:]] * NUM_SAMPLES)


def _input_features(c: Context) -> Tensor:
    names = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "mel_bins")
    mels = c.find(*names, default=16, within=c.audio)
    length = 2 * c.find("max_source_positions", default=16, within=c.audio)
    return c.normal(NUM_SAMPLES, mels, length)


def _mask_of(name: str, *dims: int) -> Maker:
    """Ones over some dimensions of another input."""

    def make(c: Context) -> Tensor | None:
        if name not in c.made:
            return None
        return torch.ones([c.made[name].shape[dim] for dim in dims], dtype=torch.long)

    return make


_MAKERS: dict[str, Maker] = {
    "input_ids": _input_ids,
    "attention_mask": _attention_mask,
    "bbox": _bbox,
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "pixel_values": _pixel_values,
    "input_features": _input_features,
    "input_features_mask": _mask_of("input_features", 0, 2),
    "input_values": lambda c: 0.1 * c.normal(NUM_SAMPLES, 2000),
    "decoder_input_ids": lambda c: c.tokens(NUM_SAMPLES, 6),
}
_REQUIRED: dict[str, Maker] = {
    "hidden_states": lambda c: _patches(c) if "grid_thw" in c.names else c.hidden(),
    "inputs_embeds": lambda c: c.hidden(),
    "image_sizes": _image_sizes,
    "pixel_values_videos": lambda c: c.normal(NUM_SAMPLES, 2, *c.image_shape),
    "encoder_hidden_states": lambda c: c.hidden(),
}
"""Made only where the parameter has no default."""
