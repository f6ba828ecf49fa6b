"""Puts distributed modules in the place of those that are marked, in ``smp.DistributedModel()``.

Of nested marked modules the outermost supported one is replaced. It stays as it is, and the modules in it are
looked at, where something in it is marked ``enabled=False``, a weight in it belongs to a module outside as
well, or the ranks cannot share its sizes.

SMP's new modules have new weights. Here they have the weights of those that they replace, wherever names and
shapes say which is which: a model then computes what it would compute in one process.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..deferred import deferring, has_deferred
from ..devices import CPU
from ..errors import SMPError
from ..nn.distributed import CannotShare
from ..nn.layout import layout_of, part_of
from ..nn.one_d.parts import check_no_hooks
from ..record.source_line import warn_once_at_user_line
from ..session import Session
from .marks import Mark, mark_of
from .registry import Registration, StateDict, arguments_of, registered

__all__ = ["Replaced", "replace_marked", "translations"]

_OFF = Mark(False)


@dataclass(frozen=True)
class Replaced:
    """One module that was replaced: its name in the model, and what it was replaced by."""

    name: str
    registration: Registration


def replace_marked(session: Session, root: nn.Module) -> tuple[nn.Module, list[Replaced]]:
    """Distributes a model.

    Args:
        session: whose partition assignments go over to the new modules.
        root: the model.

    Returns:
        The model, which is another object only if it was replaced as a whole, and what was replaced.

    Raises:
        SMPError: a module is to be distributed, and what it was made with is not known; or its hooks give
            arguments that the distributed one does not take.
    """
    work = _Work(session, root)
    found = work.visit(root, "", _OFF)
    return found, work.replaced


class _Work:
    def __init__(self, session: Session, root: nn.Module) -> None:
        self._assigned = session.assigned_stages
        self.replaced: list[Replaced] = []
        self._done: dict[int, nn.Module] = {}
        self._kept: list[nn.Module] = []  # alive, so that identities stay theirs
        self._holders: dict[int, list[int]] = {}
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append(id(module))

    def visit(self, module: nn.Module, name: str, around: Mark) -> nn.Module:
        if id(module) in self._done:
            return self._done[id(module)]
        self._kept.append(module)
        wanted = mark_of(module) or around
        new = self._distributed(module, name, wanted) if wanted.enabled else None
        if new is None:
            self._done[id(module)] = new = module
            for child_name, child in list(_named_children(module)):
                path = f"{name}.{child_name}" if name else child_name
                module._modules[child_name] = self.visit(child, path, wanted)
        self._done[id(module)] = new
        return new

    def _distributed(self, module: nn.Module, name: str, wanted: Mark) -> nn.Module | None:
        registration = registered(module)
        if registration is None:
            return None
        if any((mark_of(part) or wanted).enabled is False for part in module.modules()):
            return None
        inside = {id(part) for part in module.modules()}
        where = f"{name or 'the model'} ({type(module).__name__})"
        for parameter_name, parameter in module.named_parameters():
            if any(holder not in inside for holder in self._holders[id(parameter)]):
                _say_why_not(where, f"its {parameter_name} is shared with a module outside")
                return None
        for part in module.modules():
            check_no_hooks(where, part)
        try:
            new = _made(module, registration, wanted.options)
        except CannotShare as error:
            _say_why_not(where, str(error))
            return None
        if new is not None:
            if not _has_weights_of(new, module, registration):
                warn_once_at_user_line(
                    f"smp tensor parallelism: {where} is replaced by a {type(new).__name__} with new "
                    "weights, since names or shapes of its parameters do not say which is which. Load a "
                    "state dict after smp.DistributedModel()"
                )
            self.replaced.append(Replaced(name, registration))
            if id(module) in self._assigned:
                stage = self._assigned[id(module)][1]
                self._assigned.update({id(part): (part, stage) for part in new.modules()})
        return new


def _say_why_not(where: str, why: str) -> None:
    warn_once_at_user_line(f"smp tensor parallelism: {where} is not distributed: {why}")


def _made(module: nn.Module, registration: Registration, options: dict[str, Any]) -> nn.Module | None:
    args, kwargs = arguments_of(module, registration)
    if registration.init_hook is not None:
        hooked = registration.init_hook(*args, **kwargs)
        if hooked is None:
            return None
        args, kwargs = hooked
    kind = registration.kind
    known = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    names = [p.name for p in known.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    kwargs |= {name: value for name, value in options.items() if name in known or takes_all}
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    before = torch.get_default_dtype()
    try:
        if parameter is not None:
            torch.set_default_dtype(parameter.dtype)
        with deferring() if has_deferred(module) else contextlib.nullcontext():
            new = kind(**kwargs)
    except TypeError as error:
        raise SMPError(
            f"a {type(module).__name__} is to be replaced by a {kind.__name__}, whose constructor "
            f"says: {error}. Let init_hook return the arguments that it takes"
        ) from error
    finally:
        torch.set_default_dtype(before)
    if hasattr(module, "config") and not hasattr(new, "config"):
        new.config = module.config  # scripts and transformers' Trainer read it
    return new.train(module.training)


def _has_weights_of(new: nn.Module, module: nn.Module, registration: Registration) -> bool:
    """Gives the new module the old one's weights; False where it is not known which is which."""
    to_smp = registration.to_smp or (lambda state: state)
    whole = to_smp({name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()})
    mine = new.state_dict(keep_vars=True)
    layouts = {name: layout_of(tensor) for name, tensor in mine.items()}
    shapes = {n: layout.shape if layout else tuple(mine[n].shape) for n, layout in layouts.items()}
    if {name: tuple(tensor.shape) for name, tensor in whole.items()} != shapes:
        return False
    with torch.no_grad():
        for name, tensor in mine.items():
            layout = layouts[name]
            tensor.copy_(whole[name] if layout is None else part_of(whole[name], layout))
    # Which of them train goes the same way, as numbers that need no memory.
    flags: StateDict = {
        name: torch.full((), float(tensor.requires_grad), device=CPU).expand(tensor.shape)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    for name, flag in to_smp(flags).items():
        tensor = mine[name]
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(bool(flag.flatten()[0]) if flag.numel() else True)
    return True


def translations(
    replaced: list[Replaced],
) -> tuple[Callable[[StateDict], StateDict], Callable[[StateDict], StateDict]] | None:
    """(ours to the original names, back) for state dicts of the whole model; None: names are the same."""
    parts = [each for each in replaced if each.registration.to_smp is not None]
    if not parts:
        return None

    def back(state: StateDict) -> StateDict:
        return _translated(state, [(each.name, each.registration.to_original) for each in parts])

    def forth(state: StateDict) -> StateDict:
        return _translated(state, [(each.name, each.registration.to_smp) for each in parts])

    return back, forth


def _translated(state: StateDict, functions: list[tuple[str, Any]]) -> StateDict:
    found = dict(state)
    for name, function in functions:
        prefix = f"{name}." if name else ""
        inside = {key[len(prefix) :]: found.pop(key) for key in list(found) if key.startswith(prefix)}
        found |= {prefix + key: value for key, value in function(inside).items()}
    return found


def _named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Also those that stand in several places, which torch names once."""
    for name, child in module._modules.items():
        if child is not None:
            yield name, child
