"""Modules and parameters whose place in the model a split layer has taken.

The split layer has memory of its own, and trains that. Whoever still has the old one (an optimizer, a list
beside the submodules, a closure) would go on with weights that nothing trains any more. So the old ones
refuse by name to be used, until they are forgotten.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..deferred import is_deferred
from ..deferred.dispatch import DeferredTensor, script_attributes
from ..errors import SMPError
from ..record.code.source_line import user_line
from ..record.values.torch_functions import METADATA_FUNCTIONS, function_name

__all__ = [
    "Parts",
    "is_replaced",
    "mark_replaced",
    "parts_of",
    "refuse_replaced",
    "replaced_name",
    "take_attributes",
]

_NAME = "smp_replaced"
_METHODS = (
    *("forward", "train", "register_forward_hook", "register_forward_pre_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"),
    *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
    *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
)
"""What would be done to the old module, and not to the one in its place."""
_OF_NUMBERS = frozenset(["data", "grad", "_grad", "T", "mT", "H", "mH", "real", "imag"])


@dataclass(frozen=True)
class Parts:
    """All modules and parameters of a model with their names, kept alive while some are replaced."""

    modules: list[tuple[str, nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]


def parts_of(root: nn.Module) -> Parts:
    """What a model consists of now."""
    return Parts(list(root.named_modules()), list(root.named_parameters()))


def mark_replaced(before: Parts, root: nn.Module) -> None:
    """From now on whatever of the model is not in it any more refuses to be used.

    Args:
        before: what it consisted of.
        root: the model as it is.
    """
    modules = {id(module) for module in root.modules()}
    parameters = {id(parameter) for parameter in root.parameters()}
    for name, module in before.modules:
        if id(module) not in modules and _matters(module):
            for method in _METHODS:
                vars(module)[method] = _Gone(name or type(module).__name__, getattr(module, method))
    for name, parameter in before.parameters:
        if id(parameter) not in parameters:
            setattr(parameter, _NAME, name)
            if type(parameter) is nn.Parameter:
                parameter.__class__ = ReplacedParameter
            elif is_deferred(parameter):
                parameter.__class__ = ReplacedDeferred


def replaced_name(parameter: Any) -> str | None:
    """The name that a parameter had in the model; None: it was not replaced."""
    return getattr(parameter, _NAME, None) if isinstance(parameter, torch.Tensor) else None


def is_replaced(module: nn.Module) -> bool:
    """Whether a split layer has taken its place."""
    return isinstance(vars(module).get("forward"), _Gone)


def refuse_replaced(what: str, param_groups: list[dict[str, Any]]) -> None:
    """
    Args:
        what: asks, for the error.
        param_groups: of an optimizer.

    Raises:
        SMPError: there is a parameter in them that was replaced.
    """
    for place, group in enumerate(param_groups):
        for parameter in group["params"]:
            if (name := replaced_name(parameter)) is not None:
                raise SMPError(
                    f"{what}: the optimizer was made before the model was split. param_groups[{place}] holds "
                    f"the old parameter {name!r}, which a split layer has replaced, and the split one would "
                    "never be trained: make the optimizer from model.parameters() after "
                    "smp.DistributedModel(...) (after smp.parallelize, where that splits)"
                )


def _matters(module: nn.Module) -> bool:
    """Whether one process would compute something else with the old module than with a new one like it."""
    return any(part._parameters or part._buffers or isinstance(part, _DropoutNd) for part in module.modules())


class _Gone:
    """Stands in the place of a method of a module that was replaced."""

    def __init__(self, name: str, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        # Not the method itself, which has the module: that would keep its weights until garbage is collected.
        del self.__wrapped__  # type: ignore[attr-defined]
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(method)
        self.name, self.method = name, getattr(method, "__name__", "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        calls = "calls" if self.method == "forward" else f"calls .{self.method}() of"
        raise SMPError(
            f"{self.name!r} was replaced by its split layer, and the code at {_line()} still {calls} the old "
            "one, which nothing trains, through something that is no submodule of the model (a list, a dict, "
            "a closure, a variable): reach it by the model's submodules (nn.ModuleList, nn.ModuleDict; "
            "model.module where all of the model was replaced), or keep it whole with "
            "smp.set_tensor_parallelism(module, False)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gone:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SMPError(
            f"{self.name!r} was replaced by its split layer, and the old one would be saved: save "
            "model.state_dict() of the DistributedModel"
        )


def _refuse(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    called = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if called in METADATA_FUNCTIONS or (called == "__get__" and attribute not in _OF_NUMBERS):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    flat = [each for arg in (*args, *(kwargs or {}).values()) for each in _members(arg)]
    name = next((found for found in map(replaced_name, flat) if found is not None), "a parameter")
    raise SMPError(
        f"{function_name(func)} of {name!r} at {_line()}: a split layer has replaced this parameter, and "
        "nothing trains the old one that this code has (in an optimizer, a list, a closure, a variable): "
        "make optimizers from model.parameters() after smp.DistributedModel(...), reach parameters by the "
        "model's submodules, or keep the layer whole with smp.set_tensor_parallelism(module, False)"
    )


def _line() -> str:
    file, line = user_line()
    return f"{file}:{line}"


def _members(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


class ReplacedParameter(nn.Parameter):
    """The very object of an old parameter, which says what it was, and none of its numbers."""

    __torch_function__ = classmethod(_refuse)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<the parameter {replaced_name(self)!r}, which a split layer has replaced>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                copied = nn.Parameter(self.data.clone(), self.requires_grad)
            setattr(copied, _NAME, replaced_name(self))
            copied.__class__ = ReplacedParameter
            memo[id(self)] = copied
        return memo[id(self)]


class ReplacedDeferred(DeferredTensor):
    """The same for one that had no memory yet."""

    __torch_function__ = classmethod(_refuse)
    __repr__ = ReplacedParameter.__repr__

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return _refuse(type(self), torch.Tensor.data.__get__, (), (self,))


def take_attributes(tensor: torch.Tensor, source: torch.Tensor, where: str) -> None:
    """What a script has noted on an old parameter (a factor of its rate, its group) on the one in its place.

    Args:
        where: names the old one, for the error.

    Raises:
        SMPError: it is a number for each element of the old one.
    """
    found = script_attributes(source) if is_deferred(source) else vars(source)
    for key, value in found.items():
        if key.startswith("smp_") or key == "_is_param" or key in vars(tensor):
            continue
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == source.shape:
            raise SMPError(
                f"{where} has an attribute {key!r} of its own shape, and the split layer has a part of the "
                "parameter: keep it elsewhere, or keep the layer whole with "
                "smp.set_tensor_parallelism(module, False)"
            )
        setattr(tensor, key, value)
