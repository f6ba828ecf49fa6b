"""Names, shapes and classes of a model, and which of its tensors belong to which layer."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ...config.errors import ConfigError

__all__ = ["ModelShape", "build_model_shape", "describe_model", "layer_names", "layers_of_tensors"]


@dataclass(frozen=True)
class ModelShape:
    """What planning needs of a model.

    Attributes:
        tensors: shape of each tensor of the state dict, by name, in its order.
        modules: class name of each module, by name; the model itself is ``""``.
        ties: a name -> the first name of the same tensor.
        styles: name pattern of modules -> tensor-parallel style, of models that bring such a plan or that we
            have one for.
    """

    tensors: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    styles: Mapping[str, str] = field(default_factory=dict)


def build_model_shape(target: str) -> ModelShape:
    """Returns the shape of the model that ``package:function`` builds, on the meta device, without memory."""
    import torch

    package, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"--model {target!r}: write package:function, a function that returns an nn.Module")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(package), name)
    except ImportError as error:
        raise ConfigError(f"--model {target!r}: {package!r} cannot be imported: {error}") from error
    except AttributeError as error:
        if package in sys.modules:
            raise ConfigError(f"--model {target!r}: {package!r} has no {name!r}") from None
        raise ConfigError(_raised(target, f"importing {package}", error)) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_raised(target, f"importing {package}", error)) from error
    try:
        with torch.device("meta"):
            built = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(_raised(target, target, error)) from error
    module = built[0] if isinstance(built, tuple) else built
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"--model {target!r} returned {type(module).__name__}: it must return an nn.Module")
    shape = describe_model(module)
    return shape if shape.styles else replace(shape, styles=_derived_styles(module))


def _raised(target: str, what: str, error: BaseException) -> str:
    """What the user's own code said, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" [{frames[-1].filename}:{frames[-1].lineno}]" if frames else ""
    return f"--model {target!r}: {what} raised {type(error).__name__}: {error}{where}"


def describe_model(module: Any) -> ModelShape:
    """Returns the shape of an ``nn.Module``."""
    state = module.state_dict(keep_vars=True)
    first: dict[object, str] = {}
    ties = {}
    for name, tensor in state.items():
        address = tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0
        key: object = (address, tensor.storage_offset(), tensor.shape) if address else id(tensor)
        if first.setdefault(key, name) != name:
            ties[name] = first[key]
    styles = getattr(module, "_tp_plan", None)
    return ModelShape(
        tensors={name: tuple(tensor.shape) for name, tensor in state.items()},
        modules={name: type(child).__name__ for name, child in module.named_modules()},
        ties=ties,
        styles=dict(styles) if isinstance(styles, Mapping) and styles else _known_styles(module),
    )


def _derived_styles(module: Any) -> dict[str, str]:
    """Of the pairs of layers that are split where nobody has a plan; none where it finds none."""
    from ...errors import SMPError
    from ...nn.plans import derive_plan

    try:
        return dict(derive_plan(module))
    except SMPError:
        return {}


def _known_styles(module: Any) -> dict[str, str]:
    """Of our own plan for the architecture, by the names of its modules."""
    from ...nn.plans.known import known_plan
    from ...nn.plans.patterns import Names

    names = Names(module)
    return {n: style for pattern, style in known_plan(module).items() for n in names.matching(pattern, style)}


def layer_names(model: ModelShape, num_layers: int | None) -> tuple[str, ...]:
    """Returns the names of a model's layers in order: the numbered modules of its longest lists.

    Args:
        model: its names.
        num_layers: how many there must be; None: whatever the model has.

    Raises:
        ConfigError: no lists of modules have so many, or there is none at all.
    """
    lists = _numbered_lists(model)
    if not lists:
        raise ConfigError("the model has no list of numbered modules (nn.ModuleList or nn.Sequential) to cut")
    levels = sorted({len(_numbers(prefix)) for prefix in lists})
    longest = max(len(names) for names in lists.values())
    outer = [names for prefix, names in lists.items() if not _numbers(prefix)]
    together = [names for names in outer if 2 * len(names) >= longest]
    options = [_joined(together)] if together else []
    options += [_joined(outer)] if outer else []
    options += list(lists.values())
    options += [_joined(n for p, n in lists.items() if len(_numbers(p)) == level) for level in levels]
    if num_layers is None:
        return options[0]
    fitting = next((names for names in options if len(names) == num_layers), None)
    if fitting is None:
        counts = ", ".join(f"{prefix or '(root)'} {len(names)}" for prefix, names in list(lists.items())[:6])
        raise ConfigError(
            f"the configuration is for {num_layers} layers, and no lists of the model have so many "
            f"({counts}): make "
            "pipeline_num_layers agree with the model"
        )
    return fitting


def layers_of_tensors(model: ModelShape, layers: tuple[str, ...]) -> dict[str, int]:
    """Returns the layer of each tensor. What is registered before the first layer belongs to that, what comes
    after a layer to the last one before it. A tensor with two names belongs where its first name is."""
    number = {name: index for index, name in enumerate(layers)}
    found: dict[str, int] = {}
    last = 0
    for name in model.tensors:
        parts = name.split(".")
        above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        layer = next((number[prefix] for prefix in above if prefix in number), None)
        last = max(last, layer if layer is not None else 0)
        found[name] = last if layer is None else layer
    for name, first in model.ties.items():
        found[name] = found[first]
    # What comes after all layers belongs to the last one, even where that has no tensors of its own.
    for name in reversed(model.tensors):
        if any(name.startswith(f"{layer}.") for layer in layers):
            break
        if name not in model.ties:
            found[name] = len(layers) - 1
    return found


def layer_costs(model: ModelShape, of_tensor: Mapping[str, int], num_layers: int) -> tuple[int, ...]:
    """Returns the number of elements of each layer, a tensor with two names counted once."""
    costs = [0] * num_layers
    for name, shape in model.tensors.items():
        if name not in model.ties:
            costs[of_tensor[name]] += prod(shape)
    return tuple(costs)


def _numbered_lists(model: ModelShape) -> dict[str, tuple[str, ...]]:
    """Prefix -> its numbered modules, in order; of the tensors' names where there are no modules."""
    lists: dict[str, dict[str, None]] = {}
    for name in [*model.modules, *(model.tensors if len(model.modules) < 2 else ())]:
        parts = name.split(".")
        for index, part in enumerate(parts):
            if part.isdecimal():
                lists.setdefault(".".join(parts[:index]), {})[".".join(parts[: index + 1])] = None
    return {prefix: tuple(names) for prefix, names in lists.items()}


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


def _joined(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for names in lists for name in names)
