"""``smp.DistributedOptimizer``: any torch optimizer, which steps this rank's parameters after partition.

Follows the SMP API reference ("smdistributed.modelparallel.torch.DistributedOptimizer"). Each rank keeps
optimizer state for its own stage only, and with ``shard_optimizer_state`` for its piece of that. What is in
the groups when is :mod:`.state.groups`'s business; master weights and pieces are :mod:`.state.stand_ins`;
state dicts :mod:`.state.dicts`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import session as session_module
from ..errors import MissingAttribute, SMPError
from ..nn.guarding import as_ordinary
from ..nn.replaced import refuse_replaced
from ..record.parameters.away import is_away, needed
from .checked_settings import CheckedSettings
from .closures import step_with_closure, with_hooks
from .features import Features
from .half.loss_scaler import ARGUMENTS
from .inner import check_around, check_copies, check_methods, torch_optimizer
from .names_of_fp16 import MISSING, NamesOfFP16
from .norms.whole_model import refuse_inside_step
from .own_hooks import OwnHooks
from .sharded_names import SHARDED_NAMES, ShardedNames
from .state.following import follow_parameters
from .state.groups import Groups
from .state.loading import OptimizerState

_OWN = frozenset(
    [
        *(
            "optimizer",
            "_torchs",
            "_session",
            "_groups",
            "_features",
            "_state",
            "_step_took",
            "_step_swapped",
        ),
        *("_checked", "_sharding", "_own_hooks", "_between", "_alone", "_is_stepping"),
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
        static_loss_scale: of fp16; None: 1. Without fp16 it and those below mean nothing, and scripts pass
            them all the same.
        dynamic_loss_scale: a scale that falls and grows by itself, whatever ``static_loss_scale`` says.
        dynamic_loss_args: of :class:`.half.loss_scaler.DynamicLossScaler`; they may also stand for
        themselves.

    Attributes:
        optimizer: the inner optimizer; what is not defined here is read from it and set on it.

    Raises:
        SMPError: there is no DistributedModel yet, or the optimizer cannot be used over several partitions,
            with fp16, bf16 or shard_optimizer_state; it was made before the model was split, and holds
            parameters that split layers have replaced.
        TypeError: it is no optimizer, or an argument is unknown.
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
        if unknown := more_dynamic_loss_args.keys() - ARGUMENTS:
            raise TypeError(
                f"smp.DistributedOptimizer: unknown argument {min(unknown)!r}; of loss scaling there are "
                f"{', '.join(sorted(ARGUMENTS))}"
            )
        check_methods(optimizer)
        if session.unread_optimizer is not None:
            raise SMPError(
                f"resume_from_checkpoint found the optimizer's state, {session.unread_optimizer!r}, before "
                "there was an optimizer: call it after both wrappers exist, or with load_optimizer=False"
            )
        torchs = torch_optimizer(optimizer)
        refuse_replaced("smp.DistributedOptimizer", torchs.param_groups)
        if session.num_stages > 1 and not session.model.partitioned:
            check_copies(torchs, session.model.module)
        groups = Groups(session, torchs)
        features = Features(session, optimizer, groups)
        features.set_scaling(static_loss_scale, dynamic_loss_scale, dynamic_loss_args, more_dynamic_loss_args)
        self._checked: CheckedSettings | None = None
        if session.replica_size > 1:
            self._checked = CheckedSettings(torchs)
            check_around(optimizer, torchs)
        self.optimizer = optimizer
        self._torchs = torchs
        self._session = session
        self._groups, self._features = groups, features
        self._state = OptimizerState(
            session,
            optimizer,
            groups,
            lambda: torchs.param_groups,
            features.half,
            features.scaling,
            features.axis,
        )
        self._step_took = self._step_swapped = False  # whether the inner optimizer's step has done so
        self._own_hooks: OwnHooks | None = None
        self._is_stepping = False  # whether step() is under way, and the inner optimizer is not called alone
        self._between = contextlib.ExitStack()  # while hooks of a script run
        self._alone = contextlib.ExitStack()  # while the inner optimizer steps that was called alone
        self._sharding = ShardedNames(session, groups)
        session.add_optimizer(self)
        session.between_steps.compare(torchs, in_stages=self._is_alike_in_stages())
        if session.model.partitioned:
            self.after_partition()
        else:
            session.model.partition_for_optimizer()

    def _is_alike_in_stages(self) -> bool:
        """Whether ranks of all stages have the same groups: those of one rank's own parameters
        (``model.local_parameters()``) are other ones on each."""
        model = self._session.model
        given = {id(parameter) for group in self._torchs.param_groups for parameter in group["params"]}
        has_all = all(id(p) in given for p in model.module.parameters() if p.requires_grad)
        return has_all or not model.partitioned or self._session.num_stages == 1

    def is_around(self, optimizer: Any) -> bool:
        """Whether it is the one that this wraps, or that is inside."""
        return optimizer is self.optimizer or optimizer is self._torchs

    @property
    def names_in_groups(self) -> list[list[str | None]]:
        """For each group the model's names of its parameters, here and away; None: not the model's."""
        return self._groups.names()

    @property
    def positions_here(self) -> list[list[int]]:
        """For each group the numbers, over all groups, of this rank's parameters."""
        return self._groups.positions()

    @property
    def has_masters(self) -> bool:
        """Whether it steps master weights: in half precision."""
        return self._features.half is not None

    @property
    def is_sharded(self) -> bool:
        """Whether the replicas keep its state in parts, with ``shard_optimizer_state``."""
        return self._features.axis is not None

    @property
    def sharding(self) -> ShardedNames:
        """What it says and does under sharded data parallelism."""
        return self._sharding

    @property
    def own_mark(self) -> bool | str:
        """What marks a state dict of this rank's own part."""
        return self._state.own_mark

    def stand_in_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the inner optimizer steps for a parameter of the model, after partition.

        A float32 master in half precision, this rank's piece with sharded optimizer state; the parameter
        itself if there is neither.
        """
        return self._groups.stand_in_of(parameter)

    def steps_in_place(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the stand-ins of this optimizer."""
        return self._groups.stand_ins is not None and self._groups.stand_ins.holds(tensor)

    def whole_gradient_of(self, stand_in: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a stand-in in the shape of its parameter; collective where it is a piece."""
        assert self._groups.stand_ins is not None
        return self._groups.stand_ins.whole_gradient(stand_in)

    def before_partition(self) -> None:
        """The model is about to be cut; called by it."""
        self._groups.before_partition()

    def after_partition(self) -> None:
        """Keeps the state of this rank's parameters; called once by the model."""
        follow_parameters(self._torchs)
        any_sharded = self._groups.after_partition()
        if self._checked is not None and any_sharded:
            self._checked = CheckedSettings(self._torchs)
        self._features.after_partition(self._torchs)
        # For who calls the inner optimizer's step(), as wrappers around optimizers do.
        self._own_hooks = OwnHooks(self._torchs, lambda *_: self._before_step(), lambda _: self._after_step())

    def before_hooks(self) -> None:
        """The inner optimizer's step begins: a script's hooks find what there is between steps."""
        self.give_up()
        if self._own_hooks is not None:
            self._own_hooks.place(self._torchs)
            self._between.enter_context(self._as_between_steps())

    def after_hooks(self) -> None:
        """Its step has ended, and so have they."""
        self._between.close()

    def give_up(self) -> None:
        """What a step that has failed has left open."""
        self._between.close()
        self._alone.close()

    def _before_step(self) -> None:
        self._between.close()
        if not self._is_stepping:
            self._alone.enter_context(as_ordinary(self._groups.pieces))
        self._sharding.before_inner_step()
        # A step that has failed has left them out.
        self._step_took = self._groups.take_out() or self._step_took
        if self._groups.stand_ins is not None:
            self._features.before_inner_step(self._state)
            self._step_swapped = self._groups.swap_in() or self._step_swapped

    def _after_step(self) -> None:
        if self._step_swapped:
            self._step_swapped = False
            self._groups.swap_out()
            self._features.after_inner_step()
        if self._step_took:
            self._step_took = False
            self._groups.put_back()
        self._alone.close()
        self._between.enter_context(self._as_between_steps())

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
        self._groups.mark_state()

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
        """Adds a group; only before partition, where all ranks see the same parameters. (A model of one
        partition is partitioned when it is wrapped.)"""
        assert self._session.model is not None
        if self._session.model.partitioned:
            raise SMPError(
                "add_param_group after partition: give every group to the optimizer before "
                "smp.DistributedOptimizer wraps it, also what is frozen (requires_grad=False) till later"
            )
        if isinstance(param_group.get("params"), list | tuple):
            refuse_replaced("optimizer.add_param_group", [param_group])
        self.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """One optimizer step; on a rank whose stage owns no parameters only the closure is called.

        With a closure it is collective over all ranks, see :func:`.closures.step_with_closure`; and so it is
        in fp16, where the step is left out on all of them (and None returned) if a gradient overflowed on
        any.
        """
        refuse_inside_step(self._session, "optimizer.step()")
        between_steps = self._session.between_steps
        between_steps.note("optimizer.step()")
        before = self._versions()
        try:
            return self._step(closure)
        except BaseException:  # out of memory, say: this rank's part of the model is not what the others' is
            call = "an optimizer.step() that failed"
            if self._versions() != before:  # nor are all ranks' together what one process would have left
                stages = ", ".join(map(str, self._session.stages_here()))
                call += f" when it had changed parameters of stage {stages}"
            between_steps.note(call)
            raise

    def _versions(self) -> int:
        """A number that grows when a parameter that is here changes."""
        with torch._C.DisableTorchFunction():
            return sum(p._version for group in self._torchs.param_groups for p in group["params"])

    def _step(self, closure: Callable[[], float] | None) -> Any:
        if self._checked is not None:
            self._checked.before_step(self._torchs)
        if not self._features.may_step(self._state, closure):
            self._sharding.overflowed()
            return None
        if closure is not None:
            closure = self._guarding(closure)
        closure = self._sharding.before_step(self._torchs, closure)
        self.give_up()  # of a step of the inner optimizer's alone
        with self._session.model.parts_as_ordinary(), self._groups.here(stand_ins=False):
            self._is_stepping = True
            has_parameters = any(group["params"] for group in self._torchs.param_groups)
            try:
                self._check_options()
                if closure is not None:
                    result = step_with_closure(
                        self._session, self.optimizer, closure, has_parameters=has_parameters
                    )
                elif has_parameters:
                    result = self.optimizer.step()
                else:
                    result = with_hooks(self.optimizer, lambda: None)
            finally:
                self._is_stepping = False
                self.give_up()
                self._groups.swap_out()
                self._step_swapped = False
        if self._checked is not None:
            self._checked.after_step(self._torchs)
        return result

    @contextlib.contextmanager
    def _as_between_steps(self) -> Iterator[None]:
        """Within: a script's own code runs (a closure, a hook), and finds what there is between steps."""
        with self._groups.as_between_steps(), self._session.model.parts_as_between_steps():
            yield

    def _guarding(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with self._as_between_steps():
                return closure()

        return evaluate

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
        if step is not None and self._session.cfg.static_mode:
            raise SMPError(
                "static_mode: True, but the step function calls optimizer.zero_grad(), which a replayed step "
                "would not do again: call it before the step"
            )
        self._session.between_steps.note("optimizer.zero_grad()")
        with self._groups.here(stand_ins=False):
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)
        self._features.drop_gradients()
        if set_to_none or (set_to_none is None and getattr(self.optimizer, "set_grad_none", True)):
            # Zeros stay: their own rank has made them.
            for lists in self._groups.lists():
                for parameter in lists["params"]:
                    if is_away(parameter):
                        parameter.grad = None

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part, with parameters numbered as in the whole model; marked partial.

        Args:
            gather_if_shard: of sharded optimizer state: on rdp rank 0 ``state`` is a list of the shards of
                all rdp ranks, which is collective over them; on the others, and with False, the own shard.
        """
        return self._state.local(gather_if_shard=gather_if_shard)

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The whole state. Collective over the mp group, and over all ranks with sharded optimizer state.

        Args:
            gather_to_rank0: only mp rank 0 gets it; the others get ``{}``.
        """
        return self._state.whole(gather_to_rank0=gather_to_rank0)

    def load_state_dict(self, state_dict: dict[str, Any], gather_if_shard: bool = True) -> None:
        """Loads a whole state, or this rank's own part of the same partition; also before partition.

        Before partition, which parameters a part is for is not known yet: its state waits, but the settings
        of its groups count at once, so that learning rate schedulers built next start from them.

        Args:
            state_dict: from :meth:`state_dict`, :meth:`local_state_dict` or a plain optimizer.
            gather_if_shard: as it was saved. What was saved tells by itself: of several shards a rank takes
                its own.

        Raises:
            ValueError: it is for other parameter groups, or a part of another partition.
            SMPError: it is of a job in another precision.
        """
        self._state.load(state_dict)

    def load_pending(self) -> None:
        """Puts a state that was loaded before partition in place; called once by the model."""
        self._state.load_pending()

    def check_state_readable(self) -> None:
        """
        Raises:
            SMPError: the first step has still to put the state in place, or to make it.
        """
        self._state.check_readable()

    @property
    def waits_for_state(self) -> bool:
        """Whether a state was loaded that the first step puts in place."""
        return self._state.pending is not None

    def wait_for_state(self, waits: bool) -> None:
        """The first step reads the state, and loads it; or it has done so."""
        self._state.pending = {} if waits else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise SMPError(
            "copy.deepcopy of an smp.DistributedOptimizer: it belongs to the ranks' parameters and exists "
            "once. Keep copy.deepcopy(optimizer.state_dict()) instead, and load it"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_torchs"):  # not set yet: unpickling, copying
            raise AttributeError(name)
        if name in SHARDED_NAMES and not hasattr(self.optimizer, name):
            return self._sharding.value(name)
        if name in MISSING and not hasattr(self.optimizer, name):
            raise MissingAttribute(f"optimizer.{name} belongs to {MISSING[name]}")
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"
