"""Classes by name: what ``type='Linear'`` in a configuration means."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from ..config.errors import ConfigError

__all__ = ["LAYERS", "MODELS", "Registry", "build_layer", "build_model"]

_Class = TypeVar("_Class", bound=type)


class Registry:
    """Classes by their names.

    Args:
        name: of the registry, for errors.
        third_party_library: modules in which a name is looked up that nobody has registered.
    """

    def __init__(self, name: str, third_party_library: list[ModuleType] | None = None) -> None:
        self.name = name
        self._classes: dict[str, type] = {}
        self._libraries = list(third_party_library or ())

    def register_module(self, module_class: _Class) -> _Class:
        """Decorates a class, which is found by its name from then on.

        Raises:
            ValueError: another class of this name is registered. (The same one may come again, as it does
                where a script is imported a second time.)
        """
        name = module_class.__name__
        before = self._classes.setdefault(name, module_class)
        here = (module_class.__module__, module_class.__qualname__)
        if (before.__module__, before.__qualname__) != here:
            raise ValueError(
                f"{self.name}.register_module: there is a {name} already, of {before.__module__}: give one "
                "of them another name"
            )
        self._classes[name] = module_class
        return module_class

    def has(self, module_name: str) -> bool:
        """Whether a name is known."""
        return self._find(module_name) is not None

    def get_module(self, module_name: str) -> type:
        """The class of a name.

        Raises:
            ConfigError: there is none; names the nearest.
        """
        found = self._find(module_name)
        if found is not None:
            return found
        known = [*self._classes, *(name for library in self._libraries for name in vars(library))]
        near = difflib.get_close_matches(str(module_name), known, n=1)
        hint = f"did you mean {near[0]!r}? Else " if near else ""
        raise ConfigError(
            f"type={module_name!r} is in no {self.name} registry: {hint}decorate its class with "
            f"@{self.name}.register_module"
        )

    def _find(self, name: str) -> type | None:
        if name in self._classes:
            return self._classes[name]
        found = (getattr(library, str(name), None) for library in self._libraries)
        return next((each for each in found if isinstance(each, type)), None)


LAYERS = Registry("LAYERS", [nn])
MODELS = Registry("MODELS")


def build_layer(config: Mapping[str, Any]) -> nn.Module:
    """Makes the layer of ``dict(type='Linear', in_features=3, out_features=512)``: one of ours under
    Colossal-AI's name, one that is registered in ``LAYERS``, or one of ``torch.nn``.

    Raises:
        ConfigError: it has no type, one that nobody knows, or arguments that the class does not take.
    """
    return _build(config, LAYERS)


def build_model(config: Mapping[str, Any]) -> nn.Module:
    """Makes the model of ``dict(type='MyModel', ...)``, whose class is registered in ``MODELS``.

    Raises:
        ConfigError: as of :func:`build_layer`.
    """
    return _build(config, MODELS)


def _build(config: Mapping[str, Any], registry: Registry) -> nn.Module:
    if not isinstance(config, Mapping) or not isinstance(config.get("type"), str):
        raise ConfigError(
            f"{registry.name}: {config!r} is no dict with a type: write dict(type='Linear', ...), for example"
        )
    arguments = {key: value for key, value in config.items() if key != "type"}
    found = registry.get_module(config["type"])
    try:
        built = found(**arguments)
    except TypeError as error:
        raise ConfigError(f"{registry.name}: {dict(config)!r} cannot be made: {error}") from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"{registry.name}: {config['type']} is no nn.Module")
    return built
