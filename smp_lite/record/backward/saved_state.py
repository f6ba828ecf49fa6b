"""Parameters and buffers that backwards read, and that calls of other microbatches change unnoticed.

Batch norm in eval mode reads its running statistics again in its backward; what is changed by way of
``.data`` (a codebook, a weight that is clipped) may be kept for one. Autograd does not notice. In one process
a backward comes before the forwards of later microbatches, here it may come after them, so a step that has
both is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ...errors import SMPError
from ..values.calls import ResultMeta

if TYPE_CHECKING:
    from ..recording import Recording

__all__ = ["SavedState"]


class SavedState:
    """Which parameters and buffers the backwards of a step will read."""

    def __init__(self) -> None:
        self._saved: dict[tuple[int, str], tuple[nn.Module, tuple[int, int]]] = {}  # by module and name

    def begin_step(self) -> None:
        self._saved.clear()

    def note(self, name: str, module: nn.Module, meta: ResultMeta, recording: Recording) -> None:
        """A closed call is recorded.

        Raises:
            SMPError: it changes what a backward reads which in one process has run before.
        """
        moment = (recording.microbatch_index, len(recording.backwards))
        for own in meta.unguarded if self._saved else ():
            found = self._saved.get(_key(module, own))
            if found is not None and found[1] != moment:
                raise SMPError(
                    f"{name} changes its {own}, which the backward of an earlier call reads, without "
                    "autograd noticing (.data, or batch norm that is called in eval mode too): in one "
                    "process that backward comes first, here it may come later. Call the module in one mode "
                    "within a step, clone() what backward needs, change it between steps, or train with "
                    "microbatches=1 and one model.backward()"
                )
        if meta.saved_state and torch.is_grad_enabled():
            for own in meta.saved_state:
                self._saved.setdefault(_key(module, own), (module, moment))


def _key(module: nn.Module, name: str) -> tuple[int, str]:
    prefix, _, own = name.rpartition(".")
    return id(module.get_submodule(prefix)), own
