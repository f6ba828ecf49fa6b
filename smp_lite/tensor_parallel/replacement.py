"""Puts distributed modules in the place of those that are marked, in ``smp.DistributedModel()``.

Of nested marked modules the outermost supported one is replaced. It stays as it is, and the modules in it are
looked at, where something in it is marked ``enabled=False``, a weight in it belongs to a module outside as
well or shares memory with a tensor there, a script has set an attribute on it, or the ranks cannot share its
sizes.

SMP's new modules have new weights. Here they have the weights of those that they replace, wherever names and
shapes say which is which (:mod:`.weights`): a model then computes what it would compute in one process. The
old ones refuse to be used from then on (:mod:`smp_lite.nn.replaced`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..deferred import deferring, has_deferred
from ..devices import is_host
from ..errors import SMPError
from ..nn.distributed import CannotShare
from ..nn.one_d.parts import check_no_hooks
from ..nn.replaced import is_replaced, mark_replaced, parts_of
from ..record.code.source_line import user_line
from ..record.values.memory import place_of
from ..session import Session
from .builtin import builtin
from .marks import Mark, mark_of
from .options import taken_by
from .registry import Registration, StateDict, arguments_of, registered
from .weights import take_weights

__all__ = ["Replaced", "replace_marked", "translations"]

_OFF = Mark(False)
_WITHOUT_MODE = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax),
)
"""Modules of torch's that compute the same in training and in evaluation."""


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
            arguments that the distributed one does not take; or it computes something that its counterpart
            would not. A module of the model was replaced in a model before.
        ValueError: it has hooks, or methods of its own, which its counterpart would not have.
    """
    for name, module in root.named_modules():
        if is_replaced(module):
            raise SMPError(
                f"{name or 'the model'} ({type(module).__name__}) was replaced by its split layer before, "
                "and nothing has trained it since: build the model anew before it is wrapped again"
            )
    before = parts_of(root)
    work = _Work(session, root)
    drawn = torch.get_rng_state()
    found = work.visit(root, "", _OFF)
    if work.replaced:
        if not work.has_new_weights:  # others are drawn as the script's own modules would be
            torch.set_rng_state(drawn)
        mark_replaced(before, found)
    return found, work.replaced


class _Work:
    def __init__(self, session: Session, root: nn.Module) -> None:
        self._assigned = session.assigned_stages
        self.replaced: list[Replaced] = []
        self._done: dict[int, nn.Module] = {}
        self._kept: list[nn.Module] = []  # alive, so that identities stay theirs
        self.has_new_weights = False
        self._holders: dict[int, list[int]] = {}
        self._around: dict[int, list[int]] = {}
        self._beside = _holders_beside(root)
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append(id(module))
            for child in module._modules.values():
                self._around.setdefault(id(child), []).append(id(module))

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
        for part_name, part in module.named_modules():
            others = part is not module and any(each not in inside for each in self._around[id(part)])
            if others and next(part.parameters(), None) is not None:
                _say_why_not(where, f"its {part_name} stands in another module of the model as well")
                return None
        if (other := self._shares_memory(module, inside)) is not None:
            _say_why_not(where, f"its {other} shares memory with a tensor outside, which a part would not")
            return None
        for part_name, part in module.named_modules():
            check_no_hooks(where, part)
            _check_methods(where, part_name, part)
        if lost := _own_attributes(module):
            _say_why_not(where, f"its split layer would not have the attribute {lost[0]!r} that it was given")
            return None
        _check_training(where, module)
        try:
            new = _made(module, name, registration, wanted.options)
        except CannotShare as error:
            _say_why_not(where, str(error))
            return None
        if new is not None:
            if not take_weights(
                new, module, registration, where, is_known=builtin(type(module)) is registration
            ):
                self.has_new_weights = True
                _warn(
                    f"{where} is replaced by a {type(new).__name__} with new "
                    "weights, since names or shapes of its parameters do not say which is which. Load a "
                    "state dict after smp.DistributedModel()"
                )
            self.replaced.append(Replaced(name, registration))
            if id(module) in self._assigned:
                stage = self._assigned[id(module)][1]
                self._assigned.update({id(part): (part, stage) for part in new.modules()})
        return new

    def _shares_memory(self, module: nn.Module, inside: Collection[int]) -> str | None:
        """The parameter of which another tensor, of a module that is not inside, has a part of the memory."""
        for name, parameter in module.named_parameters():
            if any(holder not in inside for holder in self._beside.get(id(parameter), ())):
                return name
        return None


def _holders_beside(root: nn.Module) -> dict[int, list[int]]:
    """By tensor the modules that hold another one in memory of it."""
    places = [
        (*where, tensor, module)
        for module in root.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and (where := _memory(tensor)) is not None
    ]
    places.sort(key=lambda place: place[:3])  # what is of one memory is together, in its order
    found: dict[int, list[int]] = {}
    reaching: list[tuple[Any, ...]] = []
    for place in places:
        memory, begin, _, tensor, module = place
        reaching = [other for other in reaching if other[0] == memory and other[2] > begin]
        for *_, other, holder in reaching:
            if other is not tensor:
                found.setdefault(id(tensor), []).append(id(holder))
                found.setdefault(id(other), []).append(id(module))
        reaching.append(place)
    return found


def _memory(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Which memory its elements are in (0: this host's), where they begin and end there. None: it has none,
    or nobody knows."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout is not torch.strided:
        return None
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory, begin = (0, tensor.data_ptr()) if is_host(tensor.device) else place_of(tensor)
    return memory, begin, begin + extent * tensor.element_size()


def _own_attributes(module: nn.Module) -> list[str]:
    """What a script has set on a layer of torch's, beside what its class has."""
    if not type(module).__module__.startswith("torch.nn."):
        return []
    known = {*inspect.signature(type(module).__init__).parameters, "training"}
    return [name for name in vars(module) if not name.startswith(("_", "smp_")) and name not in known]


def _say_why_not(where: str, why: str) -> None:
    _warn(f"{where} is not distributed: {why}")


def _warn(text: str) -> None:
    """For each model anew, since each may have other weights."""
    file, line = user_line()
    warnings.warn_explicit(f"smp tensor parallelism: {text} ({file}:{line})", UserWarning, file, line)


def _check_methods(where: str, part_name: str, part: nn.Module) -> None:
    """
    Raises:
        ValueError: it has been given another method than its class has, which its counterpart would not have.
    """
    for method, given in vars(part).items():
        is_code = inspect.isroutine(given) or isinstance(given, functools.partial)
        if is_code and inspect.isroutine(getattr(type(part), method, None)):
            whose = f"{part_name} in {where}" if part_name else where
            raise ValueError(
                f"{whose} has been given another {method}, which a layer that is split does not have: take "
                "it off before it is split, or keep the module whole with "
                "smp.set_tensor_parallelism(module, False)"
            )


def _check_training(where: str, module: nn.Module) -> None:
    """
    Raises:
        SMPError: a part of it is in evaluation and it is in training, or the reverse, so that one drops out
            elements and its counterpart would not.
    """
    for name, part in module.named_modules():
        if part.training == module.training or not _minds_training(part):
            continue
        modes = {True: "training", False: "evaluation"}
        raise SMPError(
            f"smp tensor parallelism: {where} is in {modes[module.training]}, and its {name} in "
            f"{modes[part.training]}; the split layer is in one of them as a whole. Call train() or eval() "
            "of the whole module and set the probabilities of dropout that is to do nothing to 0, or keep it "
            "whole with smp.set_tensor_parallelism(module, False)"
        )


def _minds_training(part: nn.Module) -> bool:
    """Whether what it computes may depend on its own flag."""
    drops = [each for each in part.modules() if isinstance(each, _DropoutNd) and each.p > 0]
    if isinstance(part, _DropoutNd) or type(part).__module__.startswith("transformers."):
        return bool(drops)
    return not isinstance(part, _WITHOUT_MODE)


def _made(
    module: nn.Module, name: str, registration: Registration, options: dict[str, Any]
) -> nn.Module | None:
    args, kwargs = arguments_of(module, registration)
    if registration.init_hook is not None:
        hooked = registration.init_hook(*args, **kwargs)
        if hooked is None:
            return None
        args, kwargs = hooked
    kind = registration.kind
    parameters = inspect.signature(kind).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if registration.as_built is not None:
        kwargs = registration.as_built(module, name, kwargs, frozenset(options))
    kwargs |= taken_by(kind, options)
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
