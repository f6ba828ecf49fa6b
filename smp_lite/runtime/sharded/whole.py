"""All sharded parameters whole at once, between steps: for what needs plain weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ...comm.waiting import wait_until
from ...nn.layout import layout_of, set_layout
from .parameters import ShardedParameters, ShardGroup

__all__ = ["whole_parameters"]


@contextlib.contextmanager
def whole_parameters(sharded: ShardedParameters, *, keep_changes: bool) -> Iterator[list[str]]:
    """Within: the parameters are ordinary and whole, without gradients. Collective over their axis.

    Args:
        sharded: those of this rank's stage.
        keep_changes: each rank takes its piece of what it has at the end, which all must have changed alike.
            False: the pieces are what they were.

    Yields:
        A list that has, afterwards, the names of those that were changed.
    """
    changed: list[str] = []
    layouts = [(p, layout_of(p), p.grad) for group in sharded.groups for p in group.parameters]
    for parameter, _, _ in layouts:
        parameter.grad = None
    try:
        for group in sharded.groups:
            group.hide()
            group.start()
        for group in sharded.groups:
            _arrive(group)
        for parameter, layout, _ in layouts:
            assert layout is not None
            if any(layout.dims):
                set_layout(parameter, layout.part())
            else:
                del parameter.smp_layout  # type: ignore[attr-defined]
        yield changed
        for group in sharded.groups:
            changed += group.take_back() if keep_changes else group.changed()
    finally:
        for group in sharded.groups:
            group.show()
        for parameter, layout, gradient in layouts:
            assert layout is not None
            set_layout(parameter, layout)
            parameter.grad = gradient


@torch.no_grad()
def _arrive(group: ShardGroup) -> None:
    pending = group.pending
    assert pending is not None
    wait_until(pending.done, pending.waits_for, pending.others)
    for _ in group.arrive():
        pass
