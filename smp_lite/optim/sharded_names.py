"""What scripts ask an SMP optimizer for under sharded data parallelism, and its clipping.

Scripts know the names from DeepSpeed: ``fp16_groups`` (each group's parameters), ``fp32_partitioned_groups_
flat`` (for each group this rank's slices of them, one after another, in fp32; :mod:`..runtime.sharded.
slices`), ``ds_param_shard_group`` (the ranks that share one copy), ``_global_grad_norm`` (of the last step;
-1: fp16 left it out). Groups hold the parameters of this rank's own partition. The flat tensors are copies
made when they are asked for, since no memory of that form is kept: they are for reading.

SMP clips in every step of a sharded optimizer, by the norm of the whole model's gradient and as
``torch.nn.utils.clip_grad_norm_`` does; so ``sdp_gradient_clipping: 0`` is off, as it is in DeepSpeed. The
norm is taken all the same, as scripts read it. Of several optimizers the first that steps after a backward
clips the gradients of all, as they are then: one process clips once before the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..devices import home
from ..errors import MissingAttribute, SMPError
from ..nn.guarding import plain, unguarded
from ..record.parameters.away import is_away
from ..runtime.sharded.slices import slice_of
from .norms.exchange import Call, Item, total_norm
from .norms.parts import FOREIGN

if TYPE_CHECKING:
    from ..session import Session
    from .state.groups import Groups

__all__ = ["SHARDED_NAMES", "ShardedNames"]

SHARDED_NAMES = frozenset(
    ["_global_grad_norm", "fp16_groups", "fp32_partitioned_groups_flat", "ds_param_shard_group"]
)


class ShardedNames:
    """Of one DistributedOptimizer.

    Args:
        session: the job's.
        groups: of its inner optimizer.
    """

    def __init__(self, session: Session, groups: Groups) -> None:
        self._session, self._lists, self._stand_in = session, groups.lists, groups.stand_in_of
        self._norm: float | None = None
        # How many backwards there had been when the gradients of this step were clipped.
        self._clipped_at = -1
        self._is_prepared = False  # whether the inner optimizer's next step is one of ours

    def _groups(self) -> list[list[torch.Tensor]]:
        """For each group its parameters, here and away."""
        return [lists["params"] for lists in self._lists()]

    @property
    def clips(self) -> bool:
        """Whether a step clips, or at least takes the norm: with SMP's own sharded data parallelism."""
        return bool(self._session.shard_axes) and self._session.plan is None

    def value(self, name: str) -> Any:
        """Of an attribute.

        Raises:
            MissingAttribute: the parameters are not sharded, or not yet.
        """
        session = self._session
        if not session.shard_axes or session.world is None:
            raise MissingAttribute(
                f"optimizer.{name} belongs to sharded data parallelism, which is off: set "
                "sharded_data_parallel_degree above 1"
            )
        if name == "_global_grad_norm":
            return self._norm
        if name == "ds_param_shard_group":
            if "SDP" not in session.process_groups:
                raise MissingAttribute(f"optimizer.{name} is a process group, which needs ddp: True")
            return session.process_groups["SDP"]
        if not session.model.partitioned:
            raise MissingAttribute(
                f"optimizer.{name}: over several partitions parameters are cut into slices by the first "
                "step: ask after it"
            )
        here = [[p for p in group if not is_away(p)] for group in self._groups()]
        if name == "fp16_groups":
            return here
        axis = session.axis("+".join(session.shard_axes))
        return [self._flat([slice_of(self._stand_in(p), axis) for p in group]) for group in here]

    @staticmethod
    def _flat(slices: list[torch.Tensor]) -> torch.Tensor:
        flat = [piece.to(torch.float32) for piece in slices]
        return torch.cat(flat) if flat else torch.empty(0, device=home())

    def before_step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Clips what is about to be stepped; a closure is given back as one that clips what it has made."""
        if not self.clips:
            return closure
        self._is_prepared = True
        if closure is None:
            self._clip(optimizer)
            return None

        def clipped() -> Any:
            loss = closure()
            self._clip(optimizer)
            return loss

        return clipped

    def before_inner_step(self) -> None:
        """The inner optimizer steps.

        Raises:
            SMPError: it was called by itself, and would step without clipping.
        """
        if self.clips and not self._is_prepared and self._session.cfg.sdp_gradient_clipping > 0:
            raise SMPError(
                "the inner optimizer's step() was called, which does not clip as sdp_gradient_clipping asks: "
                "call step() of the smp.DistributedOptimizer, or set sdp_gradient_clipping to 0"
            )
        self._is_prepared = False

    def overflowed(self) -> None:
        """A step is left out, and has no norm."""
        self._norm = -1.0

    def _clip(self, optimizer: Any) -> None:
        """Takes the norm of the gradients, and clips them. Collective over the ranks that hold one copy of
        the model."""
        if not self._session.model.partitioned:
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            raise SMPError(
                f"{type(optimizer).__name__}(fused=True) takes the GradScaler's scale off in its own kernel, "
                "and sharded data parallelism clips before: use fused=False"
            )
        passes = self._session.model.runtime.passes
        limit = self._session.cfg.sdp_gradient_clipping
        others = [each.sharding for each in self._session.optimizers if each.sharding is not self]
        earlier = next((each for each in others if each._clipped_at == passes), None)
        if earlier is not None and self._clipped_at != passes:
            # One of several optimizers has clipped what this step of training has made, all of it.
            self._norm, self._clipped_at = earlier._norm, passes
            return
        self._clipped_at = passes
        items, gradients = self._whole_model(limit)
        call = Call("optimizer.step()", {"norm_type": 2.0, "max_norm": limit}, False, None)
        total, _ = total_norm(self._session, call, items, gradients, False)
        self._norm = float(total)
        if limit > 0:
            factor = torch.clamp(limit / (total + 1e-6), max=1.0)  # torch.nn.utils.clip_grads_with_norm_
            with torch.no_grad(), unguarded():
                for gradient in gradients:
                    if gradient is not None:
                        plain(gradient).mul_(factor)

    def _whole_model(self, limit: float) -> tuple[list[Item], list[torch.Tensor | None]]:
        """All parameters of the model, and what else optimizers step, with the gradients that are clipped.

        Raises:
            SMPError: they are gradients of masters, of which each optimizer has its own alone.
        """
        own = self._session.model.own_parameters
        find = own.finder()
        mine = {id(parameter) for group in self._groups() for parameter in group}
        parameters = [own.parameter(number) for number in range(len(own.names))]
        if limit > 0 and (self._session.cfg.fp16 or self._session.cfg.bf16):
            left = [
                n for n, p in zip(own.names, parameters, strict=True) if p.requires_grad and id(p) not in mine
            ]
            if left:
                raise SMPError(
                    f"sdp_gradient_clipping: {limit:g} clips the gradient of the whole model, and in half "
                    f"precision that of master weights, which this optimizer does not have of {left[0]!r}"
                    f"{f' and {len(left) - 1} others' if len(left) > 1 else ''}: give one optimizer all "
                    "parameters that train (in several groups), freeze the others (requires_grad_(False)), "
                    "or set sdp_gradient_clipping to 0"
                )
        items, gradients = [], []
        for number, parameter in enumerate(parameters):
            is_here = own.is_local(number) and not is_away(parameter)
            items.append(Item(number, parameter if is_here else None))
            gradients.append(self._stand_in(parameter).grad if is_here else None)
        foreign = {}
        for groups in (
            self._groups(),
            *([g["params"] for g in each.param_groups] for each in self._session.optimizers),
        ):
            foreign.update({id(p): p for group in groups for p in group if find(p) is None})
        items += [Item(FOREIGN, parameter) for parameter in foreign.values()]
        gradients += [self._stand_in(parameter).grad for parameter in foreign.values()]
        return items, gradients
