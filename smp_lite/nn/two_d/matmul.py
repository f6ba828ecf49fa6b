"""Matrix products on a q x q grid: SUMMA (van de Geijn and Watts 1997), in the three forms that a layer and
its backward need (Xu et al. 2021, arXiv 2104.05343, algorithms 1 to 3).

Block (i, j) of every matrix lies on the rank at row i, column j. Each form takes blocks and gives the block
of the result, so any number of products follow one another. A rank receives, with whole matrices A, B and C:

========  ===============  ===================================  ==================================
form      result           communication                        elements received, q ranks a side
========  ===============  ===================================  ==================================
``ab``    ``C = A B``      broadcasts A along a row, B down     ``(q - 1) / q^2 (|A| + |B|)``
                           a column
``abt``   ``C = A B^T``    broadcasts B down a column, sums     ``(q - 1) / q^2 (|B| + |C|)``
                           along a row
``atb``   ``C = A^T B``    broadcasts A along a row, sums       ``(q - 1) / q^2 (|A| + |C|)``
                           down a column
========  ===============  ===================================  ==================================

The blocks may be stored transposed: what multiplies two of them is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..autocast import cast_for_autocast, without_autocast
from ..grid.checks import compute_dtype
from ..transforms import refuse_transforms
from .mesh import SummaMesh

__all__ = ["ab", "abt", "atb", "classify", "project"]

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ab(a: torch.Tensor, b: torch.Tensor, mesh: SummaMesh, multiply: Multiply = torch.matmul) -> torch.Tensor:
    """Block (i, j) of ``A B``: the sum over t of ``A(i, t) B(t, j)``."""
    total = multiply(mesh.col.broadcast(a, 0), mesh.row.broadcast(b, 0))
    if mesh.q == 1:
        return total
    dtype = total.dtype
    total = total.to(compute_dtype(dtype))
    for t in range(1, mesh.q):
        total += multiply(mesh.col.broadcast(a, t), mesh.row.broadcast(b, t))
    return total.to(dtype)


def abt(a: torch.Tensor, b: torch.Tensor, mesh: SummaMesh, multiply: Multiply) -> torch.Tensor:
    """Block (i, j) of ``A B^T``: the sum over s of ``A(i, s) B(j, s)^T``, which ``multiply`` gives."""
    mine = None
    for t in range(mesh.q):
        found = mesh.col.reduce(multiply(a, mesh.row.broadcast(b, t)), t)
        mine = found if found is not None else mine
    assert mine is not None  # t was this rank's column once
    return mine


def atb(a: torch.Tensor, b: torch.Tensor, mesh: SummaMesh, multiply: Multiply) -> torch.Tensor:
    """Block (i, j) of ``A^T B``: the sum over s of ``A(s, i)^T B(s, j)``."""
    mine = None
    for t in range(mesh.q):
        found = mesh.row.reduce(multiply(mesh.col.broadcast(a, t), b), t)
        mine = found if found is not None else mine
    assert mine is not None
    return mine


def project(x: torch.Tensor, weight: torch.Tensor, mesh: SummaMesh) -> torch.Tensor:
    """``X W``, of a weight stored as torch's Linear does.

    Args:
        x: ``(batch / q, ..., K / q)``.
        weight: ``(N / q, K / q)``; K lies over ``mesh.row``, N over ``mesh.col``.

    Returns:
        ``(batch / q, ..., N / q)``.
    """
    return _run(_Project, x, weight, mesh)


def classify(x: torch.Tensor, table: torch.Tensor, mesh: SummaMesh) -> torch.Tensor:
    """``X E^T``, of a table of rows such as that of an embedding.

    Args:
        x: ``(batch / q, ..., K / q)``.
        table: ``(V / q, K / q)``; V lies over ``mesh.row``, K over ``mesh.col``.

    Returns:
        ``(batch / q, ..., V / q)``.
    """
    return _run(_Classify, x, table, mesh)


def _run(function: type[Function], x: torch.Tensor, weight: torch.Tensor, mesh: SummaMesh) -> torch.Tensor:
    refuse_transforms(x, weight)
    x, weight = cast_for_autocast(x, weight)
    with without_autocast(x):
        result: torch.Tensor = function.apply(x, weight, mesh)
    return result


def _transposed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``A^T B``, of rows in any number of dimensions."""
    return a.flatten(0, -2).t() @ b.flatten(0, -2)


def _product_transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``B^T A``: the transpose of ``A^T B``, as a weight is stored."""
    return _transposed_product(b, a)


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, mesh: SummaMesh) -> torch.Tensor:
        ctx.mesh = mesh
        ctx.save_for_backward(x, weight)
        return ab(x, weight, mesh, F.linear)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        of_x = abt(grad, weight, ctx.mesh, torch.matmul) if needs_x else None
        of_weight = atb(x, grad, ctx.mesh, _product_transposed) if needs_weight else None
        return of_x, of_weight, None


class _Classify(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, mesh: SummaMesh) -> torch.Tensor:
        ctx.mesh = mesh
        ctx.save_for_backward(x, table)
        return abt(x, table, mesh, F.linear)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, table = ctx.saved_tensors
        needs_x, needs_table = ctx.needs_input_grad[:2]
        of_x = ab(grad, table, ctx.mesh) if needs_x else None
        of_table = atb(grad, x, ctx.mesh, _transposed_product) if needs_table else None
        return of_x, of_table, None
