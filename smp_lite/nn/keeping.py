"""Modules that remember how their parameters lie, whatever torch makes of these, and what they were cut from.

Parts do not tell whether they are of one whole. So of each whole tensor a digest is noted when it is cut, and
whether the part was changed since, which ranks compare before they train
(:mod:`smp_lite.wrapper.cutting.same_weights`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from ..deferred import is_deferred, origin_of
from ..errors import SMPError
from ..record.values.memory import digest_of, version_of
from .guarding import is_unguarded, plain
from .layout import ParameterLayout, set_layout

__all__ = ["Beginning", "KeepsLayouts", "digest_of_whole", "lay_anew", "note_wholes"]


class Beginning(NamedTuple):
    """Of a part: what ranks compare.

    Attributes:
        digest: of the whole that it was cut from.
        changed: whether it was changed since.
        place: which part it is, by the places of its ranks along the axes that split it.
        numbers: what it has since it was changed, as a digest; None: it was not, or has one number all over.
    """

    digest: int
    changed: bool
    place: tuple[int, ...]
    numbers: int | None


class KeepsLayouts(nn.Module):
    """A module whose own parameters have layouts.

    A parameter's mark does not survive ``copy.deepcopy``, ``to_empty``, ``load_state_dict(assign=True)`` and
    the like, which make new ones. The module marks them again, so that no part ever passes for a whole.
    """

    smp_layouts: dict[str, ParameterLayout]
    smp_wholes: dict[str, int]
    smp_versions: dict[str, int]
    smp_changed: frozenset[str]

    def remember(
        self, layouts: Mapping[str, ParameterLayout], wholes: Mapping[str, int] | None = None
    ) -> None:
        """Its parameters of these names, which are parts already, lie so.

        Args:
            wholes: digests of what they were cut from, where that is known.
        """
        self.smp_layouts = {**self.__dict__.get("smp_layouts", {}), **layouts}
        self._mark()
        if wholes:
            self.note_wholes(wholes)

    def note_wholes(self, digests: Mapping[str, int]) -> None:
        """Its parameters of these names are parts of wholes with these digests now."""
        self._note_changes()
        self.smp_wholes = {**self.__dict__.get("smp_wholes", {}), **digests}
        self.smp_changed = self.__dict__.get("smp_changed", frozenset()) - digests.keys()

    def note_agreed(self) -> None:
        """The ranks have compared by other means what its parts were cut from: changes count from here."""
        self.smp_wholes = dict.fromkeys(self.__dict__.get("smp_layouts", {}), 0)
        self.smp_changed = frozenset()
        self.smp_versions = self._versions()

    def beginnings(self) -> dict[str, Beginning]:
        """Of its parameters whose wholes are known."""
        self._note_changes()
        wholes: dict[str, int] = self.__dict__.get("smp_wholes", {})
        return {name: self._beginning(name, digest) for name, digest in wholes.items()}

    def _beginning(self, name: str, digest: int) -> Beginning:
        layout, part = self.smp_layouts[name], self._parameters.get(name)
        place = tuple(axis.index for axes in layout.dims for axis in axes)
        numbers = None
        if name in self.smp_changed and part is not None and not (is_deferred(part) or part.is_meta):
            found = plain(part)
            if found.numel() > 1 and bool((found != found.flatten()[0]).any()):
                numbers = digest_of(found.cpu())
        return Beginning(digest, name in self.smp_changed, place, numbers)

    def reset_parameters(self) -> None:
        """As the layer of torch's whose class it has.

        Raises:
            SMPError: parameters are parts, and would be drawn as if they were all.
        """
        own: Any = getattr(super(), "reset_parameters", None)
        if own is None:
            return
        for name, part in self._parameters.items():
            layout = self.__dict__.get("smp_layouts", {}).get(name)
            is_whole = layout is None or part is None or tuple(part.shape) == layout.shape
            if not is_whole and not is_deferred(part):
                raise SMPError(
                    f"{type(self).__name__}.reset_parameters(): its {name} is split over ranks, "
                    f"{list(part.shape)} of {list(layout.shape)} here, and would be drawn as if that were "
                    "all. Initialise before the split, or load a state dict"
                )
        own()

    def _note_changes(self) -> None:
        """Counts of torch say which parts were changed since the last look."""
        before = self.__dict__.get("smp_versions", {})
        versions = self._versions()
        changed = {name for name, version in versions.items() if before.get(name, version) != version}
        self.smp_changed = self.__dict__.get("smp_changed", frozenset()) | changed
        self.smp_versions = versions

    def _versions(self) -> dict[str, int]:
        """What waits to be made becomes another tensor, with a count of its own."""
        return {
            name: version_of(parameter)
            for name in self.__dict__.get("smp_layouts", {})
            if (parameter := self._parameters.get(name)) is not None and not is_deferred(parameter)
        }

    def _mark(self) -> None:
        for name, layout in self.__dict__.get("smp_layouts", {}).items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                set_layout(parameter, layout)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()
        self.smp_versions = self._versions()

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._note_changes()
        super()._apply(*args, **kwargs)
        self._mark()
        self.smp_versions = self._versions()
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

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._note_changes()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[arg-type]
        self._mark()
        loaded = {name for name in self.__dict__.get("smp_layouts", {}) if f"{prefix}{name}" in state_dict}
        self.smp_changed |= loaded
        self.smp_versions = self._versions()


def lay_anew(module: nn.Module, parameter: nn.Parameter, layout: ParameterLayout) -> None:
    """A parameter that a module holds, and that is marked so, lies in another way from now on."""
    if isinstance(module, KeepsLayouts):
        names = [name for name, own in module._parameters.items() if own is parameter]
        module.smp_layouts = {**module.__dict__.get("smp_layouts", {}), **dict.fromkeys(names, layout)}


def digest_of_whole(whole: torch.Tensor, layout: ParameterLayout) -> int | None:
    """Of the numbers that a parameter is cut from, or will be; None: each rank has all of them.

    Where nobody can know them (a model without data) it is the same for all.
    """
    if all(axis.size == 1 for axis in layout.axes):
        return None
    if is_deferred(whole):
        return origin_of(whole.smp_place)  # type: ignore[attr-defined]
    found = plain(whole)
    return 0 if found.is_meta or type(found) is not torch.Tensor else digest_of(found.cpu())


def note_wholes(root: nn.Module, wholes: Mapping[str, Any]) -> None:
    """The split layers of a model have taken their parts of these tensors.

    Args:
        wholes: by their names in ``root``.
    """
    for prefix, module in root.named_modules():
        if not isinstance(module, KeepsLayouts):
            continue
        start = f"{prefix}." if prefix else ""
        digests = {
            name: digest_of_whole(wholes[start + name], layout)
            for name, layout in module.__dict__.get("smp_layouts", {}).items()
            if isinstance(wholes.get(start + name), torch.Tensor)
        }
        module.note_wholes({name: digest for name, digest in digests.items() if digest is not None})
