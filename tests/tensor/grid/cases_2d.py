"""What the tests of 2D and 2.5D layers run in the ranks, which all know the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp_lite.comm.groups.axis import Axis, elements_received
from smp_lite.nn.layout import layout_of, part_of, sum_partial_gradients, whole_of
from smp_lite.nn.one_d import Attention
from smp_lite.nn.two_d import (
    Attention2D,
    Classifier2D,
    Embedding2D,
    LayerNorm2D,
    Linear2D,
    Mesh25D,
    RMSNorm2D,
    VocabEmbedding2D,
    cross_entropy_2d,
)
from smp_lite.nn.two_d.mesh import SummaMesh
from tests.tensor.grid.dense import Transformer, assert_gradients_near, assert_near, compare, converted
from tests.tensor.grid.ranks import mesh_2d


def linear(depth: int, dtype: torch.dtype) -> None:
    mesh = mesh_2d(depth)
    for k, n, bias in ((8, 12, True), (6, 2, False), (4, 4, True)):
        dense = nn.Linear(k, n, bias, dtype=dtype)
        layer = Linear2D.from_dense(dense, mesh)
        compare(dense, layer, [torch.randn(8, 3, k, dtype=dtype)], mesh.split_input, mesh.gather_output)


def linear_starts_as_the_dense_one(depth: int) -> None:
    mesh = mesh_2d(depth)
    torch.manual_seed(3)
    dense = nn.Linear(8, 4)
    torch.manual_seed(3)
    again = Linear2D(8, 4, mesh).to_dense()
    assert torch.equal(again.weight, dense.weight)
    assert torch.equal(again.bias, dense.bias)


def norms(depth: int, dtype: torch.dtype) -> None:
    mesh = mesh_2d(depth)
    x = 3 + 2 * torch.randn(8, 3, 8, dtype=dtype)
    for dense in (
        nn.LayerNorm(8, dtype=dtype),
        nn.LayerNorm(8, 0.1, bias=False, dtype=dtype),
        nn.LayerNorm(8, elementwise_affine=False),
    ):
        _randomize(dense)
        compare(dense, LayerNorm2D.from_dense(dense, mesh), [x], mesh.split_input, mesh.gather_output)
    for dense in (nn.RMSNorm(8, dtype=dtype), nn.RMSNorm(8, 0.1, False)):
        _randomize(dense)
        compare(dense, RMSNorm2D.from_dense(dense, mesh), [x], mesh.split_input, mesh.gather_output)


def embeddings(depth: int, dtype: torch.dtype) -> None:
    mesh = mesh_2d(depth)
    ids = torch.randint(0, 9, (8, 5))
    ids[0, 0] = 3
    for kind in (Embedding2D, VocabEmbedding2D):
        for padding_idx in (None, 3):
            dense = nn.Embedding(9, 8, padding_idx, dtype=dtype)
            layer = kind.from_dense(dense, mesh)
            compare(dense, layer, [ids], mesh.split_batch, mesh.gather_output)


def attention(depth: int, dtype: torch.dtype) -> None:
    mesh = mesh_2d(depth)
    x = torch.randn(8, 5, 16, dtype=dtype)
    keep = torch.rand(8, 1, 5, 5) > 0.3
    keep[..., 0] = True
    add = torch.randn(8, 4, 5, 5, dtype=dtype)
    for dense, masks in (
        (Attention(16, 4, causal=True, dtype=dtype), [None]),
        (Attention(16, 4, 2, head_dim=6, bias=False, dtype=dtype), [None, keep, add, keep[0, 0], add[0]]),
    ):
        for mask in masks:
            dense.zero_grad()
            layer = Attention2D.from_dense(dense, mesh)
            options = {} if mask is None else {"mask": (mesh.split_mask(mask), mask)}
            compare(dense, layer, [x], mesh.split_input, mesh.gather_output, **options)
    # Causal, with a mask besides.
    dense = Attention(16, 4, dtype=dtype)
    causal = Attention2D.from_dense(dense, mesh)
    causal.causal = True
    past = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask, both in ((keep, keep & past), (add, add.masked_fill(~past, -torch.inf))):
        found = mesh.gather_output(causal(mesh.split_input(x), mesh.split_mask(mask)))
        assert_near(found, dense(x, both), "causal with a mask")


def torch_attention(depth: int) -> None:
    mesh = mesh_2d(depth)
    dense = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(8, 5, 16, dtype=torch.float64)
    context = torch.randn(8, 7, 16, dtype=torch.float64)
    layer = Attention2D.from_dense(dense, mesh)
    found = mesh.gather_output(layer(mesh.split_input(x), context=mesh.split_input(context)))
    assert_near(found, dense(x, context, context)[0], "cross attention")

    def turn(heads: torch.Tensor) -> torch.Tensor:
        return heads.roll(1, -1) * torch.arange(1, 6, dtype=heads.dtype).unsqueeze(-1)

    rotated = mesh.gather_output(layer(mesh.split_input(x), rotate=turn))
    q, k, v = (p(x).unflatten(-1, (4, 4)).transpose(1, 2) for p in list(layer.to_dense().children())[:3])
    expected = F.scaled_dot_product_attention(turn(q), turn(k), v).transpose(1, 2).flatten(2)
    assert_near(rotated, dense.out_proj(expected), "rotated")


def loss(depth: int, dtype: torch.dtype, classes: int) -> None:
    mesh = mesh_2d(depth)
    targets = torch.randint(0, classes, (8, 5))
    targets[1, 1:3] = -100
    targets[7] = -100  # so the ranks have different numbers of rows
    for options in ({}, {"label_smoothing": 0.2}, {"reduction": "sum"}, {"ignore_index": 1}):
        dense = nn.Linear(8, classes, options == {}, dtype=dtype)
        x = torch.randn(8, 5, 8, dtype=dtype, requires_grad=True)
        labels = targets.clamp(min=0) if "ignore_index" in options else targets
        expected = F.cross_entropy(dense(x).flatten(0, 1), labels.flatten(), **options)
        (expected * 3).backward()
        y = x.detach().clone().requires_grad_()
        head = Classifier2D.from_dense(dense, mesh)
        logits = head(mesh.split_input(y))
        assert_near(mesh.gather_output(logits, classes), dense(x), "logits")
        found = cross_entropy_2d(logits, mesh.split_batch(labels), mesh, classes, **options)
        assert_near(found, expected, "loss")
        (found * 3).backward()
        assert_near(y.grad, x.grad, "gradient of the input")
        assert_gradients_near(head, dense)
        assert torch.equal(head.to_dense().weight, dense.weight)
        if head.weight.grad is not None and mesh.row.index == mesh.q - 1:
            unused = head.padded_classes - classes
            assert not head.weight.grad[head.weight.shape[0] - unused :].any()


def padding_never_matters(depth: int) -> None:
    """Whatever the logits of the padding are, loss and gradients are the same to the bit."""
    mesh = mesh_2d(depth)
    logits = torch.randn(8, 3, 12, dtype=torch.float64)
    targets = torch.randint(0, 9, (8, 3))
    results = []
    for value in (0.0, 1e6, -torch.inf, torch.nan):
        filled = logits.clone()
        filled[..., 9:] = value
        mine = mesh.split_input(filled).requires_grad_()
        found = cross_entropy_2d(mine, mesh.split_batch(targets), mesh, 9, label_smoothing=0.1)
        found.backward()
        results.append((found.detach(), mine.grad))
    for found, grad in results:
        assert torch.equal(found, results[0][0])
        assert torch.equal(grad, results[0][1])
        assert not mesh.gather_output(grad)[..., 9:].any()


def transformer(depth: int, dtype: torch.dtype, recompute: str) -> None:
    mesh = mesh_2d(depth)
    q = mesh.q
    dense = Transformer(11, 6, 4 * q * q, 2 * q, q, dtype=dtype)
    split = split_transformer(dense, mesh)
    split.recompute = recompute
    ids, targets = torch.randint(0, 11, (2, 2 * q * max(depth, 1), 6))
    positions = torch.arange(6)
    expected = F.cross_entropy(dense(ids, positions).flatten(0, 1), targets.flatten())
    expected.backward()
    logits = split(mesh.split_batch(ids), positions)
    found = cross_entropy_2d(logits, mesh.split_batch(targets), mesh, 11)
    assert_near(found, expected, "loss")
    found.backward()
    assert split.head.weight is split.words.weight
    assert_gradients_near(split, dense)


def split_transformer(dense: nn.Module, mesh: SummaMesh) -> nn.Module:
    kinds: dict[type[nn.Module], Callable[[Any, SummaMesh], nn.Module]] = {
        nn.LayerNorm: LayerNorm2D.from_dense,
        nn.RMSNorm: RMSNorm2D.from_dense,
        nn.Linear: Linear2D.from_dense,
        Attention: Attention2D.from_dense,
        nn.Embedding: Embedding2D.from_dense,
    }

    def convert(name: str, module: nn.Module) -> nn.Module | None:
        if name == "words":
            return VocabEmbedding2D.from_dense(module, mesh)
        if name == "head":
            return Classifier2D.from_dense(module, mesh)
        make = kinds.get(type(module))
        return None if make is None else make(module, mesh)

    split = converted(dense, convert)
    split.head.weight = split.words.weight
    return split


def low_precision(depth: int) -> None:
    mesh = mesh_2d(depth)
    dense = nn.Linear(8, 12, dtype=torch.bfloat16)
    x = torch.randn(8, 3, 8).bfloat16()
    found = mesh.gather_output(Linear2D.from_dense(dense, mesh)(mesh.split_input(x)))
    assert_near(found, dense(x), "bfloat16")
    wide = nn.Linear(8, 12)
    layer = Linear2D.from_dense(wide, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        y, z = wide(x.float()), layer(mesh.split_input(x.float()))
    assert_near(mesh.gather_output(z), y, "autocast")
    y.sum().backward()
    mesh.gather_output(z).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    whole = whole_of(layer.weight.grad, layout_of(layer.weight))
    for axis in mesh.copies:
        whole = axis.all_reduce(whole)
    assert (whole - wide.weight.grad).abs().max() < 0.1


def volumes(depth: int, m: int, k: int, n: int) -> dict[str, Fraction]:
    """Elements received by this rank in forward, for the input's and for the weight's gradient."""
    mesh = mesh_2d(depth)
    axes = [mesh.row, mesh.col, *mesh.copies]
    found = {}
    for wanted in ("input", "weight"):
        layer = Linear2D.from_dense(nn.Linear(k, n, bias=False), mesh)
        x = mesh.split_input(torch.randn(m, k)).requires_grad_(wanted == "input")
        layer.weight.requires_grad_(wanted == "weight")
        before = _received(axes)
        y = layer(x)
        found["forward"] = _received(axes) - before
        before = _received(axes)
        y.sum().backward()
        found[wanted] = _received(axes) - before
    before = _received(axes)
    sum_partial_gradients(layer)
    found["depth"] = _received(axes) - before
    return found


def _received(axes: list[Axis]) -> Fraction:
    return sum((sum(elements_received(axis).values(), Fraction(0)) for axis in axes), Fraction(0))


def coordinates(depth: int) -> tuple[int, ...]:
    """(depth,) row, column and the world ranks of each axis."""
    mesh = mesh_2d(depth)
    axes = ([mesh.depth] if isinstance(mesh, Mesh25D) else []) + [mesh.row, mesh.col]
    assert all(axis.ranks[axis.index] == axes[0].ranks[axes[0].index] for axis in axes)
    return (*(axis.index for axis in axes), *(axis.ranks for axis in axes))


def parts_of_parameters(depth: int) -> None:
    """A part is what the layout says, and the padding's rows are zeros that stay so."""
    mesh = mesh_2d(depth)
    x = torch.randn(8, 8)
    assert torch.equal(mesh.gather_batch(mesh.split_batch(x)), x)
    assert torch.equal(mesh.gather_output(mesh.split_input(x)), x)
    dense = nn.Embedding(9, 8)
    layer = VocabEmbedding2D.from_dense(dense, mesh)
    layout = layout_of(layer.weight)
    assert layout is not None
    assert layout.partial_over == mesh.copies
    rows = 12 // mesh.q if mesh.q == 2 else 9
    start = rows * mesh.row.index
    width = 8 // mesh.q
    expected = torch.cat([dense.weight, torch.zeros(3, 8)])[start : start + rows]
    expected = expected[:, width * mesh.col.index : width * (mesh.col.index + 1)]
    assert torch.equal(layer.weight, expected)
    assert torch.equal(part_of(dense.weight, layout), expected)


def _randomize(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
