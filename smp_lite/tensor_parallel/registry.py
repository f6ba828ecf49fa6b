"""Which modules have a distributed counterpart, and how one is made of the other: ``smp.tp_register``.

Follows the SMP API reference (tensor parallelism, "Registering Tensor Parallelism Distributed Modules").
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import SMPError

__all__ = ["Registration", "arguments_of", "register", "registered", "tp_register", "tp_register_with_module"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Hook = Callable[..., Any]
StateDict = dict[str, torch.Tensor]
AsBuilt = Callable[[Any, str, dict[str, Any], frozenset[str]], dict[str, Any]]
M = TypeVar("M", bound=type[nn.Module])


@dataclass(frozen=True)
class Registration:
    """The distributed counterpart of one class.

    Attributes:
        dist_cls: its class.
        init_hook: the constructor's arguments to those of ``dist_cls``; None: the same. It returns None, or
            raises :class:`ValueError`, where this module cannot be distributed.
        forward_hook: the call's arguments likewise.
        return_hook: the distributed module's output to the original's.
        to_smp, to_original: functions on whole state dicts, with names of one and of the other; None: names
            are the same.
        arguments: gives a module's constructor arguments; None: they are noted at construction.
        as_built: from a module, its name, the arguments of ``dist_cls`` and the names of those that the user
            gives: the arguments by what its parts say now; None: the parts are made by the arguments alone.
            It raises :class:`SMPError` where ``dist_cls`` would compute something else.
    """

    dist_cls: type[nn.Module]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Hook | None = None
    to_smp: Callable[[StateDict], StateDict] | None = None
    to_original: Callable[[StateDict], StateDict] | None = None
    arguments: Callable[[nn.Module], Arguments] | None = None
    as_built: AsBuilt | None = None

    @functools.cached_property
    def kind(self) -> type[nn.Module]:
        """``dist_cls``, which takes what the original takes and returns what it returns."""
        if self.forward_hook is None and self.return_hook is None:
            return self.dist_cls
        return _with_hooks(self.dist_cls, self.forward_hook, self.return_hook)


_registry: dict[type[nn.Module], Registration] = {}
_constructed_with: weakref.WeakKeyDictionary[nn.Module, Arguments] = weakref.WeakKeyDictionary()


def registered(module: nn.Module) -> Registration | None:
    """Of the module's very class: a derived one computes something else."""
    from .builtin import builtin  # transformers' classes, where it is imported

    return _registry.get(type(module)) or builtin(type(module))


def register(module_cls: type[nn.Module], registration: Registration) -> None:
    """From now on modules of this class can be distributed."""
    _registry[module_cls] = registration
    if registration.arguments is None:
        _note_arguments(module_cls)


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> Callable[[M], M]:
    """Class decorator: ``dist_module`` is the distributed counterpart of the class.

    Args:
        dist_module: a module class, usually of ``smp.nn``.
        init_hook: takes the constructor's arguments (without ``self``), returns ``(args, kwargs)`` for
            ``dist_module``; None: the same arguments. Where it returns None the module stays as it is.
        forward_hook: takes the arguments of ``forward``, returns ``(args, kwargs)`` for ``dist_module``.
        return_hook: takes what ``dist_module`` returns, returns what the original would.

    Raises:
        TypeError: something is no class of modules, or no function.
    """

    def decorate(module_cls: M) -> M:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return decorate


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> None:
    """As :func:`tp_register`, for a class that is there already; before ``smp.DistributedModel``.

    The constructor's arguments are noted from now on. For modules made before, they are read from attributes
    of the same names.

    Raises:
        TypeError: something is no class of modules, or no function.
    """
    for name, given in (("the module", module_cls), ("dist_module", dist_module)):
        if not inspect.isclass(given) or not issubclass(given, nn.Module):
            raise TypeError(f"smp.tp_register: {name} must be a class of modules, got {given!r}")
    hooks = {"init_hook": init_hook, "forward_hook": forward_hook, "return_hook": return_hook}
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise TypeError(f"smp.tp_register: {name} must be a function, got {hook!r}")
    register(module_cls, Registration(dist_module, init_hook, forward_hook, return_hook))


def arguments_of(module: nn.Module, registration: Registration) -> Arguments:
    """What the module was constructed with.

    Raises:
        SMPError: that is not known.
    """
    if registration.arguments is not None:
        return registration.arguments(module)
    if module in _constructed_with:
        return _constructed_with[module]
    found = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if hasattr(module, name):
            found[name] = getattr(module, name)
        elif parameter.default is parameter.empty:
            raise SMPError(
                f"a {type(module).__name__} is to be distributed, was made before its class was registered, "
                f"and has no attribute {name!r}, which its constructor takes: call smp.tp_register or "
                "smp.tp_register_with_module before the model is made"
            )
    return (), found


def _note_arguments(module_cls: type[nn.Module]) -> None:
    original = module_cls.__init__
    if getattr(original, "smp_notes", False):
        return

    @functools.wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is module_cls:
            _constructed_with[self] = (args, kwargs)

    __init__.smp_notes = True  # type: ignore[attr-defined]
    module_cls.__init__ = __init__  # type: ignore[method-assign]


def _with_hooks(
    dist_cls: type[nn.Module], forward_hook: Hook | None, return_hook: Hook | None
) -> type[nn.Module]:
    original_forward = dist_cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if forward_hook is not None:
            args, kwargs = forward_hook(*args, **kwargs)
        found = original_forward(self, *args, **kwargs)
        return found if return_hook is None else return_hook(found)

    attributes = {"forward": forward, "__module__": dist_cls.__module__, "__doc__": dist_cls.__doc__}
    return type(dist_cls.__name__, (dist_cls,), attributes)
