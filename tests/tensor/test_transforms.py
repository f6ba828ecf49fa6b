"""Transformations of torch.func, and forward-mode AD, are refused by name before ranks exchange anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import smp_lite as smp
from smp_lite.comm.groups.axis import Axis
from smp_lite.errors import SMPError
from smp_lite.nn.distributed import Region
from smp_lite.nn.one_d import (
    Attention,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from smp_lite.nn.sequence import SequenceMesh, cross_entropy_sequence, ring_attention
from smp_lite.nn.three_d import Linear3D, Mesh3D
from smp_lite.nn.two_d import LayerNorm2D, Linear2D, Mesh2D

TWO = Axis("tp", range(2), 0)
B, S, H = 2, 4, 8
Call = Callable[[Tensor], Tensor]


def _forward_mode(call: Call, x: Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[Call, Tensor], object]] = {
    "grad": lambda call, x: torch.func.grad(lambda y: call(y).sum())(x),
    "vjp": lambda call, x: torch.func.vjp(call, x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)),
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    "forward mode": _forward_mode,
}


def _with_embedding() -> Call:
    embedding = VocabParallelEmbedding(4, H, axis=TWO)
    return lambda x: x + embedding(torch.zeros(B, S, dtype=torch.long))


LAYERS: dict[str, Callable[[], Call]] = {
    "column": lambda: ColumnParallelLinear(H, H, axis=TWO),
    "row": lambda: RowParallelLinear(2 * H, H, axis=TWO),
    "attention": lambda: Attention(H, 2, axis=TWO),
    "embedding": _with_embedding,
    "loss": lambda: (
        lambda x: vocab_parallel_cross_entropy(x, torch.zeros(x.shape[:-1], dtype=torch.long), axis=TWO)
    ),
    "2D": lambda: Linear2D(2 * H, 2 * H, Mesh2D.from_ranks(range(4), 0)),
    "2D norm": lambda: LayerNorm2D(2 * H, Mesh2D.from_ranks(range(4), 0)),
    "3D": lambda: Linear3D(2 * H, 2 * H, Mesh3D.from_ranks(range(8), 0), "in"),
    "ring": lambda: (
        lambda x: ring_attention(x[:, None], x[:, None], x[:, None], SequenceMesh.from_ranks(range(2), 0))
    ),
    "loss of a sequence": lambda: (
        lambda x: cross_entropy_sequence(
            x, torch.zeros(x.shape[:-1], dtype=torch.long), SequenceMesh.from_ranks(range(2), 0), H
        )
    ),
}


def refused(call: Call, transform: str) -> None:
    x = torch.randn(B, S, H)
    said = "forward-mode AD" if transform == "forward mode" else r"torch.func \(grad, vjp, jvp, vmap"
    with pytest.raises(
        SMPError, match=rf"{said}.*split over ranks.*torch.autograd.grad.*leave the layer whole"
    ):
        TRANSFORMS[transform](call, x)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_an_axis_or_a_mesh(layer: str, transform: str) -> None:
    if (layer, transform) != ("embedding", "forward mode"):  # nothing of it is dual
        refused(LAYERS[layer](), transform)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("own_batches", [True, False])
@pytest.mark.parametrize("splits_features", [True, False])
def test_distributed_modules(
    transform: str, own_batches: bool, splits_features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp.init_in_memory({"partitions": 1})
    region = Region(TWO, own_batches, splits_features)
    monkeypatch.setattr(Region, "of_session", classmethod(lambda cls: region))
    refused(smp.nn.DistributedLinear(H, H), transform)
    layer = smp.nn.DistributedTransformerLayer(2, 4, H, 16)
    refused(lambda x: layer((x, None))[0], transform)


def test_one_rank_and_calls_of_modules_go_through() -> None:
    one = Axis("tp", range(1), 0)
    linear = ColumnParallelLinear(H, H, axis=one)
    x = torch.randn(B, H)
    expected = linear.weight.sum(0).expand(B, H)
    torch.testing.assert_close(torch.func.grad(lambda y: linear(y).sum())(x), expected)
    changed = torch.func.functional_call(linear, {"weight": torch.eye(H), "bias": torch.zeros(H)}, (x,))
    torch.testing.assert_close(changed, x)
