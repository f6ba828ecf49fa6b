"""``smp.set_activation_checkpointing``: modules that keep no activations, and compute them again.

Follows the SMP API reference ("smdistributed.modelparallel.torch.set_activation_checkpointing"). A module
must lie on one stage whole; a Sequential may be cut between its children. What is different from SMP: with a
strategy that takes several children together, each is still for itself, which keeps their inputs as well.
"""

from __future__ import annotations

import re

from torch import nn

from .. import session as session_module
from ..errors import SMPError
from ..record.describe.checkpointed_calls import is_marked, mark
from ..record.parameters.placement import SPLIT, Placement
from ..record.source_line import warn_once_at_user_line

__all__ = ["check_marked", "set_activation_checkpointing"]

_STRATEGY = re.compile(r"each|contiguous|group_[1-9]\d*")


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
        pack_args_as_tuple: children of a Sequential take one tuple, the tensors of which are kept.
        strategy: of a Sequential: ``each``, ``contiguous`` or ``group_n``; always each for itself.

    Raises:
        TypeError: it is no module.
        ValueError: no such strategy, or one for a module that is no Sequential.
        SMPError: there is no DistributedModel yet.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.set_activation_checkpointing needs a module, got {module!r}")
    if not isinstance(strategy, str) or not _STRATEGY.fullmatch(strategy):
        raise ValueError(
            f"smp.set_activation_checkpointing: strategy={strategy!r} must be 'each', 'contiguous' or "
            "'group_n' with a number n"
        )
    is_sequential = isinstance(module, nn.Sequential)
    if not is_sequential and (strategy != "each" or pack_args_as_tuple):
        raise ValueError(
            "smp.set_activation_checkpointing: strategy and pack_args_as_tuple are for nn.Sequential, and "
            f"this is a {type(module).__name__}"
        )
    model = session_module.current().model
    if model is None:
        raise SMPError("smp.set_activation_checkpointing: wrap the model with smp.DistributedModel first")
    for part in module if is_sequential else [module]:
        mark(part, preserve_rng_state=preserve_rng_state, pack_args_as_tuple=pack_args_as_tuple)
    if model.runtime is not None:
        check_marked(model.runtime.placement, may_warn=session_module.current().cfg.auto_partition)


def check_marked(placement: Placement, *, may_warn: bool) -> None:
    """What is marked must lie on one stage.

    Args:
        placement: of the model.
        may_warn: the user has not chosen the partition, so a module that it cuts runs as it is.

    Raises:
        SMPError: not ``may_warn``, and it is cut.
    """
    for name, module in placement.root.named_modules():
        if not is_marked(module) or placement.home(module) != SPLIT:
            continue
        text = (
            f"smp.set_activation_checkpointing: {name or 'the model'} ({type(module).__name__}) is cut over "
            "stages, so it cannot be computed again on one of them"
        )
        if not may_warn:
            raise SMPError(f"{text}: checkpoint the modules inside it, or place it whole")
        warn_once_at_user_line(f"{text}; it runs without: checkpoint the modules inside it")
