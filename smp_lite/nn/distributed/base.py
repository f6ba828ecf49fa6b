"""What all distributed modules share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..keeping import note_wholes
from ..layout import ParameterLayout, layout_of, part_of, whole_of
from ..one_d.parts import SplitModule, layout_over
from .region import Region

__all__ = ["DistributedModule", "check_known", "note_places"]


class DistributedModule(SplitModule):
    """Base of the modules that are split over tensor-parallel ranks, and of a user's own ones.

    Attributes:
        region: how its activations lie; of the session, at construction.
        names_of_all_batches: own parameters that are whole, and used on the batches of all ranks.
        place: its name in the model, for errors, and to tell it from layers like it.
    """

    region: Region
    place: str = ""
    names_of_all_batches: tuple[str, ...] = ()

    def __init__(self) -> None:
        nn.Module.__init__(self)  # not that of torch's layer whose class it may have as well
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

    def meet(self, x: torch.Tensor) -> None:
        """All ranks bring their own batches to this layer now; see :meth:`Region.meet`.

        Raises:
            SMPMismatch: another rank is in another layer, or has an input of another shape.
        """
        if self.region.own_batches:
            self.region.meet(f"{self.place or 'a layer'} ({type(self).__name__})", x)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, ..., H)`` outside to what it is inside, of all ranks at once.

        Raises:
            SMPMismatch: as of :meth:`meet`.
        """
        self.meet(x)
        return self.region.enter(x)

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
        note_wholes(self, whole)

    def whole_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict with whole tensors; collective over the tensor-parallel ranks."""
        return {
            name: tensor.detach().clone() if layout is None else whole_of(tensor, layout)
            for name, tensor in self.state_dict(keep_vars=True).items()
            for layout in (layout_of(tensor),)
        }


def note_places(root: nn.Module) -> None:
    """Tells all distributed modules of a model their names."""
    for name, module in root.named_modules():
        if isinstance(module, DistributedModule):
            module.place = name


def check_known(module: str, options: dict[str, object]) -> None:
    """Options of kernels are taken: ``fused_*`` choose how, not what is computed.

    Raises:
        TypeError: another one, which this module does not know.
    """
    unknown = [name for name in options if not name.startswith("fused_")]
    if unknown:
        raise TypeError(f"smp.nn.{module} got an unexpected keyword argument {unknown[0]!r}")
