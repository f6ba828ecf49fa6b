"""fp16, bf16 and sharded optimizer state, as one wrapped optimizer has them.

What becomes of a step: the stand-ins follow the model's parameters, get their gradients, are stepped, and
give their values back. In fp16 gradients carry the loss scale; all ranks agree whether any overflowed, and
then leave the step out. They agree over the whole job: replicas hold the same gradients, but a script may
have changed them on one, and replicas that disagreed would drift apart.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..comm.groups.axis import Axis
from ..errors import SMPError
from ..nn.guarding import unguarded
from ..record.code.source_line import warn_once_at_user_line
from ..record.parameters.away import is_away
from ..session import Session
from .half.loss_scaler import scaler_of
from .half.loss_scaling import LossScaling
from .half.types import half_type
from .norms.whole_model import clip_grad_norm_
from .optimizer_check import check_pieces
from .state.groups import Groups
from .state.loading import OptimizerState
from .state.split import piece_of_state
from .state.stand_ins import StandIns

__all__ = ["Features"]

_Seen = list[tuple["weakref.ref[torch.Tensor]", int]]
"""Gradients, with how often each had been changed."""


class Features:
    """Of one optimizer.

    Args:
        session: the job's.
        optimizer: the inner one.
        groups: of it.

    Attributes:
        half: the type of the model's parameters; None: they have their own.
        axis: the ranks over which the optimizer's state is sharded; None: it is not.
        scaling: of fp16.

    Raises:
        SMPError: the optimizer cannot be used with what is asked for.
    """

    def __init__(self, session: Session, optimizer: Any, groups: Groups) -> None:
        self._session, self._groups = session, groups
        self.half = half_type(session.cfg)
        self.axis = _sharding_axis(session)
        self.scaling: LossScaling | None = None
        self._brought: _Seen | None = None
        self._stepped_with: _Seen | None = None
        self._was_finite = True
        self._is_clipped = False
        self._may_step = False
        self._swapped_to_load = False
        keys = [key for key in ("fp16", "bf16", "shard_optimizer_state") if getattr(session.cfg, key)]
        if self.half is not None or self.axis is not None:
            _check_optimizer(optimizer, " and ".join(keys))
        if self.axis is not None:
            check_pieces(optimizer)

    @property
    def are_on(self) -> bool:
        """Whether the optimizer steps anything but the model's own parameters."""
        return self.half is not None or self.axis is not None

    def set_scaling(
        self, static: float | None, dynamic: bool, args: Mapping[str, Any] | None, more: Mapping[str, Any]
    ) -> None:
        """Arguments as of ``DistributedOptimizer``; without fp16 they mean nothing."""
        if self.half is torch.float16:
            self.scaling = LossScaling(
                scaler_of(static, dynamic, args, more), bool(dynamic), self._have_gradients
            )

    def _members(self) -> list[list[torch.Tensor]]:
        """For each group the model's parameters that live here."""
        return [[p for p in lists["params"] if not is_away(p)] for lists in self._groups.lists()]

    def _have_gradients(self) -> bool:
        members = [parameter for group in self._members() for parameter in group]
        with unguarded():
            return any(p.grad is not None and bool(p.grad.any()) for p in members)

    def after_partition(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the stand-ins, and takes over what state there is."""
        if not self.are_on:
            return
        model = self._session.model
        own = frozenset(map(id, model.module.parameters()))
        stand_ins = StandIns(self._members(), own, self.half, self.axis)
        for parameter, stand_in in stand_ins:
            if state := optimizer.state.get(parameter):
                if stand_ins.cuts(parameter):
                    state = piece_of_state(stand_in, state)
                state = {
                    key: value.to(stand_in.dtype) if _is_like(value, stand_in, parameter) else value
                    for key, value in state.items()
                }
                if isinstance(optimizer, torch.optim.Adagrad) and not state["step"]:
                    # Made with the optimizer, in the parameter's type, which may have rounded it.
                    state["sum"].fill_(optimizer.defaults["initial_accumulator_value"])
                optimizer.state[parameter] = state
        self._groups.stand_ins = stand_ins
        model.own_parameters.know_stand_ins(stand_ins)
        if self.scaling is not None:
            model.runtime.scaling = self.scaling
        # For who loads into the inner optimizer itself: torch would round a state to its parameter's type.
        optimizer.register_load_state_dict_pre_hook(self._before_loading)
        optimizer.register_load_state_dict_post_hook(self._after_loading)

    def _before_loading(self, *_: Any) -> None:
        self._swapped_to_load = self._groups.swap_in()

    def _after_loading(self, *_: Any) -> None:
        if self._swapped_to_load:
            self._groups.swap_out()

    # Gradients ----------------------------------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Those of the parameters were cleared."""
        self._brought, self._is_clipped = None, False
        if self._groups.stand_ins is not None:
            self._groups.stand_ins.drop_gradients()

    def bring(self) -> bool:
        """Puts gradients on the stand-ins, unless they are there; False: in fp16 one was not finite.

        In fp16 it is collective over all ranks, which bring anew what has changed on any of them.

        Raises:
            SMPError: gradients have changed since they were clipped, or cannot be brought; in fp16 on all
                ranks, whoever has them.
        """
        stand_ins = self._groups.stand_ins
        assert stand_ins is not None
        members = [parameter for group in self._members() for parameter in group]
        is_new, is_finite = True, True
        failure: SMPError | None = None
        try:
            is_new = not self._are_brought(members)
            if is_new:
                self._check_stand_ins(members)
            is_finite = self.scaling is None or stand_ins.are_finite()
        except SMPError as error:  # raised when the others have heard of it
            failure = error
        if self.scaling is not None:
            is_new, is_finite = self._agreed(is_new, is_finite, failure)
        if failure is not None:
            raise failure
        if not is_new:
            return self._was_finite
        self._was_finite = is_finite
        if self._was_finite:
            stand_ins.bring_gradients(1.0 if self.scaling is None else self.scaling.scale_of_gradients)
        else:
            stand_ins.drop_gradients()
        with unguarded():
            gradients = [p.grad for p in members if p.grad is not None]
            self._brought = [(weakref.ref(gradient), gradient._version) for gradient in gradients]
        return self._was_finite

    def _check_stand_ins(self, members: Iterable[torch.Tensor]) -> None:
        """Raises SMPError where a parameter has a gradient and no stand-in that it could be put on."""
        for parameter in members:
            if (
                parameter.grad is not None
                and parameter.requires_grad
                and self._groups.stand_in_of(parameter) is parameter
            ):
                raise self._without_stand_in(parameter)

    def _without_stand_in(self, parameter: torch.Tensor) -> SMPError:
        assert self._groups.stand_ins is not None
        named = self._session.model.module.named_parameters()
        name = next((name for name, each in named if each is parameter), None)
        what = f"a parameter of shape {list(parameter.shape)}" if name is None else f"the parameter {name!r}"
        if not self._groups.stand_ins.knew(parameter):
            return SMPError(
                f"{what} has come to the optimizer (add_param_group, param_groups) after master weights and "
                "shards were made: give every group to the optimizer before smp.DistributedOptimizer wraps "
                "it; one that is to learn later can have lr=0 until then"
            )
        return SMPError(
            f"{what} trains now that was frozen when master weights and shards were made: set requires_grad "
            "before smp.DistributedOptimizer and the first step, and freeze it after"
        )

    def _follow_hooks(self) -> None:
        """Hooks before the step may have changed the gradients that it has already.

        Raises:
            SMPError: and they are gradients of masters.
        """
        members = [parameter for group in self._members() for parameter in group]
        if self._stepped_with is None or _are(self._stepped_with, members):
            return
        if self.half is not None:
            name = "fp16" if self.half is torch.float16 else "bf16"
            raise SMPError(
                f"{name}: a hook before the optimizer's step (register_step_pre_hook) has changed gradients "
                "of the model, and the master weights have theirs already: change them before "
                "optimizer.step() is called"
            )
        assert self._groups.stand_ins is not None
        self._groups.stand_ins.bring_gradients(1.0)

    def _are_brought(self, members: Iterable[torch.Tensor]) -> bool:
        if self._brought is None:
            return False
        same = _are(self._brought, members)
        if not same and self._is_clipped and any(seen() is not None for seen, _ in self._brought):
            raise SMPError(
                "gradients were changed after optimizer.clip_master_grads(), which clips copies of them: "
                "clip after the last backward, right before optimizer.step(), or call optimizer.zero_grad()"
            )
        return same

    def _agreed(self, is_new: bool, is_finite: bool, failure: SMPError | None) -> tuple[bool, bool]:
        """Whether gradients have changed on any rank, and whether those of all are finite.

        Raises:
            SMPError: another rank cannot bring its own.
        """
        world = self._session.world
        if world is None or world.size == 1:
            return is_new, is_finite
        said = (is_new, is_finite, None if failure is None else str(failure))
        heard = world.exchange(said, "WORLD", "whether gradients overflowed (optimizer.step)")
        for rank, (_, _, error) in enumerate(heard):
            if error is not None and failure is None:
                raise SMPError(f"optimizer.step() or clip_master_grads() failed on rank {rank}: {error}")
        return any(new for new, _, _ in heard), all(finite for _, finite, _ in heard)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clips the gradients of masters by the norm over the whole model; -1: one was not finite."""
        if not self.bring():
            return -1.0
        stand_in_of = self._groups.stand_in_of
        parameters = [stand_in_of(p) for lists in self._groups.lists() for p in lists["params"]]
        norm = float(clip_grad_norm_(parameters, max_norm, norm_type))
        self._is_clipped = norm > max_norm or not math.isfinite(norm)
        return norm

    # Steps --------------------------------------------------------------------------------------------------

    def may_step(self, state: OptimizerState, closure: Any) -> bool:
        """Prepares a step of the inner optimizer; False: it is left out.

        Raises:
            SMPError: there is a closure, or loaded masters are not those of the model.
        """
        if not self.are_on:
            return True
        if closure is not None:
            raise SMPError(
                "optimizer.step(closure) with fp16, bf16 or shard_optimizer_state: gradients are brought "
                "to the optimizer before its step, and a closure makes others within it. Run the training "
                "step, and call optimizer.step() without a closure"
            )
        if self._groups.stand_ins is None:
            return True  # before partition, when there are no gradients
        state.check_followed()
        is_finite = self.bring()
        self._stepped_with = self._brought
        self._brought, self._is_clipped = None, False
        self._may_step = is_finite
        if self.scaling is not None:
            self.scaling.update(not is_finite)
        return is_finite

    def before_inner_step(self, state: OptimizerState) -> None:
        """The inner optimizer steps, maybe called by somebody else."""
        if self._may_step:
            self._follow_hooks()
            return
        if self.scaling is not None:
            raise SMPError(
                "fp16: the inner optimizer's step() was called, which would step with scaled gradients: call "
                "step() of the smp.DistributedOptimizer"
            )
        self.may_step(state, None)

    def after_inner_step(self) -> None:
        """The stand-ins have been stepped; collective over the replicas where state is sharded."""
        self._may_step = False
        stand_ins = self._groups.stand_ins
        assert stand_ins is not None
        stand_ins.give_back()
        stand_ins.drop_gradients()


def _are(seen: _Seen, members: Iterable[torch.Tensor]) -> bool:
    """Whether the parameters have these gradients, as they were."""
    with unguarded():
        gradients = [p.grad for p in members if p.grad is not None]
        return len(gradients) == len(seen) and all(
            known() is gradient and version == gradient._version
            for (known, version), gradient in zip(seen, gradients, strict=True)
        )


def _sharding_axis(session: Session) -> Axis | None:
    """The replicas, if the optimizer's state is sharded over them."""
    if not session.cfg.shard_optimizer_state:
        return None
    ranks, world = session.group("RDP"), session.world
    if world is None or len(ranks) == 1:
        warn_once_at_user_line(
            "shard_optimizer_state has no effect: there is one replica of the model, which keeps the whole "
            "state"
        )
        return None
    axes = [axis for axis in dict(session.topology.kinds)["RDP"] if session.topology.axis_size(axis) > 1]
    return Axis("+".join(axes), ranks, session.group_rank("RDP"), lambda: world.collectives("RDP"))


def _check_optimizer(optimizer: Any, keys: str) -> None:
    """Raises SMPError unless all that it steps is in its groups."""
    kind = type(optimizer).__name__
    held = getattr(optimizer, "__dict__", {}).values()
    inside = next((value for value in held if isinstance(value, torch.optim.Optimizer)), None)
    if inside is not None or not isinstance(optimizer, torch.optim.Optimizer):
        one = "optimizer" if inside is None else type(inside).__name__
        raise SMPError(
            f"{kind} with {keys}: it is an object around an optimizer, which would step the model's own "
            f"parameters instead of their masters or shards. Give smp.DistributedOptimizer the {one} inside "
            f"it, and put {kind} around that: {kind}(smp.DistributedOptimizer({one}(...))); or leave {keys} "
            "out"
        )
    members = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def holds(value: Any, depth: int) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) in members
        if depth and isinstance(value, list | tuple | set | dict):
            inside = value.values() if isinstance(value, dict) else value
            return any(holds(item, depth - 1) for item in inside)
        return False

    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and holds(value, 3):
            raise SMPError(
                f"{kind} with {keys}: it keeps the parameters as {name!r} beside its groups, and would go on "
                "stepping those instead of their masters or shards: use an optimizer that goes by its "
                f"groups, as AdamW and SGD do, or leave {keys} out"
            )


def _is_like(value: Any, stand_in: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether it is state of each element, in the parameter's own type."""
    return (
        isinstance(value, torch.Tensor) and value.shape == stand_in.shape and value.dtype == parameter.dtype
    )
