"""``smp.patches.checkpoint``: single calls that keep no activations, inside a model's forward.

Follows the SMP API reference (``smdistributed.modelparallel.torch.patches.checkpoint``). Where
``smp.set_activation_checkpointing`` marks a module for all its calls, here one call is meant. Results do not
change, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from .. import session as session_module
from ..plan.partitioning.checkpoint_groups import group_children
from ..record.describe.checkpointed_calls import CheckpointedRun, call_marked, is_marked
from ..record.parameters.placement import FOREIGN, SPLIT
from ..wrapper.activation_checkpointing import checked_strategy, is_cut, partitions_of

__all__ = ["checkpoint", "checkpoint_sequential"]


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True) -> Any:
    """``module(*args)``, of which the arguments alone are kept; backward runs its forward once more.

    Args:
        module: of the model, on one stage whole.
        args: what it is called with.
        preserve_rng_state: the second forward draws the random numbers of the first.

    Raises:
        TypeError: it is no module; functions cannot be given to a stage.
        SMPError: the module is cut over stages, and the user has cut it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            "smp.patches.checkpoint.checkpoint takes a module, which lies on a stage, and its arguments, got "
            f"{module!r}: put the function into the forward of an nn.Module, or use torch.utils.checkpoint "
            "inside a module that lies on one stage"
        )
    if is_marked(module):
        return module(*args)
    called = _as_run([module], preserve_rng_state, "smp.patches.checkpoint.checkpoint")
    return called(*args)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Calls the children of a Sequential one after another, in groups that keep their input alone.

    Args:
        sequential: of the model; it may be cut between its children.
        input: of the first child; a tuple needs ``pack_args_as_tuple``.
        strategy: ``each``, ``contiguous`` or ``group_n``, as in ``smp.set_activation_checkpointing``.
        preserve_rng_state: the second forward draws the random numbers of the first.
        pack_args_as_tuple: children take and return one tuple.

    Raises:
        TypeError: it is no Sequential, or the input is a tuple without ``pack_args_as_tuple``.
        ValueError: there is no such strategy.
        SMPError: a child is cut over stages, and the user has cut it.
    """
    who = "smp.patches.checkpoint.checkpoint_sequential"
    if not isinstance(sequential, nn.Sequential):
        raise TypeError(f"{who} takes an nn.Sequential, got {type(sequential).__name__}")
    checked_strategy(who, strategy)
    if isinstance(input, tuple) and not pack_args_as_tuple:
        raise TypeError(
            f"{who}: the input is a tuple, which children take whole: write pack_args_as_tuple=True"
        )
    children = list(sequential)
    model = _model()
    homes = [0] * len(children) if model is None else partitions_of(model.runtime.placement, children)
    for group in group_children(homes, strategy):
        modules = [children[number] for number in group]
        if len(modules) == 1 and is_marked(modules[0]):
            input = modules[0](input)
        else:
            input = _as_run(modules, preserve_rng_state, who)(input)
    return input


def _model() -> Any:
    """The DistributedModel, once it is partitioned."""
    model = session_module.current().model if session_module.is_initialized() else None
    return model if model is not None and model.runtime is not None else None


def _as_run(modules: Sequence[nn.Module], preserve_rng_state: bool, who: str) -> Callable[..., Any]:
    """What to call in place of the modules."""
    model = _model()
    homes = {FOREIGN} if model is None else {model.runtime.placement.home(module) for module in modules}
    if FOREIGN in homes:  # a model that is traced, or another one
        run = CheckpointedRun(modules, preserve_rng_state)
        # Calls of modules are heard from smp.init() on.
        return run if session_module.is_initialized() else partial(_call, run)
    if SPLIT in homes:
        is_cut(model.runtime.placement, modules[0], who, may_warn=session_module.current().cfg.auto_partition)
        return modules[0]
    found: nn.Module = model.runtime.recorder.runs.of(modules, preserve_rng_state=preserve_rng_state)
    return found


def _call(run: nn.Module, *args: Any) -> Any:
    return call_marked(nn.Module.__call__, run, args, {})
