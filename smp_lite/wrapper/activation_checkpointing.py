"""``smp.set_activation_checkpointing``: modules that keep no activations, and compute them again.

Follows the SMP API reference ("smdistributed.modelparallel.torch.set_activation_checkpointing"). A module
must lie on one stage whole; a Sequential may be cut between its children. Which children are computed again
together depends on the partition, so groups are made when that is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .. import session as session_module
from ..errors import SMPError
from ..plan.partitioning.checkpoint_groups import group_children, group_size
from ..record.backward.checkpointed_runs import CheckpointedRuns
from ..record.code.source_line import warn_once_at_user_line
from ..record.describe.checkpointed_calls import (
    has_own_forward,
    is_marked,
    mark,
    set_runs,
    set_strategy,
    strategy_of,
)
from ..record.parameters.placement import SPLIT, STATELESS, Placement

__all__ = [
    "check_marked",
    "checked_strategy",
    "group_marked",
    "is_cut",
    "partitions_of",
    "set_activation_checkpointing",
]

_NAME = "smp.set_activation_checkpointing"


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """From now on calls of this module keep their inputs alone; backward runs its forward once more.

    Results do not change, to the bit.

    Args:
        module: of the wrapped model, an instance, not a class; before or after the optimizer is wrapped.
        preserve_rng_state: the second forward draws the random numbers of the first.
        pack_args_as_tuple: children of a Sequential take one tuple, the tensors of which are kept (as they
            are without it).
        strategy: of a Sequential: ``each`` child for itself; ``contiguous``: all consecutive children of one
            partition together, of which the first one's input alone is kept; ``group_n``: as many as n of
            them.

    Raises:
        TypeError: it is no module.
        ValueError: no such strategy, or one for a module that is no Sequential.
        SMPError: there is no DistributedModel yet, or the module is no part of it, or is cut over stages.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_NAME} needs a module, got {module!r}")
    checked_strategy(_NAME, strategy)
    is_sequential = isinstance(module, nn.Sequential)
    if not is_sequential and (strategy != "each" or pack_args_as_tuple):
        raise ValueError(
            f"{_NAME}: strategy and pack_args_as_tuple are for nn.Sequential, and this is a "
            f"{type(module).__name__}"
        )
    session = session_module.current()
    model = session.model
    if model is None:
        raise SMPError(f"{_NAME}: wrap the model with smp.DistributedModel first")
    if not any(part is module for part in model.module.modules()):
        raise SMPError(
            f"{_NAME}: this {type(module).__name__} is no part of the model that smp.DistributedModel wraps: "
            "mark a module of model.get_module(), which holds replaced modules as they are now"
        )
    if session.step is not None:
        raise SMPError(f"{_NAME} was called inside an smp.step: call it before the first step")
    if isinstance(module, nn.Sequential) and group_size(strategy) != 1:
        if has_own_forward(module):
            raise SMPError(
                f"{_NAME}: {type(module).__name__} has a forward of its own, so its children may be called "
                f"in another way than together (strategy={strategy!r}): write strategy='each'"
            )
        if session.cfg.static_mode and session.steps_run:
            raise SMPError(
                f"{_NAME}: static_mode has recorded its steps, in which each child is called for itself, so "
                f"strategy={strategy!r} comes too late: call it before the first step"
            )
    for part in module if isinstance(module, nn.Sequential) else [module]:
        mark(part, preserve_rng_state=preserve_rng_state)
    if isinstance(module, nn.Sequential):
        set_strategy(module, strategy, preserve_rng_state=preserve_rng_state)
    if model.runtime is not None:
        check_marked(model.runtime.placement, may_warn=session.cfg.auto_partition)
        group_marked(model.runtime.recorder.runs)


def checked_strategy(who: str, strategy: object) -> None:
    """Raises ValueError if there is no such strategy."""
    try:
        group_size(strategy)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None


def check_marked(placement: Placement, *, may_warn: bool) -> None:
    """What is marked must lie on one stage.

    Args:
        placement: of the model.
        may_warn: the user has not chosen the partition, so a module that it cuts runs as it is.

    Raises:
        SMPError: not ``may_warn``, and it is cut.
    """
    for module in placement.root.modules():
        if is_marked(module):
            is_cut(placement, module, _NAME, may_warn=may_warn)


def is_cut(placement: Placement, module: nn.Module, who: str, *, may_warn: bool) -> bool:
    """Whether a module cannot be computed again on one stage; says so.

    Raises:
        SMPError: not ``may_warn``, and it is cut.
    """
    if placement.home(module) != SPLIT:
        return False
    text = (
        f"{who}: {placement.name(module)} ({type(module).__name__}) is cut over stages, so it cannot be "
        "computed again on one of them"
    )
    if not may_warn:
        raise SMPError(f"{text}: checkpoint the modules inside it, or place it whole")
    warn_once_at_user_line(f"{text}; it runs without: checkpoint the modules inside it")
    return True


def partitions_of(placement: Placement, children: Sequence[nn.Module]) -> list[int | None]:
    """Where each child lies, as grouping wants it: those without parameters nowhere, cut ones alone."""
    homes = [placement.home(child) for child in children]
    return [
        None if home == STATELESS else -1 - number if home == SPLIT else home
        for number, home in enumerate(homes)
    ]


def group_marked(runs: CheckpointedRuns) -> None:
    """Makes the groups of marked Sequentials, now that the partition is known."""
    for module in runs.placement.root.modules():
        if not isinstance(module, nn.Sequential) or (found := strategy_of(module)) is None:
            continue
        strategy, preserve_rng_state = found
        children = list(module)
        groups = group_children(partitions_of(runs.placement, children), strategy)
        set_runs(
            module,
            [
                children[group[0]]
                if len(group) == 1
                else runs.of([children[i] for i in group], preserve_rng_state=preserve_rng_state)
                for group in groups
            ],
        )
