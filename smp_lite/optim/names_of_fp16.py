"""What scripts ask an SMP optimizer for, whether or not they train in fp16 or with shards."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..smp_v1.names import under
from .norms import clip_grad_norm_

__all__ = ["LOSS_SCALING", "MISSING", "NamesOfFP16"]

LOSS_SCALING = frozenset(
    ["init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"]
)
"""Arguments of dynamic loss scaling, which may also stand for themselves."""


MISSING = {name: entry for name, entry in under("DistributedOptimizer").items() if entry.kind == "attribute"}
"""Attributes of features that are not there yet."""


class NamesOfFP16:
    """Methods that mean something without master weights too."""

    optimizer: Any
    param_groups: list[dict[str, Any]]

    if TYPE_CHECKING:  # the optimizer's own

        def _here(self) -> contextlib.AbstractContextManager[None]: ...

        def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]: ...

        def load_state_dict(self, state_dict: dict[str, Any], gather_if_shard: bool = True) -> None: ...

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite: never, without fp16.

        An object around an optimizer that says so itself is asked, here and below.
        """
        return bool(getattr(self.optimizer, "overflow", False))

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clips the optimizer's gradients by the norm of all of them. Collective over the mp group.

        Without fp16 there are no master gradients beside the parameters' own.

        Args:
            max_norm: they are scaled down to it.
            norm_type: of the norm; may be ``inf``.

        Returns:
            The norm before clipping, the same on every rank of the group.
        """
        if (own := getattr(self.optimizer, "clip_master_grads", None)) is not None:
            with self._here():
                return float(own(max_norm, norm_type))
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return float(clip_grad_norm_(parameters, max_norm, norm_type))

    def reload_model_params(self) -> None:
        """Masters become what the parameters are; without fp16 they are the same tensors."""
        if (own := getattr(self.optimizer, "reload_model_params", None)) is not None:
            with self._here():
                own()

    def orig_state_dict(self) -> dict[str, Any]:
        """The inner optimizer's own state, of this rank's parameters, numbered from 0."""
        with self._here():
            return self.optimizer.state_dict()

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """:meth:`local_state_dict` under the name of SMP 1.10."""
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: dict[str, Any], gather_if_shard: bool = True) -> None:
        """:meth:`load_state_dict` under the name of SMP 1.10."""
        self.load_state_dict(state_dict, gather_if_shard)
