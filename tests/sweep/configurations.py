"""Tiny configurations, made from the default one of each class.

Every width of every part becomes the same small number, and so do all heads and all layer counts. So what
must agree between the parts of a model (the text's width and its projector's, say) still agrees, with no
knowledge of any of them. What that cannot know stands in :mod:`tests.sweep.special_configurations`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.sweep.special_configurations import CONFIGURATIONS, Part

__all__ = ["SCALES", "Scale", "tiny"]

VOCAB_SIZE = 96
HEADS = 2
MAX_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Scale:
    """How small a model is to be; some have constants in their code that need more than others.

    Attributes:
        width: of everything.
        image: height and width of images.
    """

    width: int
    image: int

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.width // HEADS


SCALES = (Scale(width=32, image=32), Scale(width=128, image=64))
"""In the order in which they are tried."""

_LIMITS: tuple[tuple[str, Callable[[Scale], int]], ...] = (
    (r".*vocab.*", lambda scale: VOCAB_SIZE),
    (r".*(image|img|crop)_size|input_size|resolution|.*grid_size", lambda scale: scale.image),
    (r".*patch_size", lambda scale: scale.image // 4),
    (r"n_group|topk_group|num_expert_groups?", lambda scale: 1),
    (r".*heads?|.*heads?_kv|n_head_kv|num_query_groups", lambda scale: HEADS),
    (
        r".*head_(dim|size)|d_kv|d_head|kv_channels|.*_rank|.*headdim|rotary_dim",
        lambda scale: scale.head_dim,
    ),
    (r".*(layers|blocks|depths?|num_stages|layers_per_stack|n_layer)", lambda scale: 2),
    (
        r".*(intermediate|ffn|ff_|_ff|mlp|inner|feedforward|feed_forward).*",
        lambda scale: 2 * scale.width,
    ),
    (
        r".*(position|seq_len|max_len|seqlen|context_length|block_size|max_text|n_ctx|text_seq).*",
        lambda scale: 128,
    ),
    (r".*(experts|per_tok).*|.*top_?k.*", lambda scale: 2),
    (r".*experts?", lambda scale: 4),
    (r".*(codebooks|quantizers|queries|query_num|num_latents|proposals|query_tokens).*", lambda scale: 8),
    (r"window_size", lambda scale: 2),
    (r".*(window|chunk).*", lambda scale: 4),
    (r".*(mel_bins|feature_size|n_mels|mels)", lambda scale: 16),
)
"""Largest value of an integer field, by its name; the first that matches."""

_MISSING: dict[str, Callable[[Scale], int]] = {
    "head_dim": lambda scale: scale.head_dim,
    "num_key_value_heads": lambda scale: HEADS,
    "num_experts_per_tok": lambda scale: 2,
    "n_routed_experts": lambda scale: 4,
    "vocab_size": lambda scale: VOCAB_SIZE,
}
"""Fields that some classes have no usable default for."""

_LARGE = 40
"""Any other integer from here on is a width."""

_RANDOM = re.compile(r".*(drop|noise|jitter|label_smoothing).*|mask_(time|feature)_prob")

_TOKEN = re.compile(r".*_(id|index)")

_FIRST_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

_UNTOUCHED = {"id2label", "label2id", "dtype", "transformers_version", "architectures", "quantization_config"}


def tiny(config_class: type[PreTrainedConfig], scale: Scale) -> PreTrainedConfig:
    """A configuration of this class for a model of some thousand parameters; no random drops, no caches.

    Raises:
        Exception: whatever the class raises where the values do not fit each other.
    """
    try:
        default = config_class()
    except Exception:  # some have no valid default
        default = config_class(**CONFIGURATIONS.get(config_class.__name__, {}))
    config = _shrunk_config(default, scale)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if not hasattr(config, "classifier_dropout"):
        config.classifier_dropout = 0.0  # else heads take 0.1
    return config


def _shrunk_config(default: PreTrainedConfig, scale: Scale) -> PreTrainedConfig:
    config_class = type(default)
    given = {
        name: tiny(CONFIG_MAPPING[value], scale) if isinstance(value, Part) else value
        for name, value in CONFIGURATIONS.get(config_class.__name__, {}).items()
    }
    present = {"ignore_keys_at_rope_validation": default.ignore_keys_at_rope_validation, **vars(default)}
    layers = _representative_layers(default)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name = field.name
        if name in _UNTOUCHED or name.startswith("_") or name not in present or name in given:
            continue
        value = present[name]
        if layers and isinstance(value, list | tuple) and len(value) == layers.total:
            values[name] = type(value)(_shrunk(name, value[i], present, scale) for i in layers.chosen)
        elif layers and name == layers.field:
            values[name] = len(layers.chosen)
        else:
            new = _shrunk(name, value, present, scale)
            if isinstance(value, PreTrainedConfig) or not _same(new, value) or not _derived(field, value):
                values[name] = new
    values.update(_outputs_of_backbone(present, values))
    return config_class(**{**values, **given})


def _outputs_of_backbone(present: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """As many outputs as by default; where each layer is a stage, from the last layers."""
    indices = present.get("_out_indices")
    if not indices:
        return {}
    layers = present.get("num_hidden_layers")
    if layers is None or len(present["stage_names"]) != layers + 1:
        return {"out_indices": list(indices)}
    total = max(2, len(indices))
    return {"num_hidden_layers": total, "out_indices": list(range(total - len(indices) + 1, total + 1))}


def _derived(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether the class finds the value itself if it is not given."""
    if field.default is dataclasses.MISSING:
        return True
    return field.default is None or _same(field.default, value)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _shrunk(name: str, value: Any, present: dict[str, Any], scale: Scale) -> Any:
    if isinstance(value, PreTrainedConfig):
        return _shrunk_config(value, scale)
    if value is None:
        return _MISSING[name](scale) if name in _MISSING else None
    if isinstance(value, bool | str):
        return value
    if isinstance(value, float | int) and _RANDOM.fullmatch(name) and 0 <= value <= 1:
        return type(value)(0)
    if isinstance(value, int):
        if re.fullmatch(r"sampl\w*_rate", name):
            return value
        if name == "num_key_value_heads":
            return HEADS if value == present.get("num_attention_heads") else 1
        if name == "window_size" and "spatial_merge_size" in present:
            return scale.image
        if name == "num_kv_shared_layers":
            return 0
        return _integer(name, value, scale)
    if isinstance(value, dict):
        return _rope(value, present, scale) if name in ("rope_parameters", "rope_scaling") else value
    if isinstance(value, list | tuple) and re.fullmatch(r".*(attn|block|visual)_(indexes|indices)", name):
        return type(value)([1])
    if isinstance(value, list | tuple):
        return type(value)(_shrunk(name, item, present, scale) for item in value)
    return value


def _rope(parameters: dict[str, Any], present: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """Rotary position embeddings: sections for several axes fit the small heads."""
    nested = {k: _rope(v, present, scale) if isinstance(v, dict) else v for k, v in parameters.items()}
    if "rope_type" in parameters and "mrope_section" in {
        *parameters,
        *present["ignore_keys_at_rope_validation"],
    }:
        pairs = int(scale.head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
        third = -(-pairs // 3)
        nested["mrope_section"] = [third, third, pairs - 2 * third]
    return nested


def _integer(name: str, value: int, scale: Scale) -> int:
    if name in _FIRST_TOKENS:
        return _FIRST_TOKENS[name]
    if _TOKEN.fullmatch(name):
        return _token(name, value)
    for pattern, limit in _LIMITS:
        if re.fullmatch(pattern, name):
            return min(value, limit(scale))
    return scale.width if value >= _LARGE else value


def _token(name: str, value: int) -> int:
    """A token of its own for each name, the same in all parts; none of the small ones that texts use."""
    if value < VOCAB_SIZE // 2 and not re.match("image|audio|video|vision|speech", name):
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
