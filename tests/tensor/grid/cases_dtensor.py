"""The products of 2D, 2.5D and 3D against torch's DTensor over gloo, with the placements of each layout."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from smp_lite.nn.layout import layout_of, sum_partial_gradients, whole_of
from smp_lite.nn.three_d import Linear3D
from smp_lite.nn.two_d import Linear2D, Mesh25D
from tests.tensor.grid.dense import assert_near
from tests.tensor.grid.ranks import mesh_2d, mesh_3d, transport


@contextmanager
def gloo() -> Iterator[None]:
    """A torch process group of all ranks, for the time of a test."""
    job = transport()
    port = torch.zeros(1, dtype=torch.int64)
    if job.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port[0] = server.getsockname()[1]
    pending = job.collectives(tuple(range(job.size))).broadcast(port, 0)
    while not pending.done():
        pass
    store = dist.TCPStore("127.0.0.1", int(port), job.size, job.rank == 0, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _oracle(
    mesh: DeviceMesh, x: torch.Tensor, w: torch.Tensor, on_x: list[Placement], on_w: list[Placement]
) -> tuple[DTensor, DTensor]:
    return (
        distribute_tensor(x, mesh, on_x, src_data_rank=None).requires_grad_(),
        distribute_tensor(w, mesh, on_w, src_data_rank=None).requires_grad_(),
    )


def two_d(depth: int) -> None:
    """X and Y [S0, S1], W [S0, S1]; with depth X and Y [S0, S0, S1], W [R, S0, S1]."""
    mesh = mesh_2d(depth)
    x, dense = torch.randn(8, 6, dtype=torch.float64), nn.Linear(6, 4, False, dtype=torch.float64)
    layer = Linear2D.from_dense(dense, mesh)
    mine = mesh.split_input(x).detach().requires_grad_()
    y = layer(mine)
    y.square().sum().backward()
    sum_partial_gradients(layer)
    on_x: list[Placement] = [Shard(0), Shard(1)]
    on_w: list[Placement] = [Shard(0), Shard(1)]
    ranks = torch.arange(transport().size).view(-1, mesh.q, mesh.q)
    if isinstance(mesh, Mesh25D):
        on_x, on_w = [Shard(0), *on_x], [Replicate(), *on_w]
    else:
        ranks = ranks.squeeze(0)
    with gloo():
        device_mesh = DeviceMesh("cpu", ranks)
        of_x, of_w = _oracle(device_mesh, x, dense.weight.detach().t(), on_x, on_w)
        assert torch.equal(of_x.to_local(), mine)
        assert torch.equal(of_w.to_local(), layer.weight.t())
        of_y = (of_x @ of_w).redistribute(placements=on_x)
        of_y.square().sum().backward()
        assert_near(y, of_y.to_local(), "Y")
        assert mine.grad is not None and layer.weight.grad is not None
        assert of_x.grad is not None and of_w.grad is not None
        assert_near(mine.grad, _local(of_x.grad, on_x), "dX")
        assert_near(layer.weight.grad.t(), _local(of_w.grad, on_w), "dW")


def three_d() -> None:
    """Over (i, j, k): X [S0, S0, S1], W [S0, S1, S0], Y [S0, S1, S0]."""
    mesh = mesh_3d()
    x, dense = torch.randn(8, 8, dtype=torch.float64), nn.Linear(8, 4, False, dtype=torch.float64)
    layer = Linear3D.from_dense(dense, mesh, "in")
    mine = mesh.split_input(x, "in").detach().requires_grad_()
    y = layer(mine)
    y.square().sum().backward()
    assert mine.grad is not None and layer.weight.grad is not None
    of_weight = whole_of(layer.weight.grad, layout_of(layer.weight))  # type: ignore[arg-type]
    on_x: list[Placement] = [Shard(0), Shard(0), Shard(1)]
    on_y: list[Placement] = [Shard(0), Shard(1), Shard(0)]
    d = mesh.d
    with gloo():
        # Rank t is i + d (j + d k).
        device_mesh = DeviceMesh("cpu", torch.arange(d**3).view(d, d, d).permute(2, 1, 0))
        of_x, of_w = _oracle(device_mesh, x, dense.weight.detach().t(), on_x, on_y)
        assert torch.equal(of_x.to_local(), mine)
        of_y = (of_x @ of_w).redistribute(placements=on_y)
        assert_near(y, of_y.to_local(), "Y")
        of_y.square().sum().backward()
        assert of_x.grad is not None and of_w.grad is not None
        assert_near(mine.grad, _local(of_x.grad, on_x), "dX")
        assert_near(of_weight.t(), of_w.grad.full_tensor(), "dW")  # type: ignore[attr-defined]


def _local(grad: torch.Tensor, placements: list[Placement]) -> torch.Tensor:
    assert isinstance(grad, DTensor)
    return grad.redistribute(placements=placements).to_local()
