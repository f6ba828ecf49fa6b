"""Linear layers on a 3D mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...comm.groups.axis import Axis
from ..autocast import cast_for_autocast
from ..grid.checks import check_divides, check_features
from ..grid.laid_out import LaidOut
from ..layout import ParameterLayout
from ..one_d.parts import next_multiple
from .layout import Layout3D, check_layout, tagged
from .matmul import product
from .mesh import Mesh3D

__all__ = ["Classifier3D", "Linear3D", "Shared3D", "linear_together", "vocabulary_layout"]


class Shared3D(LaidOut):
    """What the layers of this folder share."""

    mesh: Mesh3D
    takes: Layout3D
    """The layout of what it takes."""
    gives: Layout3D
    """The layout of what it gives."""

    def _place(self, mesh: Mesh3D, layout: Layout3D | str, *, swaps: bool) -> None:
        self.mesh, self.takes = mesh, Layout3D.of(layout)
        self.gives = self.takes.swapped if swaps else self.takes

    @property
    def _over(self) -> tuple[Axis, Axis, Axis]:
        """i, r and c of what it takes: rows lie over i and r, features over c."""
        return (*self.mesh.rows(self.takes), self.mesh.features(self.takes))

    def _check_input(self, x: torch.Tensor, features: int) -> None:
        name = type(self).__name__
        check_features(name, x, features // self.mesh.d, features)
        check_layout(name, x, self.takes)

    def _given(self, y: torch.Tensor) -> torch.Tensor:
        return tagged(y, self.gives, self.mesh.d)

    def extra_repr(self) -> str:
        return f"takes={self.takes.value!r}, gives={self.gives.value!r}"


class Linear3D(Shared3D):
    """``torch.nn.Linear`` on a mesh: takes ``(batch / d^2, ..., K / d)`` of one layout and gives
    ``(batch / d^2, ..., N / d)`` of the other. So layers come in pairs, before something is added that had
    not gone through them.

    Args:
        in_features: K, a multiple of d^2.
        out_features: N, a multiple of d.
        mesh: the ranks that share it.
        layout: of the input.
        bias: whether there is one.
        regather: keep only this rank's parts for backward, which gathers input and weight again.
        device, dtype: of the parameters.

    The first values are those that torch's Linear draws, so all ranks need the same random state.

    Raises:
        ValueError: a size does not divide; names the nearest that do.
    """

    dense_type = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh3D,
        layout: Layout3D | str,
        bias: bool = True,
        *,
        regather: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(dense, mesh, layout, regather)

    @classmethod
    def from_dense(
        cls, dense: nn.Linear, mesh: Mesh3D, layout: Layout3D | str, *, regather: bool = False
    ) -> Linear3D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh, layout, regather)
        return layer

    def _take(self, dense: nn.Linear, mesh: Mesh3D, layout: Layout3D | str, regather: bool) -> None:
        self._place(mesh, layout, swaps=True)
        self.in_features, self.out_features, self.regather = dense.in_features, dense.out_features, regather
        i, r, c = self._over
        check_divides("Linear3D: in_features", dense.in_features, (c, i))
        check_divides("Linear3D: out_features", dense.out_features, (r,))
        shape = (dense.out_features, dense.in_features)
        layouts = {"weight": ParameterLayout(shape, ((r,), (c, i)))}
        if dense.bias is not None:
            layouts["bias"] = ParameterLayout(shape[:1], ((r,),), (i, c))
        self._hold(dense, layouts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (result,) = linear_together(input, (self,))
        return result

    def to_dense(self) -> nn.Linear:
        """The whole layer, on all ranks; collective."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        self._give(dense)
        return dense


def linear_together(input: torch.Tensor, layers: Sequence[Linear3D]) -> tuple[torch.Tensor, ...]:
    """Several layers of one input, mesh and layout, in one product: the input is gathered once for all."""
    first = layers[0]
    for layer in layers:
        layer._check_input(input, layer.in_features)
    weights = [layer.weight for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    y = product(input, weight, first.mesh, first.takes, weight_dim=1, regather=first.regather)
    parts = y.split([each.shape[0] for each in weights], -1)
    return tuple(layer._given(_add_bias(part, layer.bias)) for layer, part in zip(layers, parts, strict=True))


def _add_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + cast_for_autocast(bias)[0]


def vocabulary_layout(rows: int, features: int, layer: Shared3D) -> ParameterLayout:
    """Of a table with a row for each word: rows lie over r and i, features over c."""
    i, r, c = layer._over
    padded = next_multiple(rows, layer.mesh.d**2)
    return ParameterLayout((rows, features), ((r, i), (c,)), padded={0: padded} if padded > rows else {})


class Classifier3D(Shared3D):
    """A Linear layer to a vocabulary, whose weight lies as that of a
    :class:`~smp_lite.nn.three_d.VocabEmbedding3D` that gives the layout which this one takes; tie them by
    ``classifier.weight = embedding.weight``.

    Args:
        in_features: a multiple of d.
        num_classes: any number; it is padded to a multiple of d^2.
        mesh, layout, bias, device, dtype: as in :class:`Linear3D`.

    Gives ``(batch / d^2, ..., padded_classes / d)`` of the other layout, in which the targets must be split
    too. Logits of the padding are zero; the loss (:func:`~smp_lite.nn.three_d.cross_entropy_3d`) leaves them
    out.
    """

    dense_type = nn.Linear

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mesh: Mesh3D,
        layout: Layout3D | str,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype), mesh, layout)

    @classmethod
    def from_dense(cls, dense: nn.Linear, mesh: Mesh3D, layout: Layout3D | str) -> Classifier3D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh, layout)
        return layer

    def _take(self, dense: nn.Linear, mesh: Mesh3D, layout: Layout3D | str) -> None:
        self._place(mesh, layout, swaps=True)
        self.in_features, self.num_classes = dense.in_features, dense.out_features
        self.padded_classes = next_multiple(dense.out_features, mesh.d**2)
        i, r, c = self._over
        check_divides("Classifier3D: in_features", dense.in_features, (c,))
        layouts = {"weight": vocabulary_layout(dense.out_features, dense.in_features, self)}
        if dense.bias is not None:
            padded = {0: self.padded_classes}
            layouts["bias"] = ParameterLayout((dense.out_features,), ((r,),), (i, c), padded=padded)
        self._hold(dense, layouts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input(input, self.in_features)
        return self._given(
            _add_bias(product(input, self.weight, self.mesh, self.takes, weight_dim=0), self.bias)
        )

    def to_dense(self) -> nn.Linear:
        """The whole layer, on all ranks; collective."""
        dense = nn.Linear(self.in_features, self.num_classes, self.bias is not None, device="meta")
        self._give(dense)
        return dense
