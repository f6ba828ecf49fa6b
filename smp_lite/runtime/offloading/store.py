"""Where activations lie while they are not in memory: what a store is to those that offload.

On a host it is a file (:mod:`.file_store`); for another device, memory of the host (:mod:`.pinned_store`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Store", "Transfer"]


class Transfer(Protocol):
    """Bytes that are on their way to the store or from it."""

    def done(self) -> bool:
        """Polls: whether it has ended.

        Raises:
            SMPError: it failed.
        """

    def followed(self) -> bool:
        """Whether all that the process computes from now on comes after its end.

        On a device the stream that computes is made to wait for it, so the answer is yes, and no host waits.

        Raises:
            SMPError: it failed.
        """

    def wait(self, seconds: float) -> bool:
        """As :meth:`followed`; a host may wait for it so long."""


class Store(Protocol):
    """Takes the bytes of tensors, and gives them back.

    Attributes:
        name: for errors.
    """

    name: str

    def is_working(self) -> bool:
        """Whether transfers end by themselves."""

    def place(self, num_bytes: int) -> Any:
        """Space for so many bytes."""

    def free(self, place: Any, num_bytes: int) -> None:
        """The space may be used again."""

    def write(self, tensor: torch.Tensor, place: Any) -> Transfer:
        """Begins to write a one-dimensional tensor of bytes, which must stay until that has ended."""

    def read(self, tensor: torch.Tensor, place: Any) -> Transfer:
        """Begins to read into a one-dimensional tensor of bytes."""

    def settle(self) -> None:
        """What the process computes from now on comes after all transfers that have begun."""

    def close(self) -> None:
        """Lets go of what it has, when it has done what it was told."""
