"""What the tests of sequence-parallel layers run in the ranks, which all know the whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp_lite.comm.groups.axis import elements_received
from smp_lite.nn.one_d import Attention
from smp_lite.nn.sequence import (
    SequenceAttention,
    SequenceClassifier,
    SequenceEmbedding,
    SequenceLayerNorm,
    SequenceLinear,
    SequenceMesh,
    SequenceRMSNorm,
    SequenceVocabEmbedding,
    all_to_all_attention,
    cross_entropy_sequence,
    ring_attention,
)
from tests.tensor.grid.dense import Transformer, assert_gradients_near, assert_near, compare, converted
from tests.tensor.grid.ranks import transport

WAYS: dict[str, Callable[..., torch.Tensor]] = {"ring": ring_attention, "all_to_all": all_to_all_attention}


def mesh_of_all(zigzag: bool = True) -> SequenceMesh:
    """Of all ranks; from here on all draw the same random numbers."""
    torch.manual_seed(0)
    job = transport()
    return SequenceMesh.from_ranks(range(job.size), job.rank, job.collectives, zigzag=zigzag)


def attention(way: str, dtype: torch.dtype, zigzag: bool) -> None:
    """Against attention by the formula, also where queries may attend to nothing."""
    mesh = mesh_of_all(zigzag)
    tokens, heads, kv_heads = 16, 8, 4
    keep = torch.rand(2, 1, tokens, tokens) > 0.4
    keep[0, :, 3] = False  # attends to nothing
    keep[1, :, :, 9] = False  # nobody attends to it
    add = torch.randn(heads, tokens, tokens, dtype=dtype)
    add[2, 5] = -torch.inf
    late = torch.rand(2, 1, 1, tokens) > 0.3  # padding of keys
    late[..., 0] = True
    for causal in (False, True):
        for mask in (None, keep, add, late):
            for width in (6, 4):
                _attend(mesh, WAYS[way], dtype, causal, mask, tokens, tokens, heads, kv_heads, width)
    _attend(mesh, WAYS[way], dtype, False, None, tokens, 2 * tokens, heads, heads, 6)
    if way == "ring":
        _attend(mesh, WAYS[way], dtype, True, None, tokens, tokens, 3, 1, 5)


def _attend(
    mesh: SequenceMesh,
    run: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    causal: bool,
    mask: torch.Tensor | None,
    tokens: int,
    keys: int,
    heads: int,
    kv_heads: int,
    width: int,
) -> None:
    shapes = ((2, heads, tokens, 4), (2, kv_heads, keys, 4), (2, kv_heads, keys, width))
    whole = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    expected = by_formula(*whole, causal, mask)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    parts = [mesh.split_input(x.detach().transpose(1, 2)).transpose(1, 2) for x in whole]
    parts = [part.clone().requires_grad_() for part in parts]
    found = run(*parts, mesh, causal=causal, mask=None if mask is None else mesh.split_mask(mask))
    assert_near(mesh.gather_output(found.transpose(1, 2)).transpose(1, 2), expected, "output")
    found.backward(mesh.split_input(grad.transpose(1, 2)).transpose(1, 2))
    for name, part, x in zip("qkv", parts, whole, strict=True):
        assert x.grad is not None and part.grad is not None
        mine = mesh.split_input(x.grad.transpose(1, 2)).transpose(1, 2)
        assert_near(part.grad, mine, f"gradient of {name}, {causal=}, {None if mask is None else mask.shape}")


def by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
) -> torch.Tensor:
    """Softmax attention, with zeros for a query that may attend to nothing."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0) @ v


def large_scores(way: str) -> None:
    """Exponentials that only fit in relation to the largest one, which may come first or last."""
    mesh = mesh_of_all()
    for factor in (200.0, -200.0):
        q, k, v = (torch.randn(1, 4, 16, 4, dtype=torch.float64) for _ in range(3))
        q, k = q.abs() * 30, k.abs() * torch.linspace(factor, -factor, 16, dtype=torch.float64).view(16, 1)
        expected = by_formula(q, k, v, True, None)
        parts = [mesh.split_input(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
        found = WAYS[way](*parts, mesh, causal=True)
        assert_near(mesh.gather_output(found.transpose(1, 2)).transpose(1, 2), expected)


def layers(dtype: torch.dtype, zigzag: bool) -> None:
    mesh = mesh_of_all(zigzag)
    x = torch.randn(2, 16, 6, dtype=dtype)
    ids = torch.randint(0, 9, (2, 16))
    made = [
        (nn.Linear(6, 5, dtype=dtype), SequenceLinear, x),
        (nn.Linear(6, 5, False, dtype=dtype), SequenceLinear, x),
        (nn.LayerNorm(6, dtype=dtype), SequenceLayerNorm, x),
        (nn.LayerNorm(6, 0.1, bias=False, dtype=dtype), SequenceLayerNorm, x),
        (nn.LayerNorm(6, elementwise_affine=False), SequenceLayerNorm, x),
        (nn.RMSNorm(6, dtype=dtype), SequenceRMSNorm, x),
        (nn.Embedding(9, 6, 3, dtype=dtype), SequenceEmbedding, ids),
        (nn.Embedding(9, 6, dtype=dtype), SequenceVocabEmbedding, ids),
        (nn.Embedding(9, 6, 3, dtype=dtype), SequenceVocabEmbedding, ids),
    ]
    for dense, kind, value in made:
        compare(dense, kind.from_dense(dense, mesh), [value], mesh.split_input, mesh.gather_output)


def attention_layer(exchange: str, dtype: torch.dtype) -> None:
    mesh = mesh_of_all()
    x = torch.randn(2, 16, 12, dtype=dtype)
    keep = torch.rand(2, 1, 16, 16) > 0.3
    keep[..., 0] = True
    dense = Attention(12, 4, causal=True, dtype=dtype)
    layer = SequenceAttention.from_dense(dense, mesh, exchange)
    compare(dense, layer, [x], mesh.split_input, mesh.gather_output)
    dense = Attention(12, 8, 4, head_dim=3, bias=False, dtype=dtype)
    layer = SequenceAttention.from_dense(dense, mesh, exchange)
    options = {"mask": (mesh.split_mask(keep), keep)}
    compare(dense, layer, [x], mesh.split_input, mesh.gather_output, **options)


def loss(vocabulary_split: bool, dtype: torch.dtype) -> None:
    mesh = mesh_of_all()
    targets = torch.randint(0, 9, (2, 16))
    targets[0, :5] = -100
    for options in ({}, {"label_smoothing": 0.2}, {"reduction": "sum"}):
        dense = nn.Linear(6, 9, dtype=dtype)
        x = torch.randn(2, 16, 6, dtype=dtype, requires_grad=True)
        expected = F.cross_entropy(dense(x).flatten(0, 1), targets.flatten(), **options)
        expected.backward()
        y = x.detach().clone().requires_grad_()
        head = (SequenceClassifier if vocabulary_split else SequenceLinear).from_dense(dense, mesh)
        found = cross_entropy_sequence(
            head(mesh.split_input(y)),
            mesh.split_batch(targets),
            mesh,
            9,
            vocabulary_split=vocabulary_split,
            **options,
        )
        assert_near(found, expected, "loss")
        found.backward()
        assert_near(y.grad, x.grad, "gradient of the input")
        assert_gradients_near(head, dense)
        assert torch.equal(head.to_dense().weight, dense.weight)


def split_transformer(
    dense: nn.Module, mesh: SequenceMesh, exchange: str, vocabulary_split: bool
) -> nn.Module:
    kinds: dict[type[nn.Module], Callable[..., nn.Module]] = {
        nn.LayerNorm: SequenceLayerNorm.from_dense,
        nn.RMSNorm: SequenceRMSNorm.from_dense,
        nn.Linear: SequenceLinear.from_dense,
        nn.Embedding: SequenceEmbedding.from_dense,
    }

    def convert(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, Attention):
            return SequenceAttention.from_dense(module, mesh, exchange)
        if vocabulary_split and name in ("words", "head"):
            kind: Any = SequenceVocabEmbedding if name == "words" else SequenceClassifier
            return kind.from_dense(module, mesh)
        make = kinds.get(type(module))
        return None if make is None else make(module, mesh)

    split = converted(dense, convert)
    split.head.weight = split.words.weight
    return split


def transformer(exchange: str, dtype: torch.dtype, recompute: str, vocabulary_split: bool) -> None:
    mesh = mesh_of_all()
    dense = Transformer(11, 16, 16, 8, 4, dtype=dtype)
    split = split_transformer(dense, mesh, exchange, vocabulary_split)
    split.recompute = recompute
    ids, targets = torch.randint(0, 11, (2, 3, 16))
    expected = F.cross_entropy(dense(ids, torch.arange(16)).flatten(0, 1), targets.flatten())
    expected.backward()
    logits = split(mesh.split_batch(ids), mesh.positions(16))
    mine = mesh.split_batch(targets)
    found = cross_entropy_sequence(logits, mine, mesh, 11, vocabulary_split=vocabulary_split)
    assert_near(found, expected, "loss")
    found.backward()
    assert_gradients_near(split, dense)


def volumes(way: str) -> dict[str, Fraction]:
    """Elements received in forward and backward, for a batch of 2, 16 tokens, 4 heads of 8 features."""
    mesh = mesh_of_all()
    tokens = 16 // mesh.size
    q, k, v = (torch.randn(2, 4, tokens, 8, requires_grad=True) for _ in range(3))
    found = WAYS[way](q, k, v, mesh, causal=True)
    forward = sum(elements_received(mesh.axis).values(), Fraction(0))
    found.sum().backward()
    return {"forward": forward, "backward": sum(elements_received(mesh.axis).values(), Fraction(0)) - forward}


def low_precision() -> None:
    """bfloat16 through the ring: as near to the exact result as torch's own attention is."""
    mesh = mesh_of_all()
    q, k, v = (torch.randn(1, 4, 16, 8).bfloat16() for _ in range(3))
    expected = by_formula(q.float(), k.float(), v.float(), True, None)
    parts = [mesh.split_input(x.transpose(1, 2)).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    found = ring_attention(*parts, mesh, causal=True)
    found.float().sum().backward()
    assert all(part.grad is not None and part.grad.dtype == torch.bfloat16 for part in parts)
    whole = mesh.gather_output(found.transpose(1, 2)).transpose(1, 2)
    assert (whole.float() - expected).abs().max() < 0.02
