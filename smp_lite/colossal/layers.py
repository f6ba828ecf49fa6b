"""Layers under Colossal-AI's names. They find the ranks that share them in the session.

Like the layers that they are, they take and give this rank's parts of activations. A list of layers begins
with :class:`SplitInput` and ends with :class:`GatherOutput`, so that batches, targets and the loss are whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..comm.groups.axis import Axis
from ..errors import SMPError
from ..nn import one_d, three_d, two_d
from ..nn.sequence import SequenceMesh
from ..nn.three_d import Mesh3D
from ..nn.two_d import Mesh2D, Mesh25D
from .context import colossal_plan
from .registry import LAYERS

__all__ = [
    "GatherOutput",
    "Linear1D_Col",
    "Linear1D_Row",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "SplitInput",
    "tensor_mesh",
]

_Mesh = Axis | Mesh2D | Mesh25D | Mesh3D | SequenceMesh


def tensor_mesh(mode: str | None = None, *, for_: str = "tensor_mesh", **options: Any) -> Any:
    """The ranks of this one's tensor block, as the layers of its mode take them: an axis (1d), a
    :class:`~smp_lite.nn.two_d.Mesh2D`, :class:`~smp_lite.nn.two_d.Mesh25D`,
    :class:`~smp_lite.nn.three_d.Mesh3D` or :class:`~smp_lite.nn.sequence.SequenceMesh`.

    Args:
        mode: that the caller needs; None: any.
        for_: what needs it, for the error.
        options: of the mesh: ``zigzag`` of a SequenceMesh.

    Raises:
        SMPError: ``parallel.tensor`` has no mode, or another one.
    """
    session, plan = colossal_plan(for_)
    found = plan.tensor.mode
    if found is None or mode not in (None, found):
        wanted = "a mode" if mode is None else f"mode {mode!r}"
        raise SMPError(
            f"{for_} needs {wanted} in parallel.tensor, which has {found!r}: write "
            f"tensor=dict(size=..., mode={mode or '1d'!r})"
        )
    if found == "1d":
        return session.axis("tp")
    if found == "2d":
        return Mesh2D(session.axis("tp_row"), session.axis("tp_col"))
    if found == "2.5d":
        return Mesh25D(session.axis("tp_dep"), session.axis("tp_row"), session.axis("tp_col"))
    if found == "3d":
        return Mesh3D(session.axis("tp_in"), session.axis("tp_w"), session.axis("tp_out"))
    return SequenceMesh(session.axis("tp"), **options)


def _refuse_skip(name: str, skip_bias_add: bool) -> None:
    if skip_bias_add:
        raise ValueError(f"{name}: skip_bias_add=True is not supported; leave it out and add no bias")


@LAYERS.register_module
class Linear1D_Col(one_d.ColumnParallelLinear):
    """``torch.nn.Linear`` split by output features; see :class:`smp_lite.nn.one_d.ColumnParallelLinear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        _refuse_skip("Linear1D_Col", skip_bias_add)
        axis = tensor_mesh("1d", for_="Linear1D_Col")
        super().__init__(in_features, out_features, bias, axis=axis, gather_output=gather_output, dtype=dtype)


@LAYERS.register_module
class Linear1D_Row(one_d.RowParallelLinear):
    """``torch.nn.Linear`` split by input features; see :class:`smp_lite.nn.one_d.RowParallelLinear`.

    ``parallel_input``: it gets this rank's features, as :class:`Linear1D_Col` gives them; False: all of them.
    (The default has been both in Colossal-AI; what does not fit is an error of shapes.)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        parallel_input: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        _refuse_skip("Linear1D_Row", skip_bias_add)
        axis = tensor_mesh("1d", for_="Linear1D_Row")
        super().__init__(
            in_features, out_features, bias, axis=axis, input_is_parallel=parallel_input, dtype=dtype
        )


class _OnSumma(two_d.Linear2D):
    mode: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        skip_bias_add: bool = False,
    ) -> None:
        name = type(self).__name__
        _refuse_skip(name, skip_bias_add)
        super().__init__(in_features, out_features, tensor_mesh(self.mode, for_=name), bias, dtype=dtype)


@LAYERS.register_module
class Linear2D(_OnSumma):
    """``torch.nn.Linear`` on q x q ranks; see :class:`smp_lite.nn.two_d.Linear2D`."""

    mode = "2d"


@LAYERS.register_module
class Linear2p5D(_OnSumma):
    """``torch.nn.Linear`` on depth x q x q ranks; see :class:`smp_lite.nn.two_d.Linear2D`."""

    mode = "2.5d"


@LAYERS.register_module
class Linear3D(three_d.Linear3D):
    """``torch.nn.Linear`` on d x d x d ranks; see :class:`smp_lite.nn.three_d.Linear3D`.

    ``layout`` is that of its input, ``in`` or ``out``. Colossal-AI goes by how many layers were made before,
    which a layer that is made in another order, or used twice, makes wrong; so here it must be said.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        layout: str | None = None,
    ) -> None:
        if layout is None:
            raise ValueError(
                "Linear3D needs layout='in' or layout='out', that of its input: the first layer takes what "
                "SplitInput gives ('in'), and every layer gives the other one"
            )
        mesh = tensor_mesh("3d", for_="Linear3D")
        super().__init__(in_features, out_features, mesh, layout, bias, dtype=dtype)


class _Between(nn.Module):
    """Between whole tensors and parts; in mode 1d, and without one, activations are whole anyway."""

    def __init__(self, layout: str | None = None) -> None:
        super().__init__()
        self.mesh: _Mesh | None = None
        _, plan = colossal_plan(type(self).__name__)
        if plan.tensor.mode not in (None, "1d"):
            self.mesh = tensor_mesh(for_=type(self).__name__)
        if layout is not None and not isinstance(self.mesh, Mesh3D):
            raise ValueError(f"{type(self).__name__}: layout={layout!r} is for mode 3d")
        self.layout = (layout or "in",) if isinstance(self.mesh, Mesh3D) else ()


@LAYERS.register_module
class SplitInput(_Between):
    """This rank's part of a whole tensor, which must be the same on all ranks of a tensor block.

    Whole numbers, which are ids, have no features to split; floating ones have, in their last dimension.

    Args:
        layout: of mode 3d: ``in`` (the default) or ``out``.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return x
        mesh: Any = self.mesh
        if x.is_floating_point():
            return mesh.split_input(x, *self.layout)
        return mesh.split_batch(x, *self.layout)


@LAYERS.register_module
class GatherOutput(_Between):
    """The whole tensor of all ranks' parts, on all of them.

    Args:
        layout: of mode 3d: that of the parts, ``in`` (the default) or ``out``.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh: Any = self.mesh
        return x if mesh is None else mesh.gather_output(x, *self.layout)
