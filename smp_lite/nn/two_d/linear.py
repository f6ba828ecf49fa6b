"""Linear layers on a 2D or 2.5D mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..autocast import cast_for_autocast
from ..grid.checks import check_divides, check_features
from ..grid.laid_out import LaidOut
from ..layout import ParameterLayout
from ..one_d.operations import gather_along
from ..one_d.parts import next_multiple
from .matmul import classify, project
from .mesh import SummaMesh

__all__ = ["Classifier2D", "Linear2D", "Shared2D", "linear_together", "vocabulary_layout"]


class Shared2D(LaidOut):
    """What the layers of this folder share."""

    mesh: SummaMesh

    def _vector(self, what: str, size: int) -> ParameterLayout:
        """A vector over features (bias, gain) lies in ``1 / q^2`` on each rank."""
        check_divides(f"{type(self).__name__}: {what}", size, (self.mesh.col, self.mesh.row))
        return ParameterLayout((size,), ((self.mesh.col, self.mesh.row),), self.mesh.copies)

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return y
        (bias,) = cast_for_autocast(self.bias)
        return y + self._along_features(bias)

    def _along_features(self, vector: torch.Tensor) -> torch.Tensor:
        """Its ``1 / q`` for this column; backward adds up the gradients of the column's rows."""
        return gather_along(vector, self.mesh.row, 0, gradients="summand")


class Linear2D(Shared2D):
    """``torch.nn.Linear`` on a mesh; takes and gives parts ``(batch / q, ..., features / q)``.

    Forward receives ``(q - 1) / q^2 (M K + K N)`` elements on each rank, backward twice that, for M rows of
    the mesh layer, K input and N output features.

    Args:
        in_features: K, a multiple of q.
        out_features: N, a multiple of q, with a bias of q^2.
        mesh: the ranks that share it.
        bias: whether there is one.
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
        mesh: SummaMesh,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype), mesh)

    @classmethod
    def from_dense(cls, dense: nn.Linear, mesh: SummaMesh) -> Linear2D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh)
        return layer

    def _take(self, dense: nn.Linear, mesh: SummaMesh) -> None:
        self.mesh, self.in_features, self.out_features = mesh, dense.in_features, dense.out_features
        check_divides("Linear2D: in_features", dense.in_features, (mesh.row,))
        check_divides("Linear2D: out_features", dense.out_features, (mesh.col,))
        shape = (dense.out_features, dense.in_features)
        layouts = {"weight": ParameterLayout(shape, ((mesh.col,), (mesh.row,)), mesh.copies)}
        if dense.bias is not None:
            layouts["bias"] = self._vector("with a bias, out_features", dense.out_features)
        self._hold(dense, layouts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (result,) = linear_together(input, (self,))
        return result

    def to_dense(self) -> nn.Linear:
        """The whole layer, on all ranks; collective."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        self._give(dense)
        return dense

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


def linear_together(input: torch.Tensor, layers: Sequence[Linear2D]) -> tuple[torch.Tensor, ...]:
    """Several layers of one input and mesh, in one product: the input is broadcast once for all of them."""
    first = layers[0]
    for layer in layers:
        check_features("Linear2D", input, first.in_features // first.mesh.q, layer.in_features)
    weights = [layer.weight for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    parts = project(input, weight, first.mesh).split([each.shape[0] for each in weights], -1)
    return tuple(layer._add_bias(part) for layer, part in zip(layers, parts, strict=True))


def vocabulary_layout(rows: int, features: int, mesh: SummaMesh) -> ParameterLayout:
    """Of a table with a row for each word: rows lie over ``mesh.row``, features over ``mesh.col``."""
    padded = next_multiple(rows, mesh.q**2)
    return ParameterLayout(
        (rows, features), ((mesh.row,), (mesh.col,)), mesh.copies, padded={0: padded} if padded > rows else {}
    )


class Classifier2D(Shared2D):
    """A Linear layer to a vocabulary, whose weight lies as that of
    :class:`~smp_lite.nn.two_d.VocabEmbedding2D` does, so that one can be the other: tie them by
    ``classifier.weight = embedding.weight``.

    Args:
        in_features: a multiple of q.
        num_classes: any number; it is padded to a multiple of q^2.
        mesh, bias, device, dtype: as in :class:`Linear2D`.

    Gives ``(batch / q, ..., padded_classes / q)``. Logits of the padding are zero; the loss
    (:func:`~smp_lite.nn.two_d.cross_entropy_2d`) leaves them out.
    """

    dense_type = nn.Linear

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        mesh: SummaMesh,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype), mesh)

    @classmethod
    def from_dense(cls, dense: nn.Linear, mesh: SummaMesh) -> Classifier2D:
        """This rank's part of a layer that all ranks hold."""
        cls._check_dense(dense)
        layer = cls._empty()
        layer._take(dense, mesh)
        return layer

    def _take(self, dense: nn.Linear, mesh: SummaMesh) -> None:
        self.mesh, self.in_features, self.num_classes = mesh, dense.in_features, dense.out_features
        self.padded_classes = next_multiple(dense.out_features, mesh.q**2)
        check_divides("Classifier2D: in_features", dense.in_features, (mesh.col,))
        layouts = {"weight": vocabulary_layout(dense.out_features, dense.in_features, mesh)}
        if dense.bias is not None:
            layouts["bias"] = ParameterLayout(
                (dense.out_features,), ((mesh.col, mesh.row),), mesh.copies, padded={0: self.padded_classes}
            )
        self._hold(dense, layouts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_features("Classifier2D", input, self.in_features // self.mesh.q, self.in_features)
        return self._add_bias(classify(input, self.weight, self.mesh))

    def to_dense(self) -> nn.Linear:
        """The whole layer, on all ranks; collective."""
        dense = nn.Linear(self.in_features, self.num_classes, self.bias is not None, device="meta")
        self._give(dense)
        return dense

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}"
