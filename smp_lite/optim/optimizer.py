"""``smp.DistributedOptimizer``: any torch optimizer, which steps this rank's parameters after partition.

Follows the SMP API reference ("smdistributed.modelparallel.torch.DistributedOptimizer"). Each rank keeps
optimizer state for its own stage only. Its groups go on holding all parameters, since scripts go through them
side by side with lists of their own (slow weights, averages), by position; only while it steps, or gives and
takes its state, do they hold those of this rank. State dicts name parameters by their position in the whole
model, as a plain optimizer's do, so a whole one (gathered over the mp group) loads into a plain optimizer and
the other way round.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import session as session_module
from ..errors import MissingAttribute, SMPError
from ..nn.guarding import as_ordinary
from ..nn.layout import is_sharded
from ..record.parameters.away import is_away, needed
from .checked_settings import CheckedSettings
from .closures import step_with_closure
from .inner import check_around, check_methods, torch_optimizer
from .names_of_fp16 import LOSS_SCALING, MISSING, NamesOfFP16
from .norms import refuse_inside_step
from .own_parameters import PARTIAL_KEY, check_mark, partial_mark
from .split_state import piece_of_state, state_part, whole_state
from .state_here import StateHere

_OWN = frozenset(
    [
        *("optimizer", "_torchs", "_session", "_names", "_whole", "_pending", "_some_away", "_step_took"),
        "_checked",
        "_opt_called",  # a learning rate scheduler's note
    ]
)
"""Attributes of a DistributedOptimizer; others are the inner optimizer's."""


class DistributedOptimizer(NamesOfFP16, torch.optim.Optimizer):
    """Wraps an optimizer that was built with the model's parameters.

    It is an ``Optimizer`` by type, so that learning rate schedulers accept it, but holds nothing of its own:
    parameter groups and state are the inner optimizer's.

    Args:
        optimizer: a ``torch.optim.Optimizer`` over parameters of the (wrapped or plain) model, or an object
            around one that has its methods (:class:`.inner.OptimizerLike`). Over several partitions it must
            treat each parameter by itself; see :mod:`.optimizer_check`.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: of fp16; without it they mean nothing, and
            scripts pass them all the same.

    Attributes:
        optimizer: the inner optimizer; what is not defined here is read from it and set on it.

    Raises:
        SMPError: there is no DistributedModel yet, or the optimizer cannot be used over several partitions.
        TypeError: it is no optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        **more_dynamic_loss_args: Any,
    ) -> None:
        session = session_module.current()
        if session.model is None:
            raise SMPError("wrap the model with smp.DistributedModel before the optimizer")
        if isinstance(optimizer, DistributedOptimizer):
            raise SMPError("the optimizer is a DistributedOptimizer already")
        if unknown := more_dynamic_loss_args.keys() - LOSS_SCALING:
            raise TypeError(
                f"smp.DistributedOptimizer: unknown argument {min(unknown)!r}; of loss scaling there are "
                f"{', '.join(sorted(LOSS_SCALING))}"
            )
        check_methods(optimizer)
        if session.unread_optimizer is not None:
            raise SMPError(
                f"resume_from_checkpoint found the optimizer's state, {session.unread_optimizer!r}, before "
                "there was an optimizer: call it after both wrappers exist, or with load_optimizer=False"
            )
        torchs = torch_optimizer(optimizer)
        self._checked: CheckedSettings | None = None
        if session.replica_size > 1:
            self._checked = CheckedSettings(torchs)
            check_around(optimizer, torchs)
        self.optimizer = optimizer
        self._torchs = torchs
        self._session = session
        self._pending: dict[str, Any] | None = None
        self._some_away = False  # whether parameters of the groups lie on other ranks
        self._step_took = False  # whether the inner optimizer's step has taken the lists out
        self._whole: list[dict[str, list[Any]]] | None = None  # the lists that _here() has taken out
        # Until partition, which may make other objects of parameters to which there are weak references.
        names = session.model.module.named_parameters()
        self._names: dict[int, str] = {id(parameter): name for name, parameter in names}
        session.optimizer = self
        if session.model.partitioned:
            self.after_partition()

    def is_around(self, optimizer: Any) -> bool:
        """Whether it is the one that this wraps, or that is inside."""
        return optimizer is self.optimizer or optimizer is self._torchs

    @property
    def names_in_groups(self) -> list[list[str | None]]:
        """For each group the model's names of its parameters, here and away; None: not the model's."""
        names = {id(parameter): name for name, parameter in self._session.model.module.named_parameters()}
        return [[names.get(id(parameter)) for parameter in lists["params"]] for lists in self._lists()]

    def _lists(self) -> list[dict[str, list[Any]]]:
        """Of each group what goes by parameters: all of them, also while it steps."""
        if self._whole is not None:
            return self._whole
        keys = ("params", "param_names")
        return [{key: group[key] for key in keys if key in group} for group in self._torchs.param_groups]

    def _positions(self) -> list[list[int]]:
        """For each group the numbers, over all groups, of this rank's parameters."""
        found = []
        start = 0
        for lists in self._lists():
            params = lists["params"]
            found.append([start + i for i, parameter in enumerate(params) if not is_away(parameter)])
            start += len(params)
        return found

    def _parameter_at(self, position: int) -> torch.Tensor:
        """The parameter with that number over all groups."""
        flat = (parameter for lists in self._lists() for parameter in lists["params"])
        return next(itertools.islice(flat, int(position), None))

    def after_partition(self) -> None:
        """Keeps the state of this rank's parameters; called once by the model."""
        model = self._session.model
        assert model is not None
        live = dict(model.module.named_parameters())
        for group in self._torchs.param_groups:
            before = group["params"]
            names = [self._names.get(id(parameter)) for parameter in before]
            group["params"] = [
                p if name is None else live[name] for name, p in zip(names, before, strict=True)
            ]
            for old, new in zip(before, group["params"], strict=True):
                if old is not new or is_away(new):
                    self._torchs.state.pop(old, None)
                elif is_sharded(new) and (state := self._torchs.state.get(new)):
                    # It was whole until now, and so is its state.
                    self._torchs.state[new] = piece_of_state(new, state)
        self._names.clear()
        if self._checked is not None and any(map(is_sharded, live.values())):
            self._checked = CheckedSettings(self._torchs)
        self._some_away = any(is_away(p) for lists in self._lists() for p in lists["params"])
        self._mark_state()
        if self._whole is not None:  # partitioned by a closure, in the midst of a step
            self._whole = None
            self._take_out()
        # For who calls the inner optimizer's step(), as wrappers around optimizers do.
        self._torchs.register_step_pre_hook(lambda *_: self._before_step())
        self._torchs.register_step_post_hook(lambda *_: self._after_step())

    def _before_step(self) -> None:
        # A step that has failed has left them out.
        self._step_took = self._take_out() or self._step_took

    def _after_step(self) -> None:
        if self._step_took:
            self._step_took = False
            self._put_back()

    def _take_out(self) -> bool:
        """Whether it was this call that did so."""
        if self._whole is None and self._session.num_stages > 1:
            whole = self._lists()
            for group, lists in zip(self._torchs.param_groups, whole, strict=True):
                kept = [i for i, parameter in enumerate(lists["params"]) if not is_away(parameter)]
                if len(kept) < len(lists["params"]):
                    group.update({key: [items[i] for i in kept] for key, items in lists.items()})
            self._whole = whole
            return True
        return False

    def _put_back(self) -> None:
        if self._whole is not None:
            for group, whole in zip(self._torchs.param_groups, self._whole, strict=True):
                group.update(whole)
            self._whole = None
            self._mark_state()  # loading binds it anew

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Within: the groups hold this rank's parameters alone, and pieces are ordinary tensors."""
        took = self._take_out()
        try:
            members = [parameter for group in self._torchs.param_groups for parameter in group["params"]]
            with as_ordinary(members):
                yield
        finally:
            if took:
                self._put_back()

    # The optimizer's own methods ----------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._torchs.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._torchs.state

    @state.setter
    def state(self, value: Any) -> None:
        self._torchs.state = value
        self._mark_state()

    def _mark_state(self) -> None:
        """Whoever asks for the state of another stage's parameter is told, and not that there is none."""
        if self._some_away and not isinstance(self._torchs.state, StateHere):
            self._torchs.state = StateHere(dict, self._torchs.state)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._torchs.defaults

    # What a GradScaler leaves here for an optimizer that unscales by itself (fused=True).

    @property
    def grad_scale(self) -> Any:
        return self.optimizer.grad_scale  # type: ignore[attr-defined]

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        if "grad_scaler" in inspect.signature(self.optimizer.step).parameters:
            raise SMPError(
                f"{type(self.optimizer).__name__} takes the GradScaler itself (step has an argument "
                "grad_scaler) and would look for overflows in one stage only: use an optimizer of torch.optim"
            )
        self.optimizer.grad_scale = value  # type: ignore[attr-defined]

    @grad_scale.deleter
    def grad_scale(self) -> None:
        del self.optimizer.grad_scale  # type: ignore[attr-defined]

    @property
    def found_inf(self) -> Any:
        return self.optimizer.found_inf  # type: ignore[attr-defined]

    @found_inf.setter
    def found_inf(self, value: Any) -> None:
        self.optimizer.found_inf = value  # type: ignore[attr-defined]

    @found_inf.deleter
    def found_inf(self) -> None:
        del self.optimizer.found_inf  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; only before partition, where all ranks see the same parameters."""
        assert self._session.model is not None
        if self._session.model.partitioned:
            raise SMPError("add_param_group after partition: add the group before the first step")
        self.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """One optimizer step; on a rank whose stage owns no parameters only the closure is called.

        With a closure it is collective over all ranks, see :func:`.closures.step_with_closure`.
        """
        refuse_inside_step(self._session, "optimizer.step()")
        if self._checked is not None:
            self._checked.before_step(self._torchs)
        with self._here():
            has_parameters = any(group["params"] for group in self._torchs.param_groups)
            self._check_options()
            if closure is not None:
                result = step_with_closure(
                    self._session, self.optimizer, closure, has_parameters=has_parameters
                )
            else:
                result = self.optimizer.step() if has_parameters else None
        if self._checked is not None:
            self._checked.after_step(self._torchs)
        return result

    def _check_options(self) -> None:
        """A rate made of one stage's gradients is a number on that stage's rank alone."""
        for place, group in enumerate(self._torchs.param_groups):
            for key, value in group.items():
                if is_away(value):
                    raise needed(f"optimizer.step() needs param_groups[{place}][{key!r}]", [value])

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Clears the gradients; ``set_to_none``: None: as the inner optimizer does by itself."""
        step = self._session.step
        if step is not None and (step.microbatch_index > 0 or step.has_recorded_backward):
            raise SMPError(
                "optimizer.zero_grad() was called inside an smp.step after its first microbatch or backward: "
                "call it before the step"
            )
        with self._here():
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)
        if set_to_none or (set_to_none is None and getattr(self.optimizer, "set_grad_none", True)):
            # Zeros stay: their own rank has made them.
            for lists in self._lists():
                for parameter in lists["params"]:
                    if is_away(parameter):
                        parameter.grad = None

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part, with parameters numbered as in the whole model; marked partial."""
        if self._pending is not None:
            raise SMPError(
                "the optimizer's state was loaded and waits for the first step, which puts it in place: run "
                "a step before asking for the state"
            )
        with self._here():
            state = self.optimizer.state_dict()
        if self._session.model.partitioned and "param_groups" in state:
            flat = [position for order in self._positions() for position in order]
            renumber = dict(enumerate(flat))
            state = {
                "state": {renumber[i]: value for i, value in state["state"].items()},
                "param_groups": [
                    {**group, "params": [renumber[i] for i in group["params"]]}
                    for group in state["param_groups"]
                ],
            }
        return {**state, PARTIAL_KEY: partial_mark(self._session)}

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The whole state. Collective over the mp group.

        Args:
            gather_to_rank0: only mp rank 0 gets it; the others get ``{}``.
        """
        local = self.local_state_dict()
        local.pop(PARTIAL_KEY)
        if "state" in local:
            local["state"] = {
                i: whole_state(self._parameter_at(i), value) for i, value in local["state"].items()
            }
        if "param_groups" not in local:
            if self._session.replica_size == 1:
                return local
            raise SMPError(
                f"{type(self.optimizer).__name__}.state_dict() is not that of an optimizer of torch, so the "
                "stages' parts cannot be put together: save local_state_dict()"
            )
        world = self._session.world
        if world is None or not self._session.model.partitioned:
            return local if world is None or not gather_to_rank0 or world.group_rank("MP") == 0 else {}
        collect = world.gather if gather_to_rank0 else world.exchange
        parts = collect(_to_cpu(local), "PP", "optimizer.state_dict")
        if parts is None or (gather_to_rank0 and world.group_rank("MP") != 0):
            return {}
        state: dict[int, Any] = {}
        for part in parts:
            state.update(part["state"])
        groups = []
        start = 0
        for number, lists in enumerate(self._lists()):
            size = len(lists["params"])
            # What an optimizer counts for a group, it counts where the group has parameters.
            of_parts = [part["param_groups"][number] for part in parts]
            group = next((found for found in of_parts if found["params"]), of_parts[0])
            groups.append({**group, **lists, "params": list(range(start, start + size))})
            start += size
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any], gather_if_shard: bool = True) -> None:
        """Loads a whole state, or this rank's own part of the same partition; also before partition.

        Before partition, which parameters a part is for is not known yet: its state waits, but the settings
        of its groups count at once, so that learning rate schedulers built next start from them.

        Args:
            state_dict: from :meth:`state_dict`, :meth:`local_state_dict` or a plain optimizer.
            gather_if_shard: of sharded optimizer state; means nothing without it.

        Raises:
            ValueError: it is for other parameter groups, or a part of another partition.
        """
        model = self._session.model
        assert model is not None
        check_mark(self._session, state_dict.get(PARTIAL_KEY), "optimizer.load_state_dict")
        if "param_groups" not in state_dict:
            self._load_own(state_dict)
            return
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        sizes = [len(positions) for positions in saved]
        own_sizes = [len(lists["params"]) for lists in self._lists()]
        if len(sizes) != len(own_sizes):
            raise ValueError(
                f"optimizer.load_state_dict: {len(sizes)} parameter groups, but the optimizer has "
                f"{len(own_sizes)}: build it with the same groups"
            )
        is_part = bool(state_dict.get(PARTIAL_KEY)) and sizes != own_sizes
        if not is_part and sizes != own_sizes:
            raise ValueError(
                f"optimizer.load_state_dict: parameter groups of sizes {sizes}, but the optimizer's have "
                f"{own_sizes}: it was saved from an optimizer of another model"
            )
        if model.partitioned:
            self._load(state_dict, is_part)
        elif not is_part:
            state = state_dict["state"]
            if not state_dict.get(PARTIAL_KEY):
                state = {i: state_part(self._parameter_at(i), value) for i, value in state.items()}
            self.optimizer.load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
        else:
            for group, settings in zip(self._torchs.param_groups, state_dict["param_groups"], strict=True):
                kept = settings.keys() - {"params", "param_names"}
                group.update({key: settings[key] for key in kept})
            self._pending = {"state": state_dict["state"], "positions": saved}

    def _load_own(self, state: dict[str, Any]) -> None:
        """Of an object that is no optimizer of torch, whose state has a form of its own."""
        if not self._session.model.partitioned:
            self._pending = state
            return
        with self._here():
            self.optimizer.load_state_dict({key: value for key, value in state.items() if key != PARTIAL_KEY})

    def load_pending(self) -> None:
        """Puts a part that was loaded before partition in place; called once by the model."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if "positions" not in pending:
                self._load_own(pending)
                return
            with self._here():
                own = self.optimizer.state_dict()["param_groups"]
            now = [{**g, "params": positions} for g, positions in zip(own, pending["positions"], strict=True)]
            self._load({"state": pending["state"], "param_groups": now, PARTIAL_KEY: True}, is_part=True)

    def _load(self, state_dict: dict[str, Any], is_part: bool) -> None:
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        order = self._positions()
        if is_part and saved != order:
            raise ValueError(
                f"optimizer.load_state_dict: this rank has the parameters {order} (positions in the "
                f"whole model), but the part is for {saved}: it was saved on another rank or with another "
                "partition. Load the whole state_dict() instead"
            )
        flat = [position for positions in order for position in positions]
        number = {position: i for i, position in enumerate(flat)}
        with self._here():
            self._load_here(state_dict, number)

    def _load_here(self, state_dict: dict[str, Any], number: dict[int, int]) -> None:
        start = 0
        local_groups = []
        for group, own in zip(state_dict["param_groups"], self._torchs.param_groups, strict=True):
            count = len(own["params"])
            names = {"param_names": own["param_names"]} if "param_names" in own else {}
            local_groups.append({**group, **names, "params": list(range(start, start + count))})
            start += count
        state = {number[int(i)]: value for i, value in state_dict["state"].items() if int(i) in number}
        if not state_dict.get(PARTIAL_KEY):
            there = {place: position for position, place in number.items()}
            state = {i: state_part(self._parameter_at(there[i]), value) for i, value in state.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": local_groups})

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_torchs"):  # not set yet: unpickling, copying
            raise AttributeError(name)
        if name in MISSING and not hasattr(self.optimizer, name):
            raise MissingAttribute(f"optimizer.{name} belongs to {MISSING[name].says}")
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_cpu(item) for item in value)
    return value
