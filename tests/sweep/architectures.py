"""Which class stands for a model type."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

__all__ = ["architectures", "config_class", "model_types"]

_PREFERRED = (
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
)
"""Tasks in order of choice: first those that train the whole model, then heads, then all others."""


def model_types() -> list[str]:
    """All that transformers knows, aliases of one configuration class among them."""
    return list(CONFIG_MAPPING_NAMES)


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """The class of a model type's configuration."""
    return CONFIG_MAPPING[model_type]


def architectures(model_type: str) -> list[type[PreTrainedModel]]:
    """The classes that take this type's configuration, the most typical first.

    From the tables of the ``Auto`` classes; for parts of larger models, which are in none of them, every
    class of the configuration's own module that is made for it.
    """
    found: dict[type[PreTrainedModel], None] = dict.fromkeys(_listed(model_type))
    found.update(dict.fromkeys(_in_its_module(config_class(model_type))))
    return list(found)


def _listed(model_type: str) -> Iterator[type[PreTrainedModel]]:
    tables = {
        name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES"): table
        for name, table in vars(modeling_auto).items()
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
    }
    order = [*_PREFERRED, *(name for name in tables if name not in _PREFERRED)]
    for table in [*(tables[name] for name in order), modeling_auto.MODEL_MAPPING_NAMES]:
        names = table.get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            found = _class(model_type, name)
            if found is not None:
                yield found


def _class(model_type: str, name: str) -> type[PreTrainedModel] | None:
    import transformers

    found = getattr(transformers, name, None)
    if found is None:
        module = importlib.import_module(
            config_class(model_type).__module__.replace("configuration_", "modeling_")
        )
        found = getattr(module, name, None)
    return found


def _in_its_module(config: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    try:
        module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:
        return
    for value in vars(module).values():
        if (
            inspect.isclass(value)
            and issubclass(value, PreTrainedModel)
            and value.config_class is config
            and "forward" in vars(value)
        ):
            yield value
