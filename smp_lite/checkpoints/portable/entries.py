"""What a rank has to write into a portable checkpoint, under the names that plain PyTorch uses.

Keys are those that ``torch.distributed.checkpoint.save({"model": model.state_dict(), "optimizer":
get_optimizer_state_dict(model, optimizer)})`` gives: ``model.{name}``, ``optimizer.state.{name}.exp_avg``,
``optimizer.param_groups.0.lr``. Two kinds of keys are only further names of what is stored once:

- of tied parameters all but the first, since a plain reader asks for each of them;
- ``optimizer.param_groups.{name}.lr`` for each parameter of a group, for who reads with
  ``flatten_optimizer_state_dict=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ...errors import SMPError
from ...nn.layout import ParameterLayout, layout_of
from ...optim.state.dicts import HALF_KEYS
from ...optim.state.own_parameters import PARTIAL_KEY
from ...record.parameters.away import is_away
from ...session import Session
from ...storage.layout import MODEL, OPTIMIZER
from .pieces import Piece

__all__ = ["Entries", "entries_here", "names_of_groups", "tied_to"]

Path = tuple[str | int, ...]


@dataclass
class Entries:
    """Of one rank."""

    values: dict[str, Any] = field(default_factory=dict)
    """By key; tensors as :class:`Piece`."""
    paths: dict[str, Path] = field(default_factory=dict)
    """Of each key and further name: its place in the nest of dicts and lists that a plain reader gets."""
    further: dict[str, str] = field(default_factory=dict)
    """Further names, with the key that they stand for; the same on all ranks."""

    def add(self, nest: dict[str, Any], wanted: Callable[[Path], bool] = lambda path: True) -> None:
        """Adds the leaves of a nest."""
        values, paths = flatten_state_dict(nest)
        for key, value in values.items():
            if wanted(paths[key]):
                self.values[key] = Piece(value) if isinstance(value, torch.Tensor) else value
                self.paths[key] = paths[key]

    def name_further(self, key: str, path: Path, stands_for: str) -> None:
        """Adds a name for an entry that is written under another one."""
        if key in self.values or self.further.get(key, stands_for) != stands_for:
            raise SMPError(
                f"save_checkpoint: {key!r} would name two things in a portable checkpoint: a parameter "
                "cannot have the name of a position in a list. Give the model's parameters other names"
            )
        self.further[key] = stands_for
        self.paths[key] = path


def entries_here(session: Session, model: Any, optimizer: Any) -> Entries:
    """This rank's, of what is not None.

    Raises:
        SMPError: the optimizer has state that cannot be written by pieces, or parameters of no model.
    """
    found = Entries()
    if model is not None:
        _add_model(found, session, model)
    if optimizer is not None:
        _add_optimizer(found, session, optimizer)
    return found


def tied_to(state: dict[str, Any]) -> dict[str, str]:
    """For each key of a live state dict the first key of the same parameter.

    Args:
        state: of ``module.state_dict(keep_vars=True)``.
    """
    first: dict[int, str] = {}
    return {
        key: first.setdefault(id(value), key) if isinstance(value, nn.Parameter) else key
        for key, value in state.items()
    }


def names_of_groups(optimizer: Any, caller: str) -> list[list[str]]:
    """The model's names of the parameters in each of the optimizer's groups, in their order.

    Raises:
        SMPError: a parameter is none of the model's.
    """
    names: list[list[str]] = optimizer.names_in_groups
    for number, group in enumerate(names):
        for place, name in enumerate(group):
            if name is None:
                raise SMPError(
                    f"{caller}: parameter {place} of the optimizer's group {number} is none of the model's, "
                    "so it has no name in a portable checkpoint: save partial or full checkpoints, or give "
                    "the optimizer the model's parameters alone"
                )
    return names


def _may_write(session: Session) -> bool:
    """Whether this rank's copy counts. Before the first step nothing has made replicas equal."""
    if session.model is not None and not session.model.partitioned and session.group_rank("PP") > 0:
        return False
    return session.steps_run > 0 or session.group_rank(session.copies) == 0


def _add_model(found: Entries, session: Session, model: Any) -> None:
    live = model.module.state_dict(keep_vars=True)
    first = tied_to(live)
    local = model.local_state_dict()
    local.pop(PARTIAL_KEY)
    # Buffers of replicas differ, as their batches do: the first one's are saved.
    leads = session.group_rank("DP") == 0 and _may_write(session)
    for key, value in local.items():
        if first[key] != key or is_away(value):
            continue
        if isinstance(live[key], nn.Parameter):
            if _may_write(session):
                _add_tensor(found, f"{MODEL}.{key}", (MODEL, key), value, layout_of(live[key]))
        elif leads and isinstance(value, torch.Tensor):
            _add_tensor(found, f"{MODEL}.{key}", (MODEL, key), value, None)
        elif leads and _keeps_form(value):
            found.add({MODEL: {key: value}})
        elif leads:  # whole: its keys would become strings
            found.values[f"{MODEL}.{key}"], found.paths[f"{MODEL}.{key}"] = value, (MODEL, key)
    for key, name in first.items():
        if name != key:
            found.name_further(f"{MODEL}.{key}", (MODEL, key), f"{MODEL}.{name}")


def _add_tensor(
    found: Entries, key: str, path: Path, value: torch.Tensor, layout: ParameterLayout | None
) -> None:
    found.values[key], found.paths[key] = Piece(value, layout), path


def _add_optimizer(found: Entries, session: Session, optimizer: Any) -> None:
    local = optimizer.local_state_dict(gather_if_shard=False)
    if "param_groups" not in local:
        raise SMPError(
            f"save_checkpoint: {type(optimizer.optimizer).__name__}.state_dict() is not that of an optimizer "
            "of torch, so it has no portable form: save a partial checkpoint"
        )
    if own := sorted(map(str, local.keys() - {"state", "param_groups", PARTIAL_KEY, *HALF_KEYS})):
        raise SMPError(
            f"save_checkpoint: {type(optimizer.optimizer).__name__}.state_dict() has {own[0]!r} beside "
            "'state' and 'param_groups', which has no portable form: save a partial or full checkpoint"
        )
    names = names_of_groups(optimizer, "save_checkpoint")
    flat = [name for group in names for name in group]
    parameters = dict(session.model.module.named_parameters())
    may_write = _may_write(session)
    for position, state in local["state"].items():
        if may_write:
            name = flat[position]
            _add_state(found, name, state, layout_of(optimizer.stand_in_of(parameters[name])))
    groups = [
        {
            **settings,
            **({"param_names": whole["param_names"]} if "param_names" in whole else {}),
            "params": own,
        }
        for settings, whole, own in zip(local["param_groups"], optimizer.param_groups, names, strict=True)
    ]
    for number, group in enumerate(groups):
        for key, value in group.items():
            if not _keeps_form(value):
                raise SMPError(
                    f"save_checkpoint: param_groups[{number}][{key!r}] of the optimizer is a "
                    f"{type(value).__name__} that is empty, or has keys that are no strings, so it has no "
                    "portable form: save a partial checkpoint"
                )
    # What an optimizer counts for a group, it counts where the group has parameters.
    counts = [
        bool(group["params"]) or not own for group, own in zip(local["param_groups"], names, strict=True)
    ]
    found.add({OPTIMIZER: {"param_groups": groups}}, lambda path: may_write and counts[int(path[2])])
    _, paths = flatten_state_dict({OPTIMIZER: {"param_groups": groups}})
    for key, path in paths.items():
        setting = ".".join(map(str, path[3:]))
        if path[3] in ("params", "param_names"):
            continue
        for name in names[int(path[2])]:
            flat_key = f"param_groups.{name}.{setting}"
            found.name_further(f"{OPTIMIZER}.{flat_key}", (OPTIMIZER, flat_key), key)


def _add_state(found: Entries, name: str, state: Any, layout: ParameterLayout | None) -> None:
    if not isinstance(state, dict) or (state and not _keeps_form(state)):
        raise SMPError(
            f"save_checkpoint: the optimizer keeps a {type(state).__name__} for {name!r} that is no dict "
            "with strings as keys, so it has no portable form: save a partial checkpoint"
        )
    values, paths = flatten_state_dict({OPTIMIZER: {"state": {name: state}}})
    for key, value in values.items():
        is_tensor = isinstance(value, torch.Tensor)
        split = layout if is_tensor and value.dim() > 0 else None
        if split is not None and tuple(value.shape) != split.local_shape:
            if value.numel() > 1:
                raise SMPError(
                    f"save_checkpoint: the optimizer's state {key!r} of shape {list(value.shape)} belongs to "
                    f"a parameter whose part here is {list(split.local_shape)}, and is not split like it, so "
                    "it cannot be put together: use an optimizer that treats every element by itself"
                )
            split = None
        found.values[key] = Piece(value, split) if is_tensor else value
        found.paths[key] = paths[key]


def _keeps_form(value: Any) -> bool:
    """Whether a nest is the same after its leaves were named by strings."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(k, str) and _keeps_form(v) for k, v in value.items())
    return not isinstance(value, list) or all(map(_keeps_form, value))
