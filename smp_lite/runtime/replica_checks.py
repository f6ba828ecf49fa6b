"""Whether replicas stay alike in a plain loop: their parameters, and gradients that no backward has reduced.

Under data parallelism every replica makes the same step of its optimizer, since all hold the same parameters
and the same reduced gradients (Li et al. 2020, "PyTorch Distributed", section 3.1). A script can break that
where no hook of a backward hears of it: it puts a gradient of its own into ``grad`` (``torch.autograd.grad``,
``torch.func.grad``), steps parameters that are in no wrapped model, or takes a learning rate from its own
rank's loss. So gradients that a reduction has not left there are compared when an optimizer steps, and
parameters at the end of every backward: a few small ones each time, since what goes wrong mostly concerns
all, and the others now and then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from ..comm.layout import sum_of_bits
from ..errors import SMPMismatch
from ..nn.guarding import plain
from ..nn.layout import layout_of
from .model_runtime import ModelRuntime

__all__ = ["Digests", "ReplicaChecks", "first_difference"]

Digests = dict[tuple[str, tuple[tuple[str, int], ...]], int]
"""By name, and by where the rank stands along the axes on which others may hold something else."""

_FEW, _SMALL = 8, 4096


class ReplicaChecks:
    """Looks at one model's parameters, and at gradients before optimizers step.

    Args:
        runtime: the model's, which reduces gradients.
        coordinate: of this rank along the axes of the job.
        batch_axes: those along which ranks have batches of their own.
        exchange: gives every rank's digests to all of them, in the order of ranks.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        coordinate: Mapping[str, int],
        batch_axes: Sequence[str],
        exchange: Callable[[Digests], list[Digests]],
    ) -> None:
        self._runtime, self._exchange = runtime, exchange
        self._coordinate, self._batch_axes = dict(coordinate), tuple(batch_axes)
        self._names = {id(p): runtime.placement.alias(p) or "" for p in runtime.local_parameters()}
        self._parameters = runtime.local_parameters()
        trained = sorted((p for p in self._parameters if p.requires_grad), key=lambda p: p.numel())
        self._few = [p for p in trained[:_FEW] if p.numel() <= _SMALL]
        self._left: dict[int, weakref.ref[torch.Tensor]] = {}  # gradients that are the same on all replicas
        self._stepped: set[int] = set()
        self._passes = runtime.passes
        self.is_used = False  # whether a plain loop runs at all

    def parameters(self, *, every: bool) -> Digests:
        """What replicas must have alike; without ``every`` of a few small ones."""
        if self._runtime.reducer is None or self._runtime.reducer.hook is not None:
            return {}  # what a hook makes of gradients may differ, and is the user's business
        return {
            (self._names[id(p)], self._where(p)): sum_of_bits(plain(p))
            for p in (self._parameters if every else self._few)
        }

    def set_gradients(self) -> int:
        """Which parameters have a gradient now, as bits; of the small ones, one that is not zero."""
        few = {id(parameter) for parameter in self._few}
        found = 0
        for number, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None and (id(parameter) not in few or bool(plain(gradient).any())):
                found |= 1 << number
        return found

    def name_of_first(self, bits: int) -> str:
        """The first parameter among those of :meth:`set_gradients`."""
        return self._names[id(self._parameters[(bits & -bits).bit_length() - 1])]

    def note(self) -> None:
        """A backward has ended, and what is in ``grad`` now is reduced."""
        self._passes = self._runtime.passes
        self._stepped.clear()
        self._accept(self._parameters)

    def before_step(self, optimizer: torch.optim.Optimizer, *, is_over: bool = False) -> None:
        """An optimizer is about to step or, where its closure has made gradients, has stepped.

        Collective over all ranks if there are gradients that no backward has reduced.

        Raises:
            SMPMismatch: they differ between replicas, or nobody can tell (parameters that are split).
        """
        if self._passes != self._runtime.passes:
            self.note()  # a step of the library's own has reduced them
        found: list[tuple[str, torch.Tensor]] = []
        for place, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is None or not parameter.requires_grad:
                    continue
                is_new = not self._is_left(parameter)
                name = self._names.get(id(parameter))
                if name is None and self.is_used and (is_new or not is_over):
                    shape = tuple(parameter.shape)
                    found.append((f"number {number} of group {place}, of shape {shape}, is in", parameter))
                elif name is not None and (is_new or (id(parameter) in self._stepped and not is_over)):
                    found.append((name, parameter))
                if name is not None and not is_over:
                    self._stepped.add(id(parameter))
        if found:
            self._compare(optimizer, found)
            self._accept(parameter for _, parameter in found)

    def _compare(self, optimizer: torch.optim.Optimizer, found: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in found:
            if self._is_summed(parameter) and not self._is_left(parameter):
                raise SMPMismatch(
                    f"{type(optimizer).__name__}.step(): the gradient of {name!r} is not what the last "
                    "backward left there. The parameter is split over ranks, and what its gradient lacks "
                    "(a sum or a mean over them) is made in loss.backward() alone: call that, and change "
                    "gradients in place"
                )
        heard = self._exchange({(name, self._where(p)): sum_of_bits(plain(p.grad)) for name, p in found})
        differs = first_difference(heard, everything=True)
        if differs is None:
            return
        name, one, other = differs
        step = f"{type(optimizer).__name__}.step()"
        if name not in self._names.values():
            raise SMPMismatch(
                f"{step}: a parameter, {name} no wrapped model, and its gradient on rank {other} is not that "
                f"on rank {one}, so replicas would drift apart: only gradients of the model that "
                "smp.DistributedModel wraps are reduced. Put the module that it belongs to (a criterion with "
                "weights, a discriminator) into the module that is wrapped"
            )
        raise SMPMismatch(
            f"{step}: the gradient of {name!r} is not what the last backward left there, and differs between "
            f"rank {one} and rank {other}: gradients are reduced over replicas by loss.backward(), and those "
            "of torch.autograd.grad or torch.func.grad are of this rank's batch alone. Call backward(), and "
            "change what it leaves in the same way on all ranks"
        )

    def _accept(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._left[id(parameter)] = weakref.ref(parameter.grad)
            else:
                self._left.pop(id(parameter), None)

    def _is_left(self, parameter: torch.Tensor) -> bool:
        """Whether its gradient is what a reduction has left, or has been compared."""
        left = self._left.get(id(parameter))
        return left is not None and left() is parameter.grad

    def _is_summed(self, parameter: torch.Tensor) -> bool:
        """Whether its reduction is no mean of what the others have at the same place."""
        layout = layout_of(parameter) if isinstance(parameter, nn.Parameter) else None
        if layout is None:
            return False
        return bool(layout.partial_over) or any(axis.name in self._batch_axes for axis in layout.axes)

    def _where(self, parameter: torch.Tensor) -> tuple[tuple[str, int], ...]:
        """The ranks at the same place hold the same of it."""
        layout = layout_of(parameter) if isinstance(parameter, nn.Parameter) else None
        splitting = {axis.name for axis in layout.axes} if layout is not None else set()
        return tuple(
            (axis, at)
            for axis, at in self._coordinate.items()
            if axis in splitting or axis not in self._batch_axes
        )


def first_difference(heard: Sequence[Digests], *, everything: bool) -> tuple[str, int, int] | None:
    """The first name whose digest is not the same on all ranks that stand at the same place.

    Args:
        heard: of every rank.
        everything: what only some of those ranks have differs as well.

    Returns:
        The name and two ranks; None: nothing differs.
    """
    seen: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[int, int]] = {}
    for rank, said in enumerate(heard):
        for key, digest in said.items():
            first, expected = seen.setdefault(key, (rank, digest))
            if digest != expected:
                return key[0], first, rank
    if everything:
        places: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank, said in enumerate(heard):
            for place in {where for _, where in said}:
                places.setdefault(place, []).append(rank)
        for (name, where), (first, _) in seen.items():
            for rank in places[where]:
                if (name, where) not in heard[rank]:
                    return name, first, rank
    return None
