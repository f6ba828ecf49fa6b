"""The meshes of the tests, in the ranks of a job."""

from __future__ import annotations

import os
from functools import cache

import torch

from smp_lite.comm.transports.connect import connect
from smp_lite.comm.transports.transport import Transport
from smp_lite.nn.three_d import Mesh3D
from smp_lite.nn.two_d import Mesh2D, Mesh25D


@cache
def transport() -> Transport:
    """Of this process."""
    return connect(os.environ)


def mesh_2d(depth: int = 0) -> Mesh2D | Mesh25D:
    """Of all ranks; a 2D one with a depth of 0. From here on all draw the same random numbers."""
    torch.manual_seed(0)
    job = transport()
    if depth:
        return Mesh25D.from_ranks(range(job.size), job.rank, job.collectives, depth=depth)
    return Mesh2D.from_ranks(range(job.size), job.rank, job.collectives)


def mesh_3d() -> Mesh3D:
    """Of all ranks. From here on all draw the same random numbers."""
    torch.manual_seed(0)
    job = transport()
    return Mesh3D.from_ranks(range(job.size), job.rank, job.collectives)
