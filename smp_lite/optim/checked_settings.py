"""An optimizer is tried out with the settings that it has (:mod:`.optimizer_check`), and with others again.

What was no limit on a norm when it was wrapped may be one later: a script sets ``max_grad_norm``, a state
that is loaded brings it, a group is added. What the optimizer changes itself while it steps, such as a count,
is its own and no reason to look again.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import optimizer as torch_hooks

from ..errors import SMPError
from ..nn.guarding import as_between_steps, as_ordinary, tensors_of
from ..record.parameters.away import is_away
from .optimizer_check import check_optimizer

if TYPE_CHECKING:
    from ..session import Session
    from .optimizer import DistributedOptimizer

__all__ = ["CheckedSettings", "other_optimizers_checked"]

_SCHEDULED = frozenset(["params", "param_names", "lr", "initial_lr", "momentum", "betas", "weight_decay"])
"""What schedules change all the time, and what decides over no norm."""

_Plain = bool | int | float | str | None
_Settings = list[dict[str, Any]]


class CheckedSettings:
    """Those with which an optimizer was tried out.

    Raises:
        SMPError: it looks at all parameters at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self._settings = _settings(optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Tries it out again if they have changed; raises as the constructor does."""
        settings = _settings(optimizer)
        if settings != self._settings:
            check_optimizer(optimizer)
            self._settings = settings

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It may have changed them, except its defaults, which nobody changes but a script."""
        defaults, *_ = self._settings
        self._settings = [defaults, *_settings(optimizer)[1:]]


def _settings(optimizer: torch.optim.Optimizer) -> _Settings:
    return [_plain(optimizer.defaults), _plain(vars(optimizer)), *map(_plain, optimizer.param_groups)]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are compared at no cost."""
    return {
        key: value
        for key, value in settings.items()
        if isinstance(value, _Plain) and key not in _SCHEDULED and not key.startswith("_")
    }


@contextlib.contextmanager
def other_optimizers_checked(session: Session) -> Iterator[None]:
    """Within: optimizers of the model that are in no ``DistributedOptimizer`` are checked as they step."""
    seen: WeakKeyDictionary[torch.optim.Optimizer, CheckedSettings | None] = WeakKeyDictionary()
    on_pieces = _OnPieces()

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if session.model is None:
            return
        wrapper = _wrapper_of(session, optimizer)
        if wrapper is not None:
            on_pieces.close_after(optimizer, wrapper)
            wrapper.before_hooks()
        elif session.shard_axes and not _is_inside_step(session, optimizer):
            _refuse_unclipped(session, optimizer)
            on_pieces.know(optimizer)
        if session.step is not None and session.step.runtime is not None:
            _refuse_inside_step(session, optimizer)
        keys = [key for key in ("fp16", "bf16", "shard_optimizer_state") if getattr(session.cfg, key)]
        if keys and _is_of_the_model(session, optimizer):
            raise SMPError(
                f"{type(optimizer).__name__}.step() steps the model's own parameters, and with "
                f"{' and '.join(keys)} smp.DistributedOptimizer steps others in their place (master weights, "
                "shards): wrap it, and call step() of the wrapper"
            )
        if session.replica_size == 1:
            return
        if optimizer not in seen:
            seen[optimizer] = CheckedSettings(optimizer) if _is_of_the_model(session, optimizer) else None
        elif (checked := seen[optimizer]) is not None:
            checked.before_step(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if session.model is not None and (wrapper := _wrapper_of(session, optimizer)) is not None:
            wrapper.after_hooks()
        if (checked := seen.get(optimizer)) is not None:
            checked.after_step(optimizer)

    handles = [
        torch_hooks.register_optimizer_step_pre_hook(before_step),
        torch_hooks.register_optimizer_step_post_hook(after_step),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        on_pieces.forget()


class _OnPieces:
    """Optimizers that are not wrapped: their steps find ordinary tensors, hooks on them find pieces.

    Those that are wrapped do that by hooks; of them a step that fails is noticed here.

    torch's function around the step of a class, which calls the hooks, holds the step in a closure cell. What
    is put there closes again whatever the step does; torch calls no hooks after one that fails.
    """

    def __init__(self) -> None:
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._wrappers: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()  # weak ones
        self._stepping: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._replaced: dict[int, tuple[types.CellType, Callable[..., Any]]] = {}  # by id, and its content

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Its steps are such from now on, the one that is about to begin as well."""
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        self._look_at_steps(optimizer)

    def close_after(self, optimizer: torch.optim.Optimizer, wrapper: DistributedOptimizer) -> None:
        """Its steps are a wrapper's, which closes what it has opened if they fail."""
        if optimizer not in self._wrappers:
            self._wrappers[optimizer] = weakref.ref(wrapper)
            self._look_at_steps(optimizer)

    def _look_at_steps(self, optimizer: torch.optim.Optimizer) -> None:
        for kind in type(optimizer).__mro__:
            cell = _cell_of_step(vars(kind).get("step"))
            if cell is not None and id(cell) not in self._replaced:
                self._replaced[id(cell)] = cell, cell.cell_contents
                cell.cell_contents = self._around(cell.cell_contents)

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def stepped(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if (reference := self._wrappers.get(optimizer)) is not None:
                try:
                    return step(optimizer, *args, **kwargs)
                except BaseException:
                    if (wrapper := reference()) is not None:
                        wrapper.give_up()
                    raise
            if optimizer not in self._known or optimizer in self._stepping:  # of its base class, in its own
                return step(optimizer, *args, **kwargs)

            def pieces() -> Iterator[tuple[torch.Tensor, torch.Size]]:
                members = (parameter for group in optimizer.param_groups for parameter in group["params"])
                return tensors_of((p for p in members if not is_away(p)), optimizer.state)

            self._stepping.add(optimizer)
            try:
                with as_ordinary(pieces):
                    with_guard = {k: _closure(v) if k == "closure" else v for k, v in kwargs.items()}
                    return step(optimizer, *map(_closure, args), **with_guard)
            finally:
                self._stepping.discard(optimizer)

        return stepped

    def forget(self) -> None:
        """Steps are torch's own again."""
        for cell, step in self._replaced.values():
            cell.cell_contents = step
        self._replaced.clear()
        self._known.clear()
        self._wrappers.clear()


_AROUND_STEPS = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def _cell_of_step(step: Any) -> types.CellType | None:
    """Where torch's function around a step holds it; None: it has none."""
    while step is not None:
        if getattr(step, "__code__", None) is _AROUND_STEPS:
            return step.__closure__[_AROUND_STEPS.co_freevars.index("func")]  # type: ignore[no-any-return]
        step = getattr(step, "__wrapped__", None)
    return None


def _closure(given: Any) -> Any:
    """A closure, a function that a step is given, finds pieces as well; anything else is itself."""
    if not isinstance(given, types.FunctionType | types.MethodType | functools.partial):
        return given

    @functools.wraps(given)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        with as_between_steps():
            return given(*args, **kwargs)

    return evaluate


def _wrapper_of(session: Session, optimizer: torch.optim.Optimizer) -> DistributedOptimizer | None:
    return next((each for each in session.optimizers if each.is_around(optimizer)), None)


def _is_inside_step(session: Session, optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer around this one steps it, in the step of a DistributedOptimizer, which has clipped
    and has made pieces ordinary."""
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(
        wrapper._is_stepping and given <= {id(p) for group in wrapper.param_groups for p in group["params"]}
        for wrapper in session.optimizers
    )


def _refuse_unclipped(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """Sharded data parallelism clips in every step, by SMP; a step of torch alone would not."""
    limit = session.cfg.sdp_gradient_clipping
    if session.plan is None and limit > 0 and _is_of_the_model(session, optimizer):
        raise SMPError(
            f"{type(optimizer).__name__}.step() does not clip the model's gradient, and "
            f"sdp_gradient_clipping: {limit:g} asks for it in every step (1.0 if nothing is said): wrap the "
            "optimizer with smp.DistributedOptimizer, or set sdp_gradient_clipping to 0"
        )


def _is_of_the_model(session: Session, optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps parameters of the model and is not in the session's DistributedOptimizer."""
    model = session.model
    assert model is not None
    if _wrapper_of(session, optimizer) is not None:
        return False
    own = {id(parameter) for parameter in model.module.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return any(id(parameter) in own for parameter in given) or (
        model.own_parameters is not None and model.own_parameters.holds_any_of(given)
    )


def _refuse_inside_step(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer of the model steps while a step function runs, or while its backwards do (in a hook)."""
    placement = session.model.runtime.placement
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if placement.alias(parameter) is not None:
                raise SMPError(
                    f"{type(optimizer).__name__}.step() was called while an smp.step runs, whose "
                    f"microbatches "
                    "still use the weights as they are: call it when the step function has returned"
                )
