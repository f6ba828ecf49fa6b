"""Tiny configurations, made from the default one of each class.

Every width of every part becomes the same small number, and so do all heads and all layer counts. So what
must agree between the parts of a model (the text's width and its projector's, say) still agrees, with no
knowledge of any of them. What that cannot know stands in :mod:`tests.sweep.special`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import PreTrainedConfig

from tests.sweep.special import CONFIGURATIONS

__all__ = ["tiny"]

WIDTH = 32
HEADS = 2
HEAD_DIM = 16
VOCAB_SIZE = 96
IMAGE_SIZE = 32
PATCH_SIZE = 8
MAX_LAYERS = 4

_LIMITS: tuple[tuple[str, int], ...] = (
    (r".*vocab.*", VOCAB_SIZE),
    (r".*(image|img|crop)_size|input_size|resolution|.*grid_size", IMAGE_SIZE),
    (r".*patch_size", PATCH_SIZE),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r".*heads?|.*heads?_kv|n_head_kv|num_query_groups", HEADS),
    (r".*head_(dim|size)|d_kv|d_head|kv_channels|.*_rank|.*headdim|rotary_dim", HEAD_DIM),
    (r".*(layers|blocks|depths?|num_stages|layers_per_stack|n_layer)", 2),
    (r".*(intermediate|ffn|ff_|_ff|mlp|inner|feedforward|feed_forward).*", 2 * WIDTH),
    (r".*(position|seq_len|max_len|seqlen|context_length|block_size|max_text|n_ctx|text_seq).*", 128),
    (r".*(experts|per_tok).*|.*top_?k.*", 2),
    (r".*experts?", 4),
    (r".*(codebooks|quantizers|queries|query_num|num_latents|proposals|query_tokens).*", 8),
    (r".*(window|chunk).*", 4),
    (r".*(mel_bins|feature_size|n_mels|mels)", 16),
)
"""Largest value of an integer field, by its name; the first that matches."""

_LARGE = 40
"""Any other integer from here on is a width."""

_RANDOM = re.compile(r".*(drop|noise|jitter|label_smoothing).*|mask_(time|feature)_prob")

_TOKEN = re.compile(r".*_(id|index)")

_FIRST_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

_UNTOUCHED = {"id2label", "label2id", "dtype", "transformers_version", "architectures", "quantization_config"}


def tiny(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A configuration of this class for a model of some thousand parameters; no random drops, no caches.

    Raises:
        Exception: whatever the class raises where the values do not fit each other.
    """
    try:
        default = config_class()
    except ValueError:  # some have no valid default
        default = config_class(**CONFIGURATIONS.get(config_class.__name__, {}))
    config = _shrunk_config(default)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    return config


def _shrunk_config(default: PreTrainedConfig) -> PreTrainedConfig:
    config_class = type(default)
    given = CONFIGURATIONS.get(config_class.__name__, {})
    present = vars(default)
    layers = _representative_layers(default)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name = field.name
        if name in _UNTOUCHED or name.startswith("_") or name not in present or name in given:
            continue
        value = present[name]
        if layers and isinstance(value, list | tuple) and len(value) == layers.total:
            values[name] = type(value)(_shrunk(name, value[i], present) for i in layers.chosen)
        elif layers and name == layers.field:
            values[name] = len(layers.chosen)
        else:
            new = _shrunk(name, value, present)
            if isinstance(value, PreTrainedConfig) or not _same(new, value) or not _derived(field, value):
                values[name] = new
    return config_class(**values, **given)


def _derived(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether the class finds the value itself if it is not given."""
    if field.default is dataclasses.MISSING:
        return True
    return field.default is None or _same(field.default, value)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _shrunk(name: str, value: Any, present: dict[str, Any]) -> Any:
    if isinstance(value, PreTrainedConfig):
        return _shrunk_config(value)
    if value is None:
        return {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS}.get(name)
    if isinstance(value, bool | str):
        return value
    if isinstance(value, float | int) and _RANDOM.fullmatch(name) and 0 <= value <= 1:
        return type(value)(0)
    if isinstance(value, int):
        if name == "num_key_value_heads":
            return HEADS if value == present.get("num_attention_heads") else 1
        return _integer(name, value)
    if isinstance(value, dict):
        return _rope(value, present) if name in ("rope_parameters", "rope_scaling") else value
    if isinstance(value, list | tuple):
        return type(value)(_shrunk(name, item, present) for item in value)
    return value


def _rope(parameters: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
    """Rotary position embeddings: sections for several axes fit the small heads."""
    nested = {k: _rope(v, present) if isinstance(v, dict) else v for k, v in parameters.items()}
    if "mrope_section" in parameters or "mrope_section" in present.get("ignore_keys_at_rope_validation", ()):
        pairs = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0)) // 2
        third = pairs // 3
        nested["mrope_section"] = [pairs - 2 * third, third, third]
    return nested


def _integer(name: str, value: int) -> int:
    if name in _FIRST_TOKENS:
        return _FIRST_TOKENS[name]
    if _TOKEN.fullmatch(name):
        return _token(name, value)
    for pattern, limit in _LIMITS:
        if re.fullmatch(pattern, name):
            return min(value, limit)
    return WIDTH if value >= _LARGE else value


def _token(name: str, value: int) -> int:
    """A token of its own for each name, the same in all parts; none of the small ones that texts use."""
    if value < VOCAB_SIZE // 2:
        return value
    kind = name.removesuffix("_id").removesuffix("_index")
    return VOCAB_SIZE // 2 + sum(map(ord, kind)) % (VOCAB_SIZE // 2)


@dataclasses.dataclass(frozen=True)
class _Layers:
    field: str
    total: int
    chosen: tuple[int, ...]


def _representative_layers(config: PreTrainedConfig) -> _Layers | None:
    """The first layer of each kind, where lists of the configuration give each layer a kind."""
    present = vars(config)
    for field in ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers"):
        total = present.get(field)
        if not isinstance(total, int) or total < 3:
            continue
        lists = [
            value
            for value in present.values()
            if isinstance(value, list | tuple) and len(value) == total and isinstance(value[0], str | int)
        ]
        if not lists:
            return None
        kinds: dict[Any, int] = {}
        for index, kind in enumerate(zip(*lists)):
            kinds.setdefault(kind, index)
        chosen = list(kinds.values())[:MAX_LAYERS]
        if len(chosen) == 1:
            chosen.append(chosen[0] + 1)
        return _Layers(field, total, tuple(chosen))
    return None
