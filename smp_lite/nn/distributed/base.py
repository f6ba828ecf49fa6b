"""What all distributed modules share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout import ParameterLayout, layout_of, part_of, whole_of
from ..one_d.parts import SplitModule, layout_over
from .region import Region

__all__ = ["DistributedModule", "check_known"]


class DistributedModule(SplitModule):
    """Base of the modules that are split over tensor-parallel ranks, and of a user's own ones.

    Attributes:
        region: how its activations lie; of the session, at construction.
        names_of_all_batches: own parameters that are whole, and used on the batches of all ranks.
    """

    region: Region
    names_of_all_batches: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.region = Region.of_session()
        self.smp_layouts = {}

    def share(self, dims: dict[str, int | None]) -> None:
        """Keeps this rank's part of parameters that were made whole.

        Args:
            dims: for each own parameter the dimension that is split; None: it stays whole.
        """
        axis = self.region.axis
        layouts: dict[str, ParameterLayout] = {}
        for name, dim in dims.items():
            parameter = self._parameters.get(name)
            if parameter is not None and dim is not None and axis.size > 1:
                layouts[name] = layout_over(parameter, axis, dim)
        self.keep_parts(layouts)

    def note_all_batches(self, names: Sequence[str]) -> None:
        """These own parameters, which are whole, are used on the batches of all ranks."""
        if self.region.own_batches:
            self.names_of_all_batches = tuple(n for n in names if self._parameters.get(n) is not None)

    def load_whole(self, whole: dict[str, torch.Tensor]) -> None:
        """Takes this rank's parts of a state dict of whole tensors.

        Raises:
            KeyError: a parameter or buffer is missing in it.
        """
        with torch.no_grad():
            for name, tensor in self.state_dict(keep_vars=True).items():
                layout = layout_of(tensor)
                tensor.copy_(whole[name] if layout is None else part_of(whole[name], layout))

    def whole_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict with whole tensors; collective over the tensor-parallel ranks."""
        return {
            name: tensor.detach().clone() if layout is None else whole_of(tensor, layout)
            for name, tensor in self.state_dict(keep_vars=True).items()
            for layout in (layout_of(tensor),)
        }


def check_known(module: str, options: dict[str, object]) -> None:
    """Options of kernels are taken: ``fused_*`` choose how, not what is computed.

    Raises:
        TypeError: another one, which this module does not know.
    """
    unknown = [name for name in options if not name.startswith("fused_")]
    if unknown:
        raise TypeError(f"smp.nn.{module} got an unexpected keyword argument {unknown[0]!r}")
