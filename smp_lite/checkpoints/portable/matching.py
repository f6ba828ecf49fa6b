"""Which entries of a portable checkpoint belong to which parameters of this model and its optimizer.

All is told by name, for the whole model: so every rank finds the same, before partition too, and before any
tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...errors import SMPError
from ...nn.layout import layout_of
from .entries import names_of_groups, tied_to
from .reading import PieceReader

__all__ = ["ModelEntries", "OptimizerEntries", "match_model", "match_optimizer"]

_CALLER = "resume_from_checkpoint"
_MODEL_PREFIXES = ("model.", "app.model.", "state_dict.", "")
_OPTIMIZER_PREFIXES = ("optimizer.", "optim.", "app.optimizer.", "app.optim.")


@dataclass(frozen=True)
class ModelEntries:
    """For each key of the model's state dict, the keys in the checkpoint.

    Attributes:
        tensors: one key of the checkpoint each.
        others: what is no tensor (extra state): one key, and those of all its leaves.
        first: of a tied parameter the model's key that its entry was found for.
    """

    tensors: dict[str, str]
    others: dict[str, tuple[str, list[str]]]
    first: dict[str, str]


@dataclass
class OptimizerEntries:
    """
    Attributes:
        state: by parameter name, for each place in its state the key in the checkpoint.
        groups: settings of each of the optimizer's groups.
        names: of the parameters of each group.
    """

    state: dict[str, dict[tuple[str | int, ...], str]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)


def match_model(reader: PieceReader, model: Any, *, strict: bool) -> ModelEntries:
    """
    Raises:
        SMPError: keys are missing or unknown and ``strict``, or a shape is another one.
    """
    live = model.module.state_dict(keep_vars=True)
    entries = reader.entries
    prefix = max(_MODEL_PREFIXES, key=lambda each: sum(each + key in entries for key in live))
    folder = os.fspath(reader.folder)
    ties = tied_to(live)
    tensors: dict[str, str] = {}
    others: dict[str, tuple[str, list[str]]] = {}
    wrong: list[str] = []
    for key, value in live.items():
        if not isinstance(value, torch.Tensor):
            leaves = [k for k in entries if k == prefix + key or k.startswith(f"{prefix}{key}.")]
            if leaves:
                others[key] = prefix + key, leaves
        elif prefix + key in entries:
            tensors[key] = prefix + key
            wrong += _wrong_shape(key, value, entries[prefix + key])
    if not tensors:
        raise SMPError(
            f"{_CALLER}: {folder!r} holds none of this model's parameters: it has {_some(entries)}, the "
            f"model has {_some(live)}"
        )
    # Of a tied parameter any of its names will do: plain PyTorch saves all, other programs one.
    first = {ties[key]: key for key in reversed(tensors)}
    missing = [key for key in live if key not in tensors and key not in others and ties[key] not in first]
    taken = {*tensors.values(), *(leaf for _, leaves in others.values() for leaf in leaves)}
    not_models = _OPTIMIZER_PREFIXES if prefix == "" else ()
    unknown = [
        key.removeprefix(prefix)
        for key in entries
        if key.startswith(prefix) and key not in taken and not key.startswith(not_models)
    ]
    if strict and (missing or unknown):
        raise SMPError(
            f"{_CALLER}: {folder!r} is of another model: missing keys {missing[:5]}, unknown keys "
            f"{unknown[:5]} (strict=False ignores both)" + _of_split_layers(missing, unknown)
        )
    if wrong:
        raise SMPError(f"{_CALLER}: {folder!r} is of another model: {'; '.join(wrong[:3])}")
    return ModelEntries(tensors, others, {key: first.get(ties[key], key) for key in live})


def _of_split_layers(missing: list[str], unknown: list[str]) -> str:
    """The cause, where one side has the names of layers that tensor parallelism puts into models."""
    split = [any(".seq_layers." in f".{key}" for key in keys) for keys in (missing, unknown)]
    if split[0] is split[1]:
        return ""
    there, here = ("is", "are not") if split[1] else ("is not", "are")
    return (
        f". It {there} of a job whose Hugging Face modules tensor parallelism has replaced, and here they "
        f"{here} replaced: a portable checkpoint has the split layers' names and moves between jobs that are "
        "alike in that. The weights move by a full one (partial=False, load_optimizer=False)"
    )


def _wrong_shape(key: str, value: torch.Tensor, entry: Any) -> list[str]:
    if not isinstance(entry, TensorStorageMetadata):
        return [f"{key!r} is no tensor there"]
    layout = layout_of(value)
    shape = tuple(value.shape) if layout is None else layout.shape
    if tuple(entry.size) != shape:
        return [f"{key!r} has shape {list(entry.size)} there and {list(shape)} here"]
    return []


def _some(keys: Any) -> str:
    found = [repr(key) for key in keys]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} others" if len(found) > 3 else "")


def match_optimizer(reader: PieceReader, model: Any, optimizer: Any) -> OptimizerEntries | None:
    """Reads the settings of the groups as well; None: no optimizer was saved.

    Raises:
        SMPError: it was an optimizer of other parameters, or its groups had settings that cannot be told
            apart in this one's.
    """
    entries = reader.entries
    prefix = next(
        (
            each
            for each in _OPTIMIZER_PREFIXES
            if any(key.startswith(f"{each}param_groups.") for key in entries)
        ),
        None,
    )
    if prefix is None:
        return None
    names = names_of_groups(optimizer, _CALLER)
    parameters = dict(model.module.named_parameters())
    aliases = _names_of_same(model)
    known = _positions(reader, prefix, names) or {
        alias: name for group in names for name in group for alias in aliases[name]
    }
    found = OptimizerEntries(groups=_groups(reader, prefix, names, known), names=names)
    for key in entries:
        if key.startswith(f"{prefix}state."):
            saved = _parameter_of(key[len(prefix) + len("state.") :], known)
            if saved is None:
                raise SMPError(
                    f"{_CALLER}: {os.fspath(reader.folder)!r} holds {key!r}, but the optimizer has no "
                    "parameter of that name: build it over the same parameters, or pass load_optimizer=False"
                )
            place = _place(reader.path(key), f"{prefix}state.{saved}", key)
            _check_state(key, entries[key], parameters[known[saved]])
            found.state.setdefault(known[saved], {}).setdefault(place, key)
    return found


def _positions(reader: PieceReader, prefix: str, names: list[list[str]]) -> dict[str, str]:
    """Names by position, where a plain ``optimizer.state_dict()`` was saved; else empty."""
    params: list[list[Any]] = []
    while (key := f"{prefix}param_groups.{len(params)}.params") in reader.entries:
        params.append(reader.value(key))
    if not all(isinstance(position, int) for group in params for position in group):
        return {}
    sizes, own_sizes = [len(group) for group in params], [len(group) for group in names]
    if sizes != own_sizes and any(params):
        raise SMPError(
            f"{_CALLER}: {os.fspath(reader.folder)!r} has optimizer groups of sizes {sizes}, told by "
            f"position, but the optimizer's have {own_sizes}: it was saved from an optimizer of another model"
        )
    flat = [position for group in params for position in group]
    return {str(position): name for position, name in zip(flat, (n for group in names for n in group))}


def _names_of_same(model: Any) -> dict[str, list[str]]:
    """For each parameter's first name all of its names."""
    found: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return found


def _parameter_of(rest: str, known: dict[str, str]) -> str | None:
    """The parameter whose name ``rest`` begins with, before a dot."""
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in known:
            return rest[:end]
    return None


def _place(path: Sequence[str | int], head: str, key: str) -> tuple[str | int, ...]:
    """The place in a parameter's state, whose keys begin with ``head``: as it was nested, or by the dots."""
    for depth in range(len(path)):
        if ".".join(map(str, path[:depth])) == head:
            return tuple(path[depth:])
    return tuple(key[len(head) + 1 :].split("."))


def _check_state(key: str, entry: Any, parameter: torch.Tensor) -> None:
    """State of a parameter that is split must be like it, or one number."""
    layout = layout_of(parameter)
    if layout is None or not isinstance(entry, TensorStorageMetadata):
        return
    if tuple(entry.size) != layout.shape and entry.size.numel() > 1:
        raise SMPError(
            f"{_CALLER}: the optimizer's state {key!r} of shape {list(entry.size)} belongs to a parameter of "
            f"shape {list(layout.shape)} that is split over ranks, and cannot be split like it: use an "
            "optimizer that treats every element by itself, or pass load_optimizer=False"
        )


def _groups(
    reader: PieceReader, prefix: str, names: list[list[str]], known: dict[str, str]
) -> list[dict[str, Any]]:
    """The settings of each of the optimizer's groups, from those saved for its parameters."""
    of_parameter, of_empty = _saved_settings(reader, prefix, known)
    folder = os.fspath(reader.folder)
    listed = {name for group in names for name in group}
    if gone := sorted(of_parameter.keys() - listed):
        raise SMPError(
            f"{_CALLER}: {folder!r} has optimizer settings of {_some(gone)}, which the optimizer does not "
            "have: build it over the same parameters, or pass load_optimizer=False"
        )
    found = []
    for number, group in enumerate(names):
        if not group:
            if number not in of_empty:
                raise SMPError(
                    f"{_CALLER}: group {number} of the optimizer has no parameters, and {folder!r} has no "
                    "settings of such a group: build the optimizer with the same groups"
                )
            found.append(of_empty[number])
            continue
        if missing := [name for name in group if name not in of_parameter]:
            raise SMPError(
                f"{_CALLER}: {folder!r} has no optimizer settings of {_some(missing)}: it was saved from an "
                "optimizer of other parameters"
            )
        settings = of_parameter[group[0]]
        for name in group[1:]:
            for key in sorted(settings.keys() | of_parameter[name].keys()):
                if not _same(settings.get(key), of_parameter[name].get(key)):
                    raise SMPError(
                        f"{_CALLER}: group {number} of the optimizer has both {group[0]!r} and {name!r}, "
                        f"which were saved with {key}={settings.get(key)!r} and "
                        f"{of_parameter[name].get(key)!r}: build the optimizer with the groups that it was "
                        "saved with"
                    )
        found.append(settings)
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def _saved_settings(
    reader: PieceReader, prefix: str, known: dict[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[int, dict[str, Any]]]:
    """By parameter, and by number those of groups without any.

    From the list of groups where it was saved, else from the settings of each parameter
    (``flatten_optimizer_state_dict=True``).
    """
    start = f"{prefix}param_groups."
    numbered: dict[int, dict[str, tuple[str | int, ...]]] = {}
    flat: dict[str, dict[str, str]] = {}
    unknown = []
    for key in reader.entries:
        if not key.startswith(start):
            continue
        number, _, setting = key[len(start) :].partition(".")
        path = reader.path(key)
        if number.isdecimal() and int(number) in path:
            numbered.setdefault(int(number), {})[key] = tuple(path[path.index(int(number)) + 1 :])
            continue
        if number.isdecimal() and len(path) == 1 and "." not in setting:  # saved without paths
            numbered.setdefault(int(number), {})[key] = (setting,)
            continue
        name = _parameter_of(key[len(start) :], known)
        if name is None:
            unknown.append(key)
        else:
            flat.setdefault(known[name], {})[key[len(start) + len(name) + 1 :]] = key
    if not numbered:
        if unknown:
            raise SMPError(
                f"{_CALLER}: {os.fspath(reader.folder)!r} holds {_some(unknown)}, but the optimizer has no "
                "parameters of these names: build it over the same parameters, or pass load_optimizer=False"
            )
        return {name: {key: _read(reader, at) for key, at in keys.items()} for name, keys in flat.items()}, {}
    of_parameter: dict[str, dict[str, Any]] = {}
    of_empty: dict[int, dict[str, Any]] = {}
    for number, keys in sorted(numbered.items()):
        settings = unflatten_state_dict({key: _read(reader, key) for key in keys}, keys)
        params = settings.pop("params", None)
        settings.pop("param_names", None)
        if not isinstance(params, list):
            raise SMPError(
                f"{_CALLER}: group {number} of the optimizer in {os.fspath(reader.folder)!r} does not say "
                "which parameters it has: it is no optimizer of torch, so pass load_optimizer=False"
            )
        if not params:
            of_empty[number] = settings
        for name in map(str, params):
            of_parameter.setdefault(known.get(name, name), settings)
    return of_parameter, of_empty


def _read(reader: PieceReader, key: str) -> Any:
    is_tensor = isinstance(reader.entries[key], TensorStorageMetadata)
    return reader.tensor(key) if is_tensor else reader.value(key)
