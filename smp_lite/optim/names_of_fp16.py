"""What scripts ask an SMP optimizer for, whether or not they train in fp16 or with shards."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..smp_v1.names import under
from .norms.whole_model import clip_grad_norm_, refuse_inside_step

if TYPE_CHECKING:
    from ..session import Session
    from .features import Features
    from .half.loss_scaler import LossScaler
    from .state.groups import Groups
    from .state.loading import OptimizerState

__all__ = ["MISSING", "NamesOfFP16"]

_OF_FP16 = "fp16: True in the parameters; without it a loss is not scaled"
MISSING = {
    **{
        name: entry.says for name, entry in under("DistributedOptimizer").items() if entry.kind == "attribute"
    },
    **dict.fromkeys(("loss_scaler", "loss_scale"), _OF_FP16),
}
"""Attributes of features that are not there, and what they belong to."""


class NamesOfFP16:
    """Methods that mean something without master weights too."""

    optimizer: Any
    param_groups: list[dict[str, Any]]
    _session: Session
    _features: Features
    _groups: Groups
    _state: OptimizerState

    if TYPE_CHECKING:  # the optimizer's own

        def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]: ...

        def load_state_dict(self, state_dict: dict[str, Any], gather_if_shard: bool = True) -> None: ...

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite: never, without fp16.

        An object around an optimizer that says so itself is asked, here and below.
        """
        if self._features.scaling is not None:
            return self._features.scaling.overflow
        return bool(getattr(self.optimizer, "overflow", False))

    @property
    def loss_scaler(self) -> LossScaler:
        """What decides the loss scale in fp16; it has ``loss_scale`` too."""
        scaling = self._features.scaling
        if scaling is None:
            raise AttributeError("loss_scaler")  # asked of the inner one next, see __getattr__
        return scaling.scaler

    @property
    def loss_scale(self) -> float:
        """By which ``model.backward`` multiplies a loss in fp16; may be set, between steps."""
        scaling = self._features.scaling
        if scaling is None:
            raise AttributeError("loss_scale")
        return scaling.scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._features.scaling is None:
            self.optimizer.loss_scale = value
        else:
            self._features.scaling.scaler.loss_scale = value

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clips the optimizer's gradients by the norm of all of them. Collective over the mp group.

        In half precision these are the masters', unscaled; ``torch.nn.utils.clip_grad_norm_`` would clip
        those of the parameters. Without, there are no others. In fp16 it is collective over all ranks.

        Args:
            max_norm: they are scaled down to it.
            norm_type: of the norm; may be ``inf``.

        Returns:
            The norm before clipping, the same on every rank of the group; -1 if a gradient of fp16 was not
            finite.
        """
        refuse_inside_step(self._session, "optimizer.clip_master_grads()")
        if self._features.half is not None and self._groups.stand_ins is not None:
            return self._features.clip(max_norm, norm_type)
        if (own := getattr(self.optimizer, "clip_master_grads", None)) is not None:
            with self._here():
                return float(own(max_norm, norm_type))
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return float(clip_grad_norm_(parameters, max_norm, norm_type))

    def reload_model_params(self) -> None:
        """Masters become what the parameters are; without fp16 they are the same tensors.

        Parameters that were changed count by themselves; this rounds the other masters too.
        """
        self._state.loaded_masters = False
        if self._groups.stand_ins is not None:
            self._groups.stand_ins.follow(exactly=True)
        elif (own := getattr(self.optimizer, "reload_model_params", None)) is not None:
            with self._here():
                own()

    def _here(self) -> contextlib.AbstractContextManager[None]:
        return self._groups.here()

    def _param_id_to_index(self) -> dict[int, int]:
        """Positions in state dicts, by id of this rank's parameters and of what is stepped in their place."""
        found: dict[int, int] = {}
        for order in self._groups.positions():
            for position in order:
                parameter = self._groups.parameter_at(position)
                found[id(parameter)] = found[id(self._groups.stand_in_of(parameter))] = position
        return found

    def orig_state_dict(self) -> dict[str, Any]:
        """The inner optimizer's own state, of this rank's parameters or shards, numbered from 0."""
        with self._here():
            return self.optimizer.state_dict()

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """:meth:`local_state_dict` under the name of SMP 1.10."""
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: dict[str, Any], gather_if_shard: bool = True) -> None:
        """:meth:`load_state_dict` under the name of SMP 1.10."""
        self.load_state_dict(state_dict, gather_if_shard)
