"""Tensors that live on another rank: what a parameter of another stage is here, after the partition.

An *away* tensor has a shape, a dtype and a stage, and no data. Every rank runs the same script, so whatever
is computed with it here is computed for real on its stage's rank: an average of weights, a clamp, a copy. So
functions of away tensors give away tensors, changes in place of them do nothing here, and an ordinary tensor
that takes one in (an average that was copied before the partition) becomes one: the number is on the other
rank. Random numbers drawn for one are drawn here too and thrown away, so that the ranks' generators stay
together.

Whatever wants the data here (``.item()``, printing numbers, saving, a sum over several stages) is an error
that says what the tensor is and how to get it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices import home
from ...errors import SMPError
from ..code.random_operators import draws_numbers
from ..state.draws import Draw
from ..values.calls import Arguments
from ..values.memory import storage_of
from ..values.structure import flatten, rebuild
from ..values.torch_functions import (
    METADATA_FUNCTIONS,
    METADATA_PROPERTIES,
    changes_first,
    function_name,
    is_metadata,
)

__all__ = [
    "AwayParameter",
    "AwayTensor",
    "Uses",
    "a_try_uses_others",
    "away_buffer",
    "is_away",
    "names_of_local",
    "needed",
    "note_gradient",
    "root_of",
    "send_away",
]

_NEEDS_DATA = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__array__",
        "__contains__",
        "is_nonzero",
        "equal",
        "allclose",
        "backward",
        "__reduce_ex__",
        "__reduce__",
        "__dlpack__",
        "data_ptr",
        "untyped_storage",
        "storage",
        "_typed_storage",
        "__setstate__",
    ]
)
_ON_PLACEHOLDER = frozenset(
    ["requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "_use_count"]
)


class Uses:
    """While a call is tried out on fake tensors: what it asks of away tensors beside their form.

    Its own parameters it may hold elsewhere too (a closure over ``self.gamma``): where these are away, the
    fake ones answer, as they do for what it reads of the module.

    Args:
        own: its fake parameters, by the names that they have in the whole model.
    """

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        self.own = own
        self.of_others = self.of_own = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        global _uses
        before, _uses = _uses, self
        try:
            yield
        finally:
            _uses = before

    def with_own(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with the fake ones in their places; None: only the form of others is asked for.

        Raises:
            SMPError: more is asked of others; the caller will not see it, and ``of_others`` tells.
        """
        arguments = Arguments.of(args, kwargs)
        own = [self._own(tensor) for tensor in arguments.tensors]
        others = [tensor for tensor, fake in zip(arguments.tensors, own) if fake is None and is_away(tensor)]
        if others and not is_metadata(func, getattr(func, "__name__", "")):
            self.of_others = True
            raise needed("a call that is tried out", others)
        if all(fake is None for fake in own):
            return None
        self.of_own = True
        tensors = [tensor if fake is None else fake for tensor, fake in zip(arguments.tensors, own)]
        return arguments.build(tensors)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.own.get(tensor.smp_name) if type(tensor) is AwayParameter else None


_uses: Uses | None = None


def a_try_uses_others() -> None:
    """If a call is tried out, it is one that has to be opened: it asks for what is not its own."""
    if _uses is not None:
        _uses.of_others = True


def _fake_for(away: Any, method: Any) -> torch.Tensor | None:
    """What answers in its place for a method that torch does not ask about; None: itself."""
    replaced = None if _uses is None else _uses.with_own(method, (away,), {})
    return None if replaced is None else replaced[0][0]


class _Away:
    """What both kinds have in common."""

    smp_stage: int
    smp_name: str
    smp_root: Any = None  # the away tensor that this is another view of

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _uses is not None and (replaced := _uses.with_own(func, args, kwargs)) is not None:
            return func(*replaced[0], **replaced[1])
        if name == "__get__":
            return _attribute(func, args)
        if name == "__set__":
            return _set_attribute(func, args)
        if name in ("__repr__", "__str__", "__format__"):
            return _describe(args[0])
        if name in _NEEDS_DATA:
            raise needed(function_name(func), _aways(args, kwargs))
        if name in METADATA_FUNCTIONS or name in _ON_PLACEHOLDER:
            if name == "get_device":
                return -1 if home().index is None else home().index
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in ("detach", "cpu"):
            return _wrap_like(args[0])
        if name == "to" and not any(is_away(other) for other in args[1:]):
            _, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
            return _wrap_like(args[0]) if dtype is None else args[0].type(dtype)
        if "_foreach_" in name:
            return _for_each(func, args, kwargs)
        return _compute(func, name, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if (fake := _fake_for(self, torch.Tensor.__reduce_ex__)) is not None:
            return fake.__reduce_ex__(protocol)
        raise needed("saving it", [self])


class AwayTensor(_Away, torch.Tensor):
    """An away tensor that is no parameter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copy(self, memo)


class AwayParameter(_Away, nn.Parameter):
    """A parameter of another stage."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copy(self, memo)


def is_away(value: Any) -> bool:
    """Whether it is a tensor that lives on another rank."""
    return isinstance(value, _Away)


def away_parameter(parameter: torch.Tensor, stage: int, name: str) -> AwayParameter:
    """An away parameter of that form."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        meta = torch.empty_like(parameter, device="meta")
        away = torch.Tensor._make_subclass(AwayParameter, meta, parameter.requires_grad)
    away.smp_stage, away.smp_name = stage, name
    return away


def away_buffer(tensor: torch.Tensor, stage: int, name: str) -> AwayTensor:
    """An away tensor of that form."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return _wrap(torch.empty_like(tensor, device="meta"), stage, name)


def note_gradient(parameter: AwayParameter, stage: int, name: str) -> None:
    """The away parameter has a gradient by now, which is away too; keeps the one that it has.

    A script that drops its gradients makes this happen in every step, for every parameter: so the form is the
    parameter's own, a detached view of no data.
    """
    with torch._C.DisableTorchFunction():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = _wrap(parameter, stage, f"the gradient of {name}")


def send_away(parameter: nn.Parameter, stage: int, name: str) -> nn.Parameter:
    """Makes the object itself an away parameter, wherever it is held, and frees its memory.

    Returns:
        The object; another one if the object cannot be changed (somebody has weak references to it).
    """
    away = away_parameter(parameter, stage, name)
    for key, value in parameter.__dict__.items():  # what the script has set on it
        away.__dict__.setdefault(key, value)
    try:
        torch.utils.swap_tensors(parameter, away)
    except RuntimeError:
        return away
    return parameter


def needed(what: str, aways: list[Any]) -> SMPError:
    """The error for who wants data that is not here."""
    away = aways[0]
    return SMPError(
        f"{what}: {_name(away)} lives on stage {away.smp_stage}, in another process, and has no data here. "
        "model.local_named_parameters() gives what is here; 'with smp.gathered(model) as module:' brings the "
        "whole model here, or a copy of it that is given instead (an AveragedModel); model.state_dict() is "
        "its whole state; and the model is called in a function decorated with @smp.step"
    )


def _name(away: Any) -> str:
    return away.smp_name if away.smp_name else f"a tensor of shape {tuple(away.shape)}"


def _describe(away: Any) -> str:
    return (
        f"AwayTensor({_name(away)!r}, stage={away.smp_stage}, shape={tuple(away.shape)}, dtype={away.dtype})"
    )


def _wrap(meta: torch.Tensor, stage: int, name: str = "") -> AwayTensor:
    with torch._C.DisableTorchFunction():
        away = torch.Tensor._make_subclass(AwayTensor, meta.detach(), False)
    away.smp_stage, away.smp_name = stage, name
    return away


def _copy(away: Any, memo: dict[int, Any]) -> Any:
    if (fake := _fake_for(away, torch.Tensor.__deepcopy__)) is not None:
        return copy.deepcopy(fake, memo)
    if id(away) not in memo:
        make = away_parameter if isinstance(away, AwayParameter) else away_buffer
        memo[id(away)] = make(away, away.smp_stage, away.smp_name)
    return memo[id(away)]


def _aways(args: Any, kwargs: Any) -> list[Any]:
    return [tensor for tensor in Arguments.of(args, kwargs).tensors if is_away(tensor)]


# Attributes -------------------------------------------------------------------------------------------------


def _attribute(func: Any, args: tuple[Any, ...]) -> Any:
    name = getattr(func.__self__, "__name__", "")
    away = args[0]
    if name == "device":
        return home()
    if name == "is_meta":
        return False
    if name in ("is_cpu", f"is_{home().type}"):
        return name == f"is_{home().type}"
    if name == "data":
        return _wrap_like(away)
    if name in METADATA_PROPERTIES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    return _compute(func, name, args, {})


def _wrap_like(away: Any) -> AwayTensor:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        found = _wrap(torch.empty_like(away, device="meta"), away.smp_stage, away.smp_name)
    found.smp_root = root_of(away)
    return found


def root_of(away: Any) -> Any:
    """The away tensor that this one is, or was detached from."""
    return away if away.smp_root is None else away.smp_root


def _set_attribute(func: Any, args: tuple[Any, ...]) -> None:
    name = getattr(func.__self__, "__name__", "")
    target, value = args
    if not is_away(target):
        # target.data = away, target.grad = away
        raise needed(f"setting .{name}", [value])
    if name == "data":
        return  # on its own stage it is set for real
    with torch._C.DisableTorchFunctionSubclass():
        func(target, value)


# Functions --------------------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Notices random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.draws |= draws_numbers(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _compute(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The form of a result that is computed on the tensors' own stage."""
    arguments = Arguments.of(args, kwargs)
    aways = [tensor for tensor in arguments.tensors if is_away(tensor)]
    stages = {away.smp_stage for away in aways}
    for tensor in arguments.tensors:
        if type(tensor) is nn.Parameter and hasattr(tensor, "smp_stage"):
            stages.add(tensor.smp_stage)
    if len(stages) > 1:
        raise needed(f"{function_name(func)}() over stages {sorted(stages)} at once", aways)
    (stage,) = stages
    with torch._C.DisableTorchFunction():
        metas = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in arguments.tensors
        ]
        meta_args, meta_kwargs = arguments.build(metas)
        if "device" in meta_kwargs:
            meta_kwargs["device"] = "meta"
        watch = _Watch()
        with torch.no_grad(), watch:
            result = func(*meta_args, **meta_kwargs)
        if watch.draws:
            Draw(func, arguments).advance()
    if changes_first(name, kwargs):
        target = kwargs["out"] if "out" in kwargs else args[0] if args else kwargs["tensor"]
        _take_in(target, stage, func)
        return target
    leaves: list[Any] = []
    spec = flatten(result, leaves)
    known = {id(meta): tensor for meta, tensor in zip(metas, arguments.tensors)}
    return rebuild(
        spec,
        iter(
            [
                known.get(id(leaf), _wrap(leaf, stage)) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
        ),
    )


def _for_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of lists, tensor by tensor: for those that are here it runs, the others are away."""
    length = len(args[0])
    lists = [isinstance(arg, list | tuple) and len(arg) == length for arg in args]
    others = [arg for arg, each in zip(args, lists) if not each]
    if aways := _aways(tuple(others), kwargs):
        raise needed(function_name(func), aways)
    away = [i for i in range(length) if any(is_away(arg[i]) for arg, each in zip(args, lists) if each)]
    for i in away:
        for arg, each in zip(args, lists):
            if each and isinstance(arg[i], torch.Tensor) and not is_away(arg[i]) and arg[i].dim():
                raise needed(f"{function_name(func)}() of tensors of several stages", _aways(args, kwargs))
    here = [i for i in range(length) if i not in away]
    result = None
    if here:
        chosen = [[arg[i] for i in here] if each else arg for arg, each in zip(args, lists)]
        result = func(*chosen, **kwargs)
    if changes_first(func.__name__, kwargs):
        return None
    found = iter(result or ())
    return tuple(_wrap_like(args[0][i]) if i in away else next(found) for i in range(length))


def _take_in(target: Any, stage: int, func: Any) -> None:
    """An ordinary tensor that is changed by an away one is away from now on, and so is all of its memory."""
    for tensor in target if isinstance(target, list | tuple) else [target]:
        if is_away(tensor):
            continue
        holders = _sharing(tensor)
        for holder in holders:
            if id(holder) in LOCAL or any(holder is parameter.grad for parameter in LOCAL.values()):
                raise SMPError(
                    f"{function_name(func)}() takes a tensor of stage {stage}, which lives in another "
                    f"process, into "
                    "a parameter (or its gradient) of this one: put both on one stage with smp.partition, "
                    "or use "
                    "'with smp.gathered(model)' around it, on all ranks"
                )
        for holder in holders:
            make = away_parameter if isinstance(holder, nn.Parameter) else away_buffer
            try:
                torch.utils.swap_tensors(holder, make(holder, stage, ""))
            except RuntimeError:
                raise SMPError(
                    f"{function_name(func)}() takes a tensor of stage {stage}, which lives in another "
                    f"process, "
                    "into one that is here and cannot be marked: use 'with smp.gathered(model)' around it"
                ) from None


LOCAL: dict[int, nn.Parameter] = {}
"""The parameters of this process's stages, by id, while others are away."""


def names_of_local(tensor: torch.Tensor) -> list[str]:
    """The parameter of this process's stages that it is, or those in whose memory it lies; names."""
    if id(tensor) in LOCAL:
        return [LOCAL[id(tensor)].smp_name]  # type: ignore[attr-defined]
    memory = storage_of(tensor)
    if memory is None:
        return []
    return [p.smp_name for p in LOCAL.values() if storage_of(p) == memory]  # type: ignore[attr-defined]


_by_memory: dict[int, list[Any]] = {}
"""Tensor objects by their memory, from one look at all objects; forgotten when a step begins."""


def forget_all() -> None:
    """The model is gone."""
    LOCAL.clear()
    _by_memory.clear()


def forget_memory() -> None:
    """Lets go of the tensors that were looked at."""
    _by_memory.clear()


def _sharing(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All tensor objects that share its memory: ``ema.data.add_(...)`` changes ``ema``."""
    with torch._C.DisableTorchFunction():
        memory = tensor.untyped_storage()._cdata
        known = [
            t for t in _by_memory.get(memory, ()) if not is_away(t) and t.untyped_storage()._cdata == memory
        ]
        if not known:
            _by_memory.clear()
            for other in gc.get_objects():
                if type(other) in (torch.Tensor, nn.Parameter) and other.layout is torch.strided:
                    _by_memory.setdefault(other.untyped_storage()._cdata, []).append(other)
            known = _by_memory.get(memory, [])
    return [tensor, *[other for other in known if other is not tensor]]
