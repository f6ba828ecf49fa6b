"""3D layers in one process: layouts, fake tensors, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_lite.nn.three_d import (
    Attention3D,
    Classifier3D,
    Embedding3D,
    LayerNorm3D,
    Layout3D,
    LayoutError,
    Linear3D,
    Mesh3D,
    Residual3D,
    RMSNorm3D,
    Sequential3D,
    VocabEmbedding3D,
    cross_entropy_3d,
)
from tests.tensor.grid.cases_3d import split_transformer
from tests.tensor.grid.dense import Transformer

MESH = Mesh3D.from_ranks(range(8), 5)


@pytest.mark.parametrize("start", list(Layout3D))
def test_a_fake_transformer_trains_without_other_ranks(start: Layout3D) -> None:
    with FakeTensorMode():
        split = split_transformer(Transformer(11, 6, 16, 4, 2), MESH, start)
        split.recompute = "blocks"
        ids = torch.randint(0, 11, (8, 6))
        logits = split(MESH.split_batch(ids, start), torch.arange(6))
        assert logits.shape == (2, 6, 6)
        loss = cross_entropy_3d(logits, MESH.split_batch(ids, start.swapped), MESH, start.swapped, 11)
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in split.parameters())


def _fake(call: object) -> None:
    assert callable(call)
    with FakeTensorMode():
        call()


def _x(layout: Layout3D | str = "in") -> torch.Tensor:
    return MESH.split_input(torch.zeros(4, 8), layout)


def _twice(first: str, second: str) -> torch.Tensor:
    y: torch.Tensor = Linear3D(8, 8, MESH, first)(_x(first))
    return Linear3D(8, 8, MESH, second)(y)


def test_the_right_order() -> None:
    _fake(lambda: _twice("in", "out"))
    _fake(lambda: _twice("out", "in"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: _twice("in", "in"), r"Linear3D takes layout 'in', and got .* 'out': every product swaps"),
        (lambda: LayerNorm3D(8, MESH, "out")(_x()), "LayerNorm3D takes layout 'out', and got .* 'in'"),
        (lambda: RMSNorm3D(8, MESH, "in")(_x("out")), "RMSNorm3D takes layout 'in'"),
        (
            lambda: Attention3D(8, 2, MESH, "out")(MESH.split_input(torch.zeros(4, 3, 8), "in")),
            "Linear3D takes layout 'out'",
        ),
        (lambda: MESH.gather_output(_x(), "out"), "gather_output takes layout 'out'"),
        (
            lambda: Embedding3D(9, 8, MESH, "in")(MESH.split_batch(torch.zeros(4).long(), "out")),
            "Embedding3D takes layout 'in'",
        ),
        (
            lambda: cross_entropy_3d(
                Classifier3D(8, 9, MESH, "in")(_x()), torch.zeros(1).long(), MESH, "in", 9
            ),
            r"\(logits\) takes layout 'in', and got .* 'out'",
        ),
        (
            lambda: cross_entropy_3d(
                Classifier3D(8, 9, MESH, "in")(_x()),
                MESH.split_batch(torch.zeros(4).long(), "in"),
                MESH,
                "out",
                9,
            ),
            r"\(targets\) takes layout 'out', and got .* 'in'",
        ),
        (
            lambda: Sequential3D(Linear3D(8, 8, MESH, "in"), nn.GELU(), Linear3D(8, 8, MESH, "in")),
            r"module 0 \(Linear3D\) gives layout 'out', and module 2 \(Linear3D\) takes 'in'.* layout='out'",
        ),
        (
            lambda: Residual3D(LayerNorm3D(8, MESH, "in"), Linear3D(8, 8, MESH, "in")),
            "take layout 'in' and give 'out', which cannot be added: .* even number",
        ),
    ],
)
def test_a_wrong_order_is_a_layout_error(call: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        _fake(call)


def test_modules_of_unknown_layout() -> None:
    with pytest.raises(TypeError, match=r"module 1 \(Softmax\) does not say what layout"):
        Sequential3D(Linear3D(8, 8, MESH, "in"), nn.Softmax(-1))
    with pytest.raises(ValueError, match="needs a module that has a layout"):
        Sequential3D(nn.GELU())
    chain = Sequential3D(Linear3D(8, 8, MESH, "in"), nn.ReLU(), Attention3D(8, 2, MESH, "out"))
    assert (chain.takes, chain.gives) == (Layout3D.IN, Layout3D.OUT)
    assert (chain[1:].takes, chain[:2].gives) == (Layout3D.OUT, Layout3D.OUT)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Linear3D(6, 8, MESH, "in"),
            r"in_features 6 .* \(output 2 x weight 2\); the nearest: 4 or 8",
        ),
        (lambda: Linear3D(6, 8, MESH, "out"), r"in_features 6 .* \(input 2 x weight 2\)"),
        (lambda: Linear3D(8, 7, MESH, "in"), r"out_features 7 .* \(input 2\); the nearest: 6 or 8"),
        (lambda: Classifier3D(7, 9, MESH, "in"), "Classifier3D: in_features 7"),
        (lambda: Embedding3D(9, 7, MESH, "in"), "Embedding3D: embedding_dim 7"),
        (lambda: VocabEmbedding3D(9, 7, MESH, "in"), "VocabEmbedding3D: embedding_dim 7"),
        (lambda: LayerNorm3D(7, MESH, "in"), "LayerNorm3D: features 7 .* 6 or 8"),
        (lambda: Attention3D(12, 3, MESH, "in"), "Attention3D: num_heads 3 .* 2 or 4"),
        (lambda: Linear3D(8, 8, MESH, "up"), r"layout='up': it is Layout3D.IN \('in'\)"),
        (lambda: MESH.split_batch(torch.zeros(8), "up"), "layout='up'"),
        (
            lambda: MESH.split_input(torch.zeros(6, 8), "in"),
            r"\[6, 8\], 6 .*weight 2 x input 2\); .* 4 or 8",
        ),
        (lambda: Linear3D(8, 8, MESH, "in")(torch.zeros(4, 8)), r"\[4, 8\]: this is the whole"),
        (lambda: Mesh3D.from_ranks(range(4), 0), "3D mesh: 4 ranks are no cube; the nearest: 1 or 8"),
        (
            lambda: Mesh3D(MESH.input, MESH.weight, Mesh3D.from_ranks([0], 0).output),
            "input, weight and output must have one size, got 2, 2, 1",
        ),
    ],
)
def test_errors_name_what_is_wrong(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=words):
        make()
