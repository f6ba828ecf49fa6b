"""Lazy modules (``nn.LazyLinear``), which learn their shapes from the first batch: made before the partition.

In plain torch the first forward makes their parameters, drawing from the generator as it goes. Here the
model is cut before its first forward runs, so a copy of the model runs that forward, and its lazy modules
are taken over; whatever else the run leaves behind stays with the copy. The generator goes on from where the
initialisation left it, as in plain torch; if the forward draws other numbers as well, the two cannot be told
apart and the dry run is left to the user.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ...devices import home
from ...errors import SMPError

__all__ = ["has_lazy_modules", "initialise_lazy_modules"]


def has_lazy_modules(root: nn.Module) -> bool:
    """Whether parameters are still to be made."""
    return any(_is_waiting(module) for module in root.modules())


def initialise_lazy_modules(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes the parameters of lazy modules, as the call with these arguments would; nothing if there are
    none.

    Raises:
        SMPError: the call draws random numbers for other things too.
    """
    lazy = [name for name, module in root.named_modules() if _is_waiting(module)]
    if not lazy:
        return
    twin = copy.deepcopy(root).to(home())
    states = [torch.get_rng_state()]
    for name in lazy:
        _watch(twin.get_submodule(name), states)
    with torch.no_grad():
        twin(*args, **kwargs)
    states.append(torch.get_rng_state())
    # Pairs: where one initialisation ended, the next began.
    if any(not torch.equal(end, start) for end, start in zip(states[::2], states[1::2], strict=True)):
        raise SMPError(
            f"the lazy modules {', '.join(lazy)} are made in a forward that draws other random numbers too: "
            "run the model once on a batch before smp.DistributedModel (a dry run), which makes them"
        )
    for name in lazy:
        _take_over(root.get_submodule(name), twin.get_submodule(name), name)


def _is_waiting(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def _watch(module: Any, states: list[torch.Tensor]) -> None:
    """Notes the generator's state around the module's initialisation."""
    initialise = module.initialize_parameters

    def watched(*args: Any, **kwargs: Any) -> None:
        states.append(torch.get_rng_state())
        initialise(*args, **kwargs)
        states.append(torch.get_rng_state())

    module.__dict__["initialize_parameters"] = watched


def _take_over(module: Any, made: Any, name: str) -> None:
    """The module becomes what its twin has become; its parameters stay, since an optimizer may hold them."""
    if _is_waiting(made):
        raise SMPError(
            f"the lazy module {name} is not called in the first forward, so its shape is not known when the "
            "model is cut: give it its sizes, or run the model before smp.DistributedModel so that it is "
            "called"
        )
    module._initialize_hook.remove()
    module._load_hook.remove()
    for tables in ("_parameters", "_buffers"):
        for own, tensor in getattr(module, tables).items():
            if is_lazy(tensor):
                value = getattr(made, tables)[own]
                tensor.materialize(value.shape, value.device, value.dtype)
                with torch.no_grad():
                    tensor.copy_(value)
    for key in ("_initialize_hook", "_load_hook"):
        delattr(module, key)
    for key, value in made.__dict__.items():
        if key not in nn.Module().__dict__ and key != "initialize_parameters":
            module.__dict__[key] = value
    module.__class__ = type(made)
