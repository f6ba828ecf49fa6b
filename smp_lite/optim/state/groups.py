"""What is in the groups of a wrapped optimizer, and when.

A script sees the whole model's parameters in them, here and away, since it goes through them side by side
with lists of its own (slow weights, averages), by position. While the optimizer runs, or gives and takes its
state, those of this rank alone are there; and in the place of each one its stand-in, if it has one
(:mod:`.stand_ins`). The state of a parameter goes along, from it to its stand-in and back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...errors import SMPError
from ...nn.guarding import as_between_steps, as_ordinary, of_state, tensors_of
from ...nn.layout import is_sharded
from ...record.parameters.away import is_away
from .here import StateHere
from .split import piece_of_state
from .stand_ins import StandIns

if TYPE_CHECKING:
    from ...session import Session

__all__ = ["Groups"]


class Groups:
    """Of one optimizer of torch.

    Args:
        session: the job's, with a model.
        optimizer: whose groups they are.

    Attributes:
        stand_ins: what the optimizer steps instead of the model's parameters; None: these.
    """

    def __init__(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        self._session, self._optimizer = session, optimizer
        self.stand_ins: StandIns | None = None
        self._some_away = False
        self._whole: list[dict[str, list[Any]]] | None = None  # the lists that take_out() has taken out
        self._swapped = False  # whether stand-ins are in the lists
        # Until partition; with the objects themselves, so that their ids stay theirs.
        self._at_first = {id(p): (p, name) for name, p in session.model.module.named_parameters()}
        self._names: dict[int, str] = {}  # while it cuts the model

    # What there is ------------------------------------------------------------------------------------------

    def lists(self) -> list[dict[str, list[Any]]]:
        """Of each group what goes by parameters: all of them, also while the optimizer runs."""
        if self._whole is not None:
            return self._whole
        keys = ("params", "param_names")
        found = [{k: group[k] for k in keys if k in group} for group in self._optimizer.param_groups]
        if self._swapped and self.stand_ins is not None:
            parameter_of = self.stand_ins.parameter_of
            found = [{**lists, "params": [parameter_of(p) for p in lists["params"]]} for lists in found]
        return found

    def names(self) -> list[list[str | None]]:
        """For each group the model's names of its parameters, here and away; None: not the model's."""
        names = {id(parameter): name for name, parameter in self._session.model.module.named_parameters()}
        return [[names.get(id(parameter)) for parameter in lists["params"]] for lists in self.lists()]

    def positions(self, *, here_only: bool = True) -> list[list[int]]:
        """For each group the numbers, over all groups, of this rank's parameters, or of all.

        A parameter that a group lists twice (torch only warns) has its last number, as torch gives it.
        """
        found = []
        start = 0
        for lists in self.lists():
            params = lists["params"]
            number = {id(parameter): start + i for i, parameter in enumerate(params)}
            found.append([number[id(p)] for p in params if not (here_only and is_away(p))])
            start += len(params)
        return found

    def parameter_at(self, position: int) -> torch.Tensor:
        """The parameter with that number over all groups."""
        flat = (parameter for lists in self.lists() for parameter in lists["params"])
        return next(itertools.islice(flat, int(position), None))

    def stepped_at(self, position: int) -> torch.Tensor:
        """What the optimizer steps for the parameter with that number."""
        return self.stand_in_of(self.parameter_at(position))

    def stand_in_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the optimizer steps for a parameter: its stand-in, or itself."""
        return parameter if self.stand_ins is None else self.stand_ins.of(parameter)

    # Partition ----------------------------------------------------------------------------------------------

    def before_partition(self) -> None:
        """Notes the model's names: partition may make other objects of parameters to which there are weak
        references.

        Raises:
            SMPError: a script has exchanged a parameter since the optimizer was wrapped.
        """
        module = self._session.model.module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        for parameter in (p for lists in self.lists() for p in lists["params"]):
            _, name = self._at_first.get(id(parameter), (None, ""))
            if name and id(parameter) not in self._names:
                raise SMPError(
                    f"the optimizer has the parameter {name!r}, which is no longer in the model: it, or a "
                    "module around it, was exchanged or taken out after smp.DistributedOptimizer had "
                    "wrapped the optimizer, which in one process would go on with the old one, that the "
                    "model does not use. Change the model before the optimizer is built, or values in "
                    "place (parameter.copy_ under torch.no_grad(), load_state_dict)"
                )

    def after_partition(self) -> bool:
        """Takes the state of this rank's parameters; whether any is sharded."""
        optimizer = self._optimizer
        live = dict(self._session.model.module.named_parameters())
        for group in optimizer.param_groups:
            before = group["params"]
            names = [self._names.get(id(parameter)) for parameter in before]
            group["params"] = [
                p if name is None else live[name] for name, p in zip(names, before, strict=True)
            ]
            for old, new in zip(before, group["params"], strict=True):
                if old is not new or is_away(new):
                    optimizer.state.pop(old, None)
                elif is_sharded(new) and (state := optimizer.state.get(new)):
                    # It was whole until now, and so is its state.
                    optimizer.state[new] = piece_of_state(new, state)
        self._at_first.clear()
        self._names.clear()
        self._some_away = any(is_away(p) for lists in self.lists() for p in lists["params"])
        self.mark_state()
        if self._whole is not None:  # partitioned by a closure, in the midst of a step
            self._whole = None
            self.take_out()
        return any(map(is_sharded, live.values()))

    def mark_state(self) -> None:
        """Whoever asks for the state of another stage's parameter is told, and not that there is none."""
        if self._some_away and not isinstance(self._optimizer.state, StateHere):
            self._optimizer.state = StateHere(dict, self._optimizer.state)

    # Taking out and putting back ----------------------------------------------------------------------------

    def take_out(self) -> bool:
        """Parameters of other stages leave the groups; whether it was this call that did so."""
        if self._whole is None and self._session.num_stages > 1:
            whole = self.lists()
            for group, lists in zip(self._optimizer.param_groups, whole, strict=True):
                kept = [i for i, parameter in enumerate(lists["params"]) if not is_away(parameter)]
                if len(kept) < len(lists["params"]):
                    group.update({key: [items[i] for i in kept] for key, items in lists.items()})
            self._whole = whole
            return True
        return False

    def put_back(self) -> None:
        """The groups hold the whole model's parameters again."""
        self.swap_out()
        if self._whole is not None:
            for group, whole in zip(self._optimizer.param_groups, self._whole, strict=True):
                group.update(whole)
            self._whole = None
            self.mark_state()  # loading binds it anew

    def swap_in(self) -> bool:
        """Stand-ins take the places of their parameters; whether it was this call that did so."""
        if self.stand_ins is None or self._swapped:
            return False
        self._swap(self.stand_ins.of)
        self._swapped = True
        return True

    def swap_out(self) -> None:
        """Parameters are where their stand-ins were."""
        if self._swapped:
            assert self.stand_ins is not None
            self._swap(self.stand_ins.parameter_of)
            self._swapped = False

    def _swap(self, change: Any) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [change(parameter) for parameter in group["params"]]
        state = self._optimizer.state
        items = list(state.items())
        state.clear()
        for key, value in items:  # in the same order
            state[change(key) if isinstance(key, torch.Tensor) else key] = value

    # Pieces -------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, torch.Size]]:
        """What is a piece between steps, with the shape of its whole."""
        state = self._optimizer.state
        for lists in self.lists():
            for parameter in lists["params"]:
                if is_away(parameter):
                    continue
                yield from tensors_of([parameter], state)
                if self.stand_ins is not None and self.stand_ins.of(parameter) is not parameter:
                    stand_in = self.stand_ins.of(parameter)
                    if self.stand_ins.cuts(parameter):
                        for key in (parameter, stand_in):
                            yield from of_state(state.get(key), tuple(stand_in.shape), parameter.shape)

    @contextlib.contextmanager
    def as_between_steps(self) -> Iterator[None]:
        """Within: a script's own code runs in the midst of a step (a closure, a hook), and finds what it
        would between steps."""
        was_out, was_swapped = self._whole is not None, self._swapped
        self.put_back()
        try:
            with as_between_steps():
                yield
        finally:
            if was_out:
                self.take_out()
            if was_swapped:
                self.swap_in()

    @contextlib.contextmanager
    def here(self, *, stand_ins: bool = True) -> Iterator[None]:
        """Within: the groups hold this rank's parameters alone, and pieces are ordinary tensors.

        Args:
            stand_ins: they hold what the optimizer steps in the place of these.
        """
        took = self.take_out()
        swapped = stand_ins and self.swap_in()
        try:
            with as_ordinary(self.pieces):
                yield
        finally:
            if swapped:
                self.swap_out()
            if took:
                self.put_back()
