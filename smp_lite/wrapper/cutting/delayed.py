"""What a model whose initialization is delayed needs before it is partitioned."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from ...deferred import Waiting, check_filled, has_deferred, initialise_meta, unfilled
from ...errors import SMPError
from ...nn.layout import is_part
from ...record.state.flat_weights import renew_lists
from ...session import Session
from .lazy_modules import has_lazy_modules

__all__ = ["begin_without_data", "lacks", "prepare_delayed"]


def begin_without_data(session: Session, root: nn.Module) -> bool:
    """Whether a model was built on the meta device; its initialization is delayed from now on. Where a step
    is only planned, it stays as it is."""
    return session.on_planned is None and initialise_meta(root, is_part)


def lacks(root: nn.Module) -> bool:
    """Whether parameters or buffers are left to a checkpoint."""
    return bool(unfilled(root))


def prepare_delayed(
    session: Session, root: nn.Module, *, measures: bool, loaded: Collection[str] | None = None
) -> Waiting | None:
    """Makes all but parameters: buffers, and tensors that modules keep beside, which every rank has.

    Args:
        session: if it only plans, parameters go on waiting.
        root: the model.
        measures: whether it is to be run for its partition.
        loaded: names that state dicts fill which wait for the partition; None: the model was not on meta.

    Returns:
        What makes parameters; None: nothing waits.

    Raises:
        SMPError: the model cannot wait.
    """
    if not has_deferred(root):
        return None
    if loaded is not None:
        check_filled(root, loaded)
    if has_lazy_modules(root):
        raise SMPError(
            "lazy modules (nn.LazyLinear ...) make their parameters in a first forward of the whole model, "
            "which a model under delayed initialization has no memory for: give them their sizes, or build "
            "the model without smp.delay_param_initialization"
        )
    if measures:
        raise SMPError(
            "trace_execution_times=True runs the whole model on every rank before it is partitioned, and its "
            "initialization is delayed: leave one of the two out"
        )
    for module in root.modules():
        renew_lists(module)  # without the weak references to what waits
    waiting = Waiting(root)
    waiting.check()
    waiting.make_others()
    return waiting if session.on_planned is None else None
