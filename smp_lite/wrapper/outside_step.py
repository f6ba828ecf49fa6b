"""Calls of the model outside a step: a plain loop, where the model is in one partition.

SMP allows it there: ``loss = model(x)...; loss.backward(); optimizer.step()``. The module runs as it is, on
the whole batch at once; what becomes of the gradients is :mod:`smp_lite.runtime.plain_backward`'s business.
Where ranks share a stage, their layers talk to each other in the midst of the call, so they compare first
what they were called with; those with the same batch draw random numbers from the first one's state.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_hooks

from ..comm.groups.axis import Axis
from ..comm.groups.stage_peers import StagePeers
from ..devices import CPU
from ..errors import SMPError, SMPMismatch
from ..nn.layout import is_sharded
from ..record.code.source_line import warn_once_at_user_line
from ..record.parameters.split_reads import SplitReads
from ..record.values.memory import digest_of
from ..record.values.structure import flatten
from ..runtime.model_runtime import ModelRuntime
from ..runtime.plain_backward import PlainBackward, is_checked
from ..runtime.replica_checks import ReplicaChecks
from ..session import Session

__all__ = ["OutsideStep"]


class OutsideStep:
    """What a model in one partition does outside steps.

    Args:
        session: the job's.
        runtime: the model's.
    """

    def __init__(self, session: Session, runtime: ModelRuntime) -> None:
        peers = session.stage_peers
        self._peers: StagePeers | None = peers if peers is not None and not peers.is_alone else None
        self._placement = runtime.placement
        self._module: nn.Module = runtime.placement.root
        self._sharded = next(
            (name for name, parameter in self._module.named_parameters() if is_sharded(parameter)),
            None,
        )
        self._number = 0
        self._offloads: bool = session.cfg.offload_activations
        self._backward: PlainBackward | None = None
        self._replicas: ReplicaChecks | None = None
        shared = self._peers if self._peers is not None and self._peers.share_batch else None
        world = session.world
        if world is None or self._sharded is not None or (runtime.reducer is None and shared is None):
            return
        if runtime.reducer is not None:
            self._replicas = ReplicaChecks(
                runtime,
                session.topology.coordinate(session.rank),
                session.batch_axes,
                lambda said: world.exchange(said, "WORLD", "a step with gradients that were not reduced"),
            )
        self._backward = backward = PlainBackward(
            runtime,
            lambda said: world.exchange(said, "WORLD", "the end of a backward outside smp.step"),
            lambda: session.step is not None,
            shared,
            self._replicas,
        )
        for handle in (
            torch_hooks.register_optimizer_step_pre_hook(
                lambda optimizer, *_: backward.refuse_step(optimizer)
            ),
            torch_hooks.register_optimizer_step_post_hook(
                lambda optimizer, *_: backward.look_back(optimizer)
            ),
        ):
            session.overrides.callback(handle.remove)

    def settle(self) -> None:
        """Ends a backward that has failed; see :meth:`PlainBackward.settle`."""
        if self._backward is not None:
            self._backward.settle()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's result.

        Raises:
            SMPMismatch: the ranks of a stage have called it with different things.
            SMPError: the parameters are sharded.
        """
        if self._sharded is not None:
            raise SMPError(
                "the DistributedModel was called outside a function decorated with @smp.step, and "
                f"{self._sharded} is sharded: a step brings its pieces together, so move the call into one"
            )
        if self._offloads and torch.is_grad_enabled():
            warn_once_at_user_line(
                "offload_activations: outside a function decorated with @smp.step nothing leaves memory: the "
                "library does not know when backward comes"
            )
        self.settle()
        if self._backward is not None and torch.is_grad_enabled():
            self._backward.listen()
            if self._replicas is not None:
                self._replicas.is_used = True
        if self._peers is not None:
            self._agree(self._peers, args, kwargs)
        split = self._placement.split
        with SplitReads(self._placement.split_name) if split else contextlib.nullcontext():
            return self._module(*args, **kwargs)

    def _agree(self, peers: StagePeers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collective over the ranks of the stage."""
        leaves: list[Any] = []
        flatten((args, kwargs), leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return
        self._number += 1
        described = (
            self._module.training,
            torch.is_grad_enabled(),
            [
                (str(leaf.dtype), *leaf.shape) if isinstance(leaf, torch.Tensor) else _shown(leaf)
                for leaf in leaves
            ],
        )
        axis = peers.axis("+".join(peers.names))
        rows = _gathered([_digest(repr(described).encode())], axis)
        if (other := _first_other(rows[:, 0])) is not None:
            raise SMPMismatch(
                f"the model was called outside smp.step with other shapes, types or modes on rank "
                f"{axis.ranks[other]} than on rank {axis.ranks[0]}, which share a stage. Here: {described}"
            )
        if not peers.share_batch:
            return
        axis, state = peers.sharing, torch.get_rng_state()
        contents = [digest_of(tensor) for tensor in tensors] if is_checked(self._number) else []
        rows = _gathered([_digest(repr(contents).encode()), _digest(state.numpy().tobytes())], axis)
        if (other := _first_other(rows[:, 0])) is not None:
            raise SMPMismatch(
                f"the model was called outside smp.step with other numbers on rank {axis.ranks[other]} "
                f"than on rank {axis.ranks[0]}, which must get the same batch: seed and shard data by "
                "smp.rdp_rank(), or set prescaled_batch: False"
            )
        if _first_other(rows[:, 1]) is not None:
            # What is not split must be dropped out alike on all of them.
            torch.set_rng_state(axis.broadcast(state, 0))


def _shown(leaf: Any) -> str:
    return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 2


def _gathered(numbers: list[int], axis: Axis) -> torch.Tensor:
    """Each rank's numbers as a row."""
    return axis.all_gather(torch.tensor([numbers], dtype=torch.int64, device=CPU))


def _first_other(column: torch.Tensor) -> int | None:
    """The first member whose number is not that of member 0."""
    others = (column != column[0]).nonzero()
    return int(others[0]) if len(others) else None
