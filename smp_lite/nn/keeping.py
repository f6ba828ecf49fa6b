"""Modules that remember how their parameters lie, whatever torch makes of these."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Self

from torch import nn

from .guarding import is_unguarded
from .layout import ParameterLayout, set_layout

__all__ = ["KeepsLayouts", "lay_anew"]


class KeepsLayouts(nn.Module):
    """A module whose own parameters have layouts.

    A parameter's mark does not survive ``copy.deepcopy``, ``to_empty``, ``load_state_dict(assign=True)`` and
    the like, which make new ones. The module marks them again, so that no part ever passes for a whole.
    """

    smp_layouts: dict[str, ParameterLayout]

    def remember(self, layouts: Mapping[str, ParameterLayout]) -> None:
        """Its parameters of these names, which are parts already, lie so."""
        self.smp_layouts = {**self.__dict__.get("smp_layouts", {}), **layouts}
        self._mark()

    def _mark(self) -> None:
        for name, layout in self.__dict__.get("smp_layouts", {}).items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                set_layout(parameter, layout)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)
        self._mark()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars or is_unguarded():
            return  # the library's own question
        for name, layout in self.__dict__.get("smp_layouts", {}).items():
            part = destination.get(f"{prefix}{name}")
            if part is not None and tuple(part.shape) != layout.shape:
                warnings.warn(
                    f"state_dict() of a module has one rank's part of {prefix}{name}, which is split over "
                    "ranks: ask model.state_dict() of the DistributedModel for whole tensors, "
                    "model.local_state_dict() for parts",
                    stacklevel=2,
                )
                return

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark()


def lay_anew(module: nn.Module, parameter: nn.Parameter, layout: ParameterLayout) -> None:
    """A parameter that a module holds, and that is marked so, lies in another way from now on."""
    if isinstance(module, KeepsLayouts):
        names = [name for name, own in module._parameters.items() if own is parameter]
        module.smp_layouts = {**module.__dict__.get("smp_layouts", {}), **dict.fromkeys(names, layout)}
