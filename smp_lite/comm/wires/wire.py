"""Wires: how tensors travel between the stages of one mp group.

A wire does two things, both without blocking: ``send`` a tensor to a stage, and ``receive`` one from a
stage. Each returns a :class:`Transfer` to poll. Sends and receives between two stages are matched in
order; the lowering pass puts them in the same order at both ends. A tensor arrives with the strides that it
was sent with, also where they are not those that were recorded, as with gradients: they travel behind the
elements, over MPI only where the receiver would not guess them.

Makes: :class:`~.memory.MemoryWire` (all stages in one process), :class:`~.mpi.MPIWire` (CPU tensors, read and
written in place), :class:`~.c10d.C10dWire` (a torch process group), and :class:`~.staged.StagedWire` (tensors
of a device, over one of the others, through the host's memory). Which one a job takes: :mod:`.choice`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ...record.values.placed import TensorMeta

__all__ = ["Transfer", "Wire"]


class Transfer(Protocol):
    """One send or receive under way."""

    def done(self) -> bool:
        """Polls; once True, stays True."""

    def tensor(self) -> torch.Tensor:
        """What was received; only after ``done()``."""


class Wire(Protocol):
    """Tensors to and from the other stages."""

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        """Starts sending; the transfer keeps what it needs alive."""

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        """Posts a receive."""
