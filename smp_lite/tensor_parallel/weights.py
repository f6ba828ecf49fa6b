"""The weights of a module that is replaced, in the module that takes its place: values, whether they train,
which are one, and what a script has noted on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..devices import CPU
from ..errors import SMPError
from ..nn.keeping import KeepsLayouts
from ..nn.layout import layout_of, part_of
from ..nn.replaced import take_attributes
from .registry import Registration, StateDict

__all__ = ["take_weights"]

_KEEP = "keep the module whole with smp.set_tensor_parallelism(module, False)"


def take_weights(
    new: nn.Module, module: nn.Module, registration: Registration, where: str, *, is_known: bool
) -> bool:
    """Gives the new module the old one's weights.

    Args:
        where: names the old one, for errors.
        is_known: the counterpart is the library's own, which has every weight of what it replaces.

    Returns:
        False where it is not known which is which; the new ones are then as they were made.

    Raises:
        SMPError: the module has weights that its counterpart has not, weights of several types, or weights
            that are one where the counterpart's are several (or the reverse).
    """
    to_smp = registration.to_smp or (lambda state: state)
    old = module.state_dict(keep_vars=True)
    whole = to_smp({name: tensor.detach() for name, tensor in old.items()})
    mine = new.state_dict(keep_vars=True)
    layouts = {name: layout_of(tensor) for name, tensor in mine.items()}
    shapes = {n: layout.shape if layout else tuple(mine[n].shape) for n, layout in layouts.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    if theirs != shapes:
        kind = type(new).__name__
        if is_known or (shapes.items() < theirs.items()):
            raise SMPError(f"smp tensor parallelism: {where} {_difference(theirs, shapes, kind)}: {_KEEP}")
        return False
    sources = _sources(old, to_smp)
    _check_ties(old, mine, sources, where, type(new).__name__)
    with torch.no_grad():
        for name, tensor in mine.items():
            layout = layouts[name]
            if whole[name].dtype != tensor.dtype and tensor.is_floating_point():
                raise SMPError(
                    f"smp tensor parallelism: {where} has {sources.get(name, name)} in {whole[name].dtype}, "
                    f"and other weights in {tensor.dtype}; the split layer has one type: convert the whole "
                    f"module, or {_KEEP}"
                )
            tensor.copy_(whole[name] if layout is None else part_of(whole[name], layout))
    for part in new.modules():
        if isinstance(part, KeepsLayouts):
            part.note_agreed()  # were drawn, and are not what it begins with
    for name, source in sources.items():
        if isinstance(mine[name], nn.Parameter):
            mine[name].requires_grad_(old[source].requires_grad)
        take_attributes(mine[name], old[source], f"{source} in {where}")
    if is_known:
        _order_as(list(old), new, sources)
    return True


def _order_as(names: list[str], new: nn.Module, sources: dict[str, str]) -> None:
    """Puts parts of the new module in the order of what they are made of, since optimizers number parameters:
    their state is then that of the old module's, where each parameter is made of one.

    Args:
        names: of the old ones, in order.
    """
    places = {name: place for place, name in enumerate(names)}
    first: dict[str, int] = {}
    for name, source in sources.items():
        path = name
        while path:
            first[path] = min(first.get(path, len(names)), places[source])
            path = path.rpartition(".")[0]
    for path, part in new.named_modules():
        if isinstance(part, nn.Sequential | nn.ModuleList):
            continue  # whose order is that in which they run
        start = f"{path}." if path else ""
        children = sorted(part._modules.items(), key=lambda child: first.get(start + child[0], len(names)))
        part._modules.clear()
        part._modules.update(children)


def _difference(theirs: dict[str, Any], mine: dict[str, Any], kind: str) -> str:
    extra, missing = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
    if extra:
        return f"has {_some(extra)}, which the {kind} that would replace it has not"
    if missing:
        return f"has no {_some(missing)}, which the {kind} that would replace it has"
    name = next(name for name, shape in theirs.items() if mine[name] != shape)
    return (
        f"has {name} of shape {list(theirs[name])}, and the {kind} that would replace it one of "
        f"{list(mine[name])}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _sources(old: StateDict, to_smp: Any) -> dict[str, str]:
    """For each new name the old one that it is made of, found by numbers that need no memory."""
    names = list(old)
    numbers = {
        name: torch.full((), float(i), dtype=torch.float64, device=CPU).expand(old[name].shape)
        for i, name in enumerate(names)
    }
    found = to_smp(numbers).items()
    return {name: names[int(number.flatten()[0])] for name, number in found if number.numel()}


def _check_ties(old: StateDict, mine: StateDict, sources: dict[str, str], where: str, kind: str) -> None:
    """
    Raises:
        SMPError: parameters are one on one side, and several on the other.
    """
    made_of: dict[str, set[int]] = {name: set() for name in old}
    first_source: dict[int, str] = {}
    for name, source in sources.items():
        made_of[source].add(id(mine[name]))
        before = first_source.setdefault(id(mine[name]), source)
        if old[before] is not old[source]:
            raise SMPError(
                f"smp tensor parallelism: {before} and {source} are two parameters in {where}, and one "
                f"in the {kind} that would replace it: tie them, or {_KEEP}"
            )
    first_name: dict[int, str] = {}
    for name, tensor in old.items():
        before = first_name.setdefault(id(tensor), name)
        if made_of[before] != made_of[name]:
            raise SMPError(
                f"smp tensor parallelism: {before} and {name} are one parameter in {where}, and two in the "
                f"{kind} that would replace it, which would train them apart: give each its own, or {_KEEP}"
            )
