"""2D and 2.5D layers in one process: fake tensors, errors, and what keeps a parameter's mark."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_lite.errors import SMPError
from smp_lite.nn.layout import layout_of
from smp_lite.nn.one_d import Attention
from smp_lite.nn.two_d import (
    Attention2D,
    Classifier2D,
    Embedding2D,
    LayerNorm2D,
    Linear2D,
    Mesh2D,
    Mesh25D,
    RMSNorm2D,
    VocabEmbedding2D,
    cross_entropy_2d,
)
from tests.tensor.grid.cases_2d import split_transformer
from tests.tensor.grid.dense import Transformer

MESH = Mesh2D.from_ranks(range(4), 2)
DEEP = Mesh25D.from_ranks(range(8), 7, depth=2)


@pytest.mark.parametrize("mesh", [MESH, DEEP], ids=["2D", "2.5D"])
def test_a_fake_transformer_trains_without_other_ranks(mesh: Mesh2D | Mesh25D) -> None:
    with FakeTensorMode():
        split = split_transformer(Transformer(11, 6, 16, 4, 2), mesh)
        split.recompute = "blocks"
        ids = mesh.split_batch(torch.randint(0, 11, (8, 6)))
        logits = split(ids, torch.arange(6))
        assert logits.shape == (len(ids), 6, 6)
        assert mesh.gather_output(logits, 11).shape == (8, 6, 11)
        loss = cross_entropy_2d(logits, ids, mesh, 11, label_smoothing=0.1)
        assert loss.shape == ()
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in split.parameters())


def test_on_meta_tensors() -> None:
    layer = Linear2D(8, 4, MESH, device="meta")
    assert layer(torch.empty(2, 4, device="meta")).shape == (2, 2)


def test_without_the_other_ranks_it_is_an_error() -> None:
    with pytest.raises(SMPError, match="split over 2 ranks"):
        Linear2D(8, 4, MESH)(torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Linear2D(7, 8, MESH), r"Linear2D: in_features 7 .* 2 parts \(row 2\); the nearest: 6 or 8"),
        (lambda: Linear2D(8, 7, MESH), r"out_features 7 .* \(col 2\); the nearest: 6 or 8"),
        (lambda: Linear2D(8, 6, MESH), r"with a bias, out_features 6 .* \(col 2 x row 2\); .* 4 or 8"),
        (lambda: Classifier2D(3, 9, MESH), r"Classifier2D: in_features 3 .* 2 or 4"),
        (lambda: Embedding2D(9, 6, MESH), r"Embedding2D: embedding_dim 6 .* 4 or 8"),
        (lambda: VocabEmbedding2D(9, 5, MESH), r"VocabEmbedding2D: embedding_dim 5 .* 4 or 6"),
        (lambda: LayerNorm2D(6, MESH), r"LayerNorm2D: features 6 .* 4 or 8"),
        (lambda: RMSNorm2D(3, MESH, elementwise_affine=False), r"RMSNorm2D: features 3 .* 2 or 4"),
        (lambda: Attention2D(12, 3, MESH), r"Attention2D: num_heads 3 .* 2 or 4"),
        (lambda: Attention2D(16, 4, MESH, num_kv_heads=1), r"Attention2D: num_kv_heads 1 .* nearest: 2"),
        (lambda: Attention2D(16, 4, MESH, dropout=0.1), r"Attention2D: dropout=0.1 .* set dropout=0"),
        (lambda: LayerNorm2D.from_dense(nn.LayerNorm([4, 4]), MESH), r"LayerNorm over \[4, 4\]"),
        (
            lambda: Embedding2D.from_dense(nn.Embedding(4, 4, max_norm=1.0), MESH),
            r"Embedding with max_norm=1.0 cannot be split",
        ),
        (lambda: Mesh2D.from_ranks(range(6), 0), r"2D mesh: 6 ranks are no square; the nearest: 4 or 9"),
        (lambda: Mesh25D.from_ranks(range(6), 0, depth=2), r"depth 2: 3 ranks are no square; .* 1 or 4"),
        (lambda: Mesh25D.from_ranks(range(8), 0, depth=3), r"depth=3 does not divide the 8 ranks"),
        (lambda: Mesh2D.from_ranks(range(4), 4), r"rank 4 is not in the block \[0, 1, 2, 3\]"),
        (lambda: Mesh2D.from_ranks([0, 2, 1, 3], 0), r"must ascend, got \[0, 2, 1, 3\]"),
        (
            lambda: Mesh2D(DEEP.row, Mesh2D.from_ranks([0], 0).col),
            r"row and col must have one size, got 2, 1",
        ),
    ],
)
def test_what_does_not_divide_is_an_error_that_names_it(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Linear2D(8, 4, MESH)(torch.zeros(2, 8)), r"got \[2, 8\]: this is the whole .* split_input"),
        (lambda: LayerNorm2D(8, MESH)(torch.zeros(2, 2)), r"parts of \[..., 4\].*split over more ranks"),
        (lambda: RMSNorm2D(16, MESH)(torch.zeros(2, 3)), r"got \[2, 3\]: this is a tensor of another layer"),
        (lambda: MESH.split_input(torch.zeros(3, 8)), r"dimension 0 \(the batch\) .*\[3, 8\], 3 .* 2 or 4"),
        (lambda: MESH.split_input(torch.zeros(4, 7)), r"the features of .*\[4, 7\], 7 .* 6 or 8"),
        (lambda: DEEP.split_batch(torch.zeros(6)), r"\(depth 2 x row 2\); the nearest: 4 or 8"),
        (
            lambda: cross_entropy_2d(torch.zeros(2, 9), torch.zeros(2).long(), MESH, 9),
            r"\[2, 9\] on each of 2 ranks are 18 classes, not 9: take this rank's part",
        ),
        (
            lambda: cross_entropy_2d(torch.zeros(2, 6), torch.zeros(4).long(), MESH, 9),
            r"part and need targets of shape \[2\], got \[4\]: .* split_batch",
        ),
        (
            lambda: Attention2D(8, 2, Mesh2D.from_ranks([0], 0))(
                torch.zeros(2, 3, 8), torch.zeros(4, 1, 3, 3)
            ),
            r"mask of shape \[4, 1, 3, 3\] .* \[2, 2, 3, 3\]: .* split_mask",
        ),
        (
            lambda: Attention2D(8, 2, Mesh2D.from_ranks([0], 0))(
                torch.zeros(2, 3, 8), torch.zeros(3, 3, requires_grad=True)
            ),
            "mask that requires a gradient",
        ),
        (
            lambda: Attention2D(8, 2, Mesh2D.from_ranks([0], 0), causal=True)(
                torch.zeros(2, 3, 8), context=torch.zeros(2, 3, 8)
            ),
            "context must be None",
        ),
    ],
)
def test_a_tensor_that_is_no_part_of_the_right_one(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("ids", [[0, 9], [-1, 0]])
def test_ids_that_no_rank_has(ids: list[int]) -> None:
    for kind in (Embedding2D, VocabEmbedding2D):
        with pytest.raises(IndexError, match=rf"{kind.__name__}: ids must be in 0 ... 8, got (9|-1)"):
            kind(9, 8, MESH)(torch.tensor(ids))
    with pytest.raises(IndexError, match=r"targets must be in 0 ... 8"):
        cross_entropy_2d(torch.zeros(2, 6), torch.tensor(ids), MESH, 9)
    with pytest.raises(TypeError, match=r"must be whole numbers, got torch.float32"):
        Embedding2D(9, 8, MESH)(torch.zeros(2))


def test_the_wrong_dense_layer_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Linear2D.from_dense takes a Linear, got LayerNorm"):
        Linear2D.from_dense(nn.LayerNorm(4), MESH)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"Attention over one rank or torch.nn.MultiheadAttention, got Linear"
    ):
        Attention2D.from_dense(nn.Linear(4, 4), MESH)  # type: ignore[arg-type]


def test_copies_and_conversions_keep_the_marks() -> None:
    layer = nn.Sequential(Attention2D(16, 4, DEEP), LayerNorm2D(16, DEEP, device="meta"))
    loaded = copy.deepcopy(layer)
    state = {name: torch.zeros(value.shape) for name, value in layer.state_dict().items()}
    loaded.load_state_dict(state, assign=True)
    for module in (copy.deepcopy(layer), loaded, layer.double(), layer.to_empty(device="cpu")):
        for name, parameter in module.named_parameters():
            layout = layout_of(parameter)
            assert layout is not None, name
            assert layout.partial_over == (DEEP.depth,)
            assert layout.local_shape == parameter.shape


def test_frozen_parameters_and_modes_are_kept() -> None:
    dense = Attention(16, 4).eval()
    dense.q_proj.weight.requires_grad_(False)
    layer = Attention2D.from_dense(dense, Mesh2D.from_ranks([0], 0))
    assert not layer.q_proj.weight.requires_grad
    assert layer.k_proj.weight.requires_grad
    assert not layer.training
    assert not layer.to_dense().q_proj.weight.requires_grad
    assert not layer.to_dense().training


def test_a_second_derivative_is_an_error() -> None:
    layer = Linear2D(4, 4, Mesh2D.from_ranks([0], 0))
    x = torch.ones(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
