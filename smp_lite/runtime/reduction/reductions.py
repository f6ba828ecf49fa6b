"""Which gradients are summed over which ranks, and by what the sum is divided.

Every rank whose batch is its own contributes to the mean: so a parameter's gradient is summed over the axes
along which batches differ, except those that split the parameter itself (its part has seen all their
batches), and divided by the number of batches. To that come the axes over which the layer leaves each rank a
summand (:class:`~smp_lite.nn.layout.ParameterLayout`), by which nothing is divided. Parameters with the same
axes share a :class:`~.reducer.Reducer`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...comm.collectives import Collectives, OneMember
from ...comm.groups.ranks import Ranks
from ...devices import CPU
from ...errors import SMPError
from ...nn.layout import is_sharded, layout_of
from ..sharded.parameters import ShardGroup
from .piece_reducer import PieceReducer
from .reducer import Hook, Reducer, broadcast_tensors

__all__ = ["Reductions", "Rule", "broadcast_parameters", "rule_of"]


class Rule(NamedTuple):
    """What is done to a gradient: summed over the ranks along ``axes``, divided by ``divisor``."""

    axes: tuple[str, ...]
    divisor: int


def rule_of(parameter: nn.Parameter, ranks: Ranks) -> Rule:
    """For one parameter."""
    layout = layout_of(parameter)
    splitting = {axis.name for axis in layout.axes} if layout is not None else set()
    partial = {axis.name for axis in layout.partial_over} if layout is not None else set()
    summed = tuple(
        axis
        for axis, size in ranks.axes.items()
        if size > 1 and (axis in partial or (axis in ranks.batch_axes and axis not in splitting))
    )
    return Rule(summed, math.prod(ranks.axes[axis] for axis in ranks.batch_axes))


def broadcast_parameters(parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """The first of the ranks that must have the same part of a parameter gives it to the others."""
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        layout = layout_of(parameter)
        splitting = {axis.name for axis in layout.axes} if layout is not None else set()
        axes = tuple(a for a, size in ranks.axes.items() if size > 1 and a not in splitting)
        by_axes.setdefault(axes, []).append(parameter)
    for axes, tensors in sorted(by_axes.items()):
        collectives = ranks.collectives(axes)
        if collectives is not None:
            broadcast_tensors(tensors, collectives, "the initial parameters")


class Reductions:
    """All reductions of one rank's gradients.

    Args:
        parameters: of the stages played here, in the model's order.
        ranks: of the job.
        groups: of those that are sharded.
        bucket_cap_bytes, overlap, as_views: as of :class:`~.reducer.Reducer`.
        most_elements: as of :class:`~.piece_reducer.PieceReducer`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ranks: Ranks,
        groups: Sequence[ShardGroup] = (),
        *,
        bucket_cap_bytes: int,
        overlap: bool,
        as_views: bool,
        most_elements: int | None = None,
    ) -> None:
        self._ranks = ranks
        base = rule_of(nn.Parameter(torch.empty(0, device=CPU)), ranks)
        by_rule: dict[Rule, list[nn.Parameter]] = {base: []}
        sharded = {id(parameter) for group in groups for parameter in group.parameters}
        for parameter in parameters:
            if id(parameter) not in sharded:
                by_rule.setdefault(rule_of(parameter, ranks), []).append(parameter)
        self._reducers: list[Reducer] = []
        self._base: Reducer | None = None  # over all that have a batch of their own
        self._of: dict[int, Reducer] = {}
        self._by_axes: dict[tuple[str, ...], Collectives | None] = {}
        self._summed: list[nn.Parameter] = []
        self._aside: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._as_views = as_views
        for rule, members in sorted(by_rule.items()):  # in one order on all ranks: making them is collective
            collectives = self._over(rule.axes)
            if collectives is None and rule.divisor > 1 and members:
                collectives = OneMember()  # the part has seen the batches of all: only the mean is lacking
            if collectives is not None:
                reducer = Reducer(
                    members,
                    collectives,
                    divisor=rule.divisor,
                    bucket_cap_bytes=bucket_cap_bytes,
                    overlap=overlap,
                    as_views=as_views,
                    members=ranks.members(rule.axes),
                )
                self._reducers.append(reducer)
                if rule == base:
                    self._base = reducer
                self._of.update(dict.fromkeys(map(id, members), reducer))
                if collectives.size != rule.divisor:
                    self._summed += members
        self._add_pieces(groups, overlap, most_elements)

    def _add_pieces(self, groups: Sequence[ShardGroup], overlap: bool, most_elements: int | None) -> None:
        by_rule: dict[tuple[Rule, str], list[ShardGroup]] = {}
        for group in groups:
            rules = {rule_of(parameter, self._ranks) for parameter in group.parameters}
            assert len(rules) == 1  # a group's parameters lie alike over all axes
            by_rule.setdefault((rules.pop(), group.axis.name), []).append(group)
        for (rule, axis), members in sorted(by_rule.items(), key=lambda item: item[0]):
            names = tuple(axis.split("+"))
            # Of its own: a rank that fails starts them at another time than those of the other reducers.
            over = functools.partial(self._ranks.collectives, own=True)
            everybody, sharing, same = over((*names, *rule.axes)), over(names), over(rule.axes)
            assert everybody is not None and sharing is not None
            reducer = PieceReducer(
                members,
                everybody,
                sharing,
                same,
                divisor=rule.divisor,
                overlap=overlap,
                most_elements=most_elements,
                members=self._ranks.members((*names, *rule.axes)),
            )
            self._reducers.append(reducer)
            self._of.update(dict.fromkeys(map(id, reducer.parameters), reducer))
            self._summed += reducer.parameters

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._reducers)

    @property
    def largest_of_pieces(self) -> int:
        """Elements of the largest reduction of sharded gradients so far."""
        return max((r.largest for r in self._reducers if isinstance(r, PieceReducer)), default=0)

    @property
    def started_in_backward(self) -> int:
        """Buckets of the last step that overlapped."""
        return sum(reducer.started_in_backward for reducer in self._reducers)

    @property
    def hook(self) -> tuple[Any, Hook] | None:
        """What a script does in the place of the sum."""
        return self._reducers[0].hook if self._reducers else None

    @hook.setter
    def hook(self, hook: tuple[Any, Hook] | None) -> None:
        if hook is not None and any(isinstance(reducer, PieceReducer) for reducer in self._reducers):
            raise SMPError(
                "register_comm_hook: parameters are sharded over the replicas, whose gradients are scattered "
                "and not summed bucket by bucket: remove the hook, or do not shard"
            )
        for reducer in self._reducers:
            reducer.hook = hook

    def broadcast_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """The first replica gives its buffers to the others."""
        collectives = self._over(tuple(a for a in self._ranks.batch_axes if self._ranks.axes[a] > 1))
        if collectives is not None:
            broadcast_tensors(buffers, collectives, "buffers")

    def set_aside(self) -> None:
        """Before a step that may add to gradients which are reduced already: a mean of equal numbers is that
        number, but a sum of them is not, nor is a piece, so they are kept until :meth:`put_back`."""
        for parameter in self._summed:
            if parameter.grad is not None:
                is_view = self._as_views and not is_sharded(parameter)
                gradient = parameter.grad.clone() if is_view else parameter.grad
                self._aside.append((parameter, gradient))
                parameter.grad = None

    def refuse_more_passes(self) -> None:
        """After a backward whose gradients are reduced only by a later one.

        Raises:
            SMPError: they would be added to gradients that are reduced already.
        """
        if any(bool(gradient.any()) for _, gradient in self._aside):
            raise SMPError(
                "backward_passes_per_step above 1: gradients of parameters that are split over ranks have "
                "been reduced, and more would be added to them: call optimizer.zero_grad() after every "
                "reduction"
            )

    def put_back(self, *, failed: bool) -> None:
        """Adds what was set aside to the gradients again; after a step that failed nothing of it stays."""
        for parameter, gradient in self._aside:
            if failed:
                continue
            if parameter.grad is not None:
                with torch.no_grad():
                    gradient.add_(parameter.grad)  # into what a script may have kept, as autograd does
            parameter.grad = gradient
        self._aside = []

    def begin_step(self) -> None:
        for reducer in self._reducers:
            reducer.begin_step()

    def on_final(self, parameter: nn.Parameter) -> None:
        """The parameter's gradient is whole for this step."""
        reducer = self._of.get(id(parameter))
        if reducer is not None:
            reducer.on_final(parameter)

    def finish(self, *, failed: bool, said: int | None = None) -> bool:
        """As :meth:`Reducer.finish`, for all of them."""
        heard = [
            reducer.finish(failed=failed, said=said if reducer is self._base else None)
            for reducer in self._reducers
        ]
        return any(heard)

    @property
    def differs(self) -> bool:
        """Whether replicas turned out to have stepped otherwise, in the last :meth:`finish`."""
        return self._base is not None and self._base.differs

    def few_values(self) -> list[tuple[nn.Parameter, int]]:
        """The parameters that were compared, and the sums of their bits."""
        return [] if self._base is None else self._base.few_values()

    def _over(self, axes: tuple[str, ...]) -> Collectives | None:
        if axes not in self._by_axes:
            self._by_axes[axes] = self._ranks.collectives(axes)
        return self._by_axes[axes]
