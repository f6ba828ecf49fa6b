"""What the tests of 3D layers run in the ranks. Every rank knows the dense layer and the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp_lite.comm.groups.axis import elements_received
from smp_lite.nn.layout import layout_of
from smp_lite.nn.one_d import Attention
from smp_lite.nn.three_d import (
    Attention3D,
    Classifier3D,
    Embedding3D,
    LayerNorm3D,
    Layout3D,
    Linear3D,
    Mesh3D,
    Residual3D,
    RMSNorm3D,
    Sequential3D,
    VocabEmbedding3D,
    cross_entropy_3d,
)
from tests.tensor.grid.dense import Transformer, assert_gradients_near, assert_near, compare, converted
from tests.tensor.grid.ranks import mesh_3d


def _compare(
    dense: nn.Module,
    layer: Any,
    inputs: list[torch.Tensor],
    mesh: Mesh3D,
    *,
    ids: bool = False,
    **options: Any,
) -> None:
    """In the layouts that the layer takes and gives."""
    split = mesh.split_batch if ids else mesh.split_input
    compare(
        dense,
        layer,
        inputs,
        lambda x: split(x, layer.takes),
        lambda y: mesh.gather_output(y, layer.gives),
        **options,
    )


def linear(dtype: torch.dtype) -> None:
    mesh = mesh_3d()
    for layout in Layout3D:
        for k, n, bias, regather in ((8, 6, True, False), (4, 12, True, True), (8, 2, False, True)):
            dense = nn.Linear(k, n, bias, dtype=dtype)
            layer = Linear3D.from_dense(dense, mesh, layout, regather=regather)
            _compare(dense, layer, [torch.randn(8, 3, k, dtype=dtype)], mesh)


def norms(dtype: torch.dtype) -> None:
    mesh = mesh_3d()
    x = 3 + 2 * torch.randn(8, 3, 6, dtype=dtype)
    for layout in Layout3D:
        for dense in (
            nn.LayerNorm(6, dtype=dtype),
            nn.LayerNorm(6, 0.1, bias=False, dtype=dtype),
            nn.LayerNorm(6, elementwise_affine=False),
        ):
            _randomize(dense)
            _compare(dense, LayerNorm3D.from_dense(dense, mesh, layout), [x], mesh)
        for dense in (nn.RMSNorm(6, dtype=dtype), nn.RMSNorm(6, 0.1, False)):
            _randomize(dense)
            _compare(dense, RMSNorm3D.from_dense(dense, mesh, layout), [x], mesh)


def embeddings(dtype: torch.dtype) -> None:
    mesh = mesh_3d()
    ids = torch.randint(0, 9, (8, 5))
    ids[0, 0] = 3
    for kind in (Embedding3D, VocabEmbedding3D):
        for layout in Layout3D:
            for padding_idx in (None, 3):
                dense = nn.Embedding(9, 6, padding_idx, dtype=dtype)
                _compare(dense, kind.from_dense(dense, mesh, layout), [ids], mesh, ids=True)


def attention(dtype: torch.dtype) -> None:
    mesh = mesh_3d()
    x = torch.randn(8, 5, 16, dtype=dtype)
    keep = torch.rand(8, 1, 5, 5) > 0.3
    keep[..., 0] = True
    add = torch.randn(4, 5, 5, dtype=dtype)
    for layout in Layout3D:
        for dense, masks in (
            (Attention(16, 4, causal=True, dtype=dtype), [None]),
            (Attention(16, 4, 2, head_dim=6, bias=False, dtype=dtype), [None, keep, add]),
        ):
            for mask in masks:
                dense.zero_grad()
                layer = Attention3D.from_dense(dense, mesh, layout, regather=mask is None)
                options = {} if mask is None else {"mask": (mesh.split_mask(mask, layout), mask)}
                _compare(dense, layer, [x], mesh, **options)


def loss(dtype: torch.dtype, classes: int) -> None:
    mesh = mesh_3d()
    targets = torch.randint(0, classes, (8, 5))
    targets[1, 1:3] = -100
    targets[7] = -100
    for layout in Layout3D:
        for options in ({}, {"label_smoothing": 0.2}, {"reduction": "sum"}):
            dense = nn.Linear(6, classes, options == {}, dtype=dtype)
            x = torch.randn(8, 5, 6, dtype=dtype, requires_grad=True)
            expected = F.cross_entropy(dense(x).flatten(0, 1), targets.flatten(), **options)
            (expected * 3).backward()
            y = x.detach().clone().requires_grad_()
            head = Classifier3D.from_dense(dense, mesh, layout)
            logits = head(mesh.split_input(y, layout))
            assert_near(mesh.gather_output(logits, head.gives, classes), dense(x), "logits")
            mine = mesh.split_batch(targets, head.gives)
            found = cross_entropy_3d(logits, mine, mesh, head.gives, classes, **options)
            assert_near(found, expected, "loss")
            (found * 3).backward()
            assert_near(y.grad, x.grad, "gradient of the input")
            assert_gradients_near(head, dense)
            assert torch.equal(head.to_dense().weight, dense.weight)


def split_transformer(dense: nn.Module, mesh: Mesh3D, start: Layout3D) -> nn.Module:
    """Its blocks take and give the layout in which it starts."""
    kinds: dict[type[nn.Module], Callable[..., nn.Module]] = {
        nn.LayerNorm: LayerNorm3D.from_dense,
        nn.RMSNorm: RMSNorm3D.from_dense,
        nn.Linear: Linear3D.from_dense,
        Attention: Attention3D.from_dense,
        nn.Embedding: Embedding3D.from_dense,
    }

    def convert(name: str, module: nn.Module) -> nn.Module | None:
        if name == "words":
            return VocabEmbedding3D.from_dense(module, mesh, start)
        if name == "head":
            return Classifier3D.from_dense(module, mesh, start)
        make = kinds.get(type(module))
        layout = start.swapped if name.endswith("down") else start
        return None if make is None else make(module, mesh, layout)

    split = converted(dense, convert)
    split.head.weight = split.words.weight
    return split


def transformer(dtype: torch.dtype, recompute: str) -> None:
    mesh = mesh_3d()
    for start in Layout3D:
        dense = Transformer(11, 6, 16, 4, 2, dtype=dtype)
        split = split_transformer(dense, mesh, start)
        split.recompute = recompute
        ids, targets = torch.randint(0, 11, (2, 8, 6))
        positions = torch.arange(6)
        expected = F.cross_entropy(dense(ids, positions).flatten(0, 1), targets.flatten())
        expected.backward()
        logits = split(mesh.split_batch(ids, start), positions)
        mine = mesh.split_batch(targets, start.swapped)
        found = cross_entropy_3d(logits, mine, mesh, start.swapped, 11)
        assert_near(found, expected, "loss")
        found.backward()
        assert_gradients_near(split, dense)


def pairs(dtype: torch.dtype) -> None:
    """Residual branches of a pair each, one after another."""
    mesh = mesh_3d()
    dense = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
    ).to(dtype)
    branches = []
    for norm, up, act, down in dense:  # type: ignore[misc]
        layers = (
            LayerNorm3D.from_dense(norm, mesh, "in"),
            Linear3D.from_dense(up, mesh, "in"),
            act,
            Linear3D.from_dense(down, mesh, "out"),
        )
        branches.append(Residual3D(*layers))
    split = Sequential3D(*branches)
    x = torch.randn(4, 8, dtype=dtype)
    y = x
    for branch in dense:
        y = y + branch(y)
    y.square().sum().backward()
    found = mesh.gather_output(split(mesh.split_input(x, "in")), "in")
    assert_near(found, y)
    found.square().sum().backward()
    assert_gradients_near(split, dense)


def volumes(m: int, k: int, n: int, regather: bool) -> dict[str, Fraction]:
    """Elements received by this rank in forward, for the input's and for both gradients."""
    mesh = mesh_3d()
    axes = [mesh.input, mesh.weight, mesh.output]

    def received() -> Fraction:
        return sum((sum(elements_received(axis).values(), Fraction(0)) for axis in axes), Fraction(0))

    found = {}
    for wanted in ("input", "weight", "both"):
        layer = Linear3D.from_dense(nn.Linear(k, n, bias=False), mesh, "out", regather=regather)
        x = mesh.split_input(torch.randn(m, k), "out").requires_grad_(wanted != "weight")
        layer.weight.requires_grad_(wanted != "input")
        before = received()
        y = layer(x)
        found["forward"] = received() - before
        before = received()
        y.sum().backward()
        found[wanted] = received() - before
    return found


def coordinates() -> tuple[int, int, int, int]:
    """This rank, and its indices i, j, k."""
    mesh = mesh_3d()
    rank = mesh.weight.ranks[mesh.weight.index]
    for axis, step in ((mesh.weight, 1), (mesh.input, mesh.d), (mesh.output, mesh.d**2)):
        assert axis.ranks == tuple(rank + (place - axis.index) * step for place in range(mesh.d))
    return rank, mesh.weight.index, mesh.input.index, mesh.output.index


def parts() -> None:
    """Where activations and parameters lie."""
    mesh = mesh_3d()
    i, j, k, d = mesh.weight.index, mesh.input.index, mesh.output.index, mesh.d
    x = torch.randn(8, 8)
    rows, columns = x.chunk(d * d)[i * d + j], 8 // d
    assert torch.equal(mesh.split_input(x, "in"), rows[:, k * columns : (k + 1) * columns])
    rows = x.chunk(d * d)[i * d + k]
    assert torch.equal(mesh.split_input(x, "out"), rows[:, j * columns : (j + 1) * columns])
    for layout in Layout3D:
        assert torch.equal(mesh.gather_batch(mesh.split_batch(x, layout), layout), x)
        assert torch.equal(mesh.gather_output(mesh.split_input(x, layout), layout), x)
    dense = nn.Linear(8, 6)
    layer = Linear3D.from_dense(dense, mesh, "in")
    assert torch.equal(layer.weight, dense.weight.chunk(d)[j].chunk(d * d, 1)[k * d + i])
    assert torch.equal(layer.bias, dense.bias.chunk(d)[j])
    found = layout_of(layer.bias)
    assert found is not None and found.partial_over == (mesh.weight, mesh.output)


def _randomize(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
