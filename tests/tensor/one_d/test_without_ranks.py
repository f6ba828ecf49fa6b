"""What needs no other process: shapes on fake tensors, and errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_lite.comm.groups.axis import Axis
from smp_lite.nn.layout import layout_of
from smp_lite.nn.one_d import (
    Attention,
    ColumnParallelLinear,
    FeatureParallelEmbedding,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    VocabParallelEmbedding,
    gather_along,
    vocab_parallel_cross_entropy,
)

FOUR = Axis("tp", range(4), 1)


def test_fake_tensors_go_through_everything() -> None:
    with FakeTensorMode():
        embedding = VocabParallelEmbedding(10, 8, axis=FOUR, sequence_parallel=True)
        norm = SequenceParallelLayerNorm(8, axis=FOUR)
        attention = Attention(8, 8, 2, axis=FOUR, causal=True, dropout=0.5, sequence_parallel=True)
        up = ColumnParallelLinear(8, 16, axis=FOUR, sequence_parallel=True)
        down = RowParallelLinear(16, 8, axis=FOUR)
        head = ColumnParallelLinear(8, 10, axis=FOUR, pad=True)
        tokens = torch.randint(0, 10, (2, 12))
        x = embedding(tokens)
        assert x.shape == (2, 3, 8)
        x = x + attention(norm(x))
        assert x.shape == (2, 3, 8)
        y = up(x)
        assert y.shape == (2, 12, 4)
        y = down(y)
        assert y.shape == (2, 12, 8)
        logits = head(y)
        assert logits.shape == (2, 12, 3)
        loss = vocab_parallel_cross_entropy(logits, tokens, axis=FOUR, vocab_size=10, label_smoothing=0.1)
        loss.backward()
        for module in (embedding, norm, attention, up, down, head):
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name
    assert FeatureParallelEmbedding(10, 8, axis=FOUR, device="meta")(
        torch.zeros(3, dtype=torch.long, device="meta")
    ).shape == (3, 8)


def test_layouts() -> None:
    column = ColumnParallelLinear(8, 24, axis=FOUR, sections=(8, 16))
    layout = layout_of(column.weight)
    assert layout is not None and layout.shape == (24, 8) and layout.dims == ((FOUR,), ())
    assert layout.sections == {0: (8, 16)} and column.weight.shape == (6, 8)
    row = RowParallelLinear(8, 24, axis=FOUR, sequence_parallel=True)
    weight, bias = layout_of(row.weight), layout_of(row.bias)
    assert weight is not None and weight.dims == ((), (FOUR,)) and not weight.partial_over
    assert bias is not None and bias.dims == ((),) and bias.partial_over == (FOUR,)
    vocab = layout_of(VocabParallelEmbedding(10, 8, axis=FOUR).weight)
    assert vocab is not None and vocab.padded == {0: 12} and vocab.shape == (10, 8)


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"out_features is 10, .*4 ranks of axis 'tp'.*: 8 or 12"):
        ColumnParallelLinear(8, 10, axis=FOUR)
    with pytest.raises(ValueError, match=r"section of the output features is 2, .*: 4"):
        ColumnParallelLinear(8, 10, axis=FOUR, sections=(8, 2))
    with pytest.raises(ValueError, match=r"add up to 12, out_features is 10"):
        ColumnParallelLinear(8, 10, axis=FOUR, sections=(8, 4))
    with pytest.raises(ValueError, match=r"in_features is 10, .*: 8 or 12"):
        RowParallelLinear(10, 8, axis=FOUR)
    with pytest.raises(ValueError, match=r"embedding_dim is 6, .*: 4 or 8"):
        FeatureParallelEmbedding(10, 6, axis=FOUR)
    with pytest.raises(ValueError, match=r"num_heads is 6, .*: 4 or 8"):
        Attention(12, 6, axis=FOUR)
    with pytest.raises(ValueError, match=r"num_heads=8 is no multiple of num_kv_heads=3"):
        Attention(16, 8, 3, axis=FOUR)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embedding_options_about_all_rows_are_refused(option: dict[str, object]) -> None:
    dense = nn.Embedding(8, 8, **option)
    for kind in (VocabParallelEmbedding, FeatureParallelEmbedding):
        with pytest.raises(ValueError, match=next(iter(option))):
            kind.from_dense(dense, FOUR)


def test_wrong_arguments_of_the_loss() -> None:
    logits, target = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"vocab_size=21, but 4 ranks with 5 logits each hold 20"):
        vocab_parallel_cross_entropy(logits, target, axis=FOUR, vocab_size=21)
    with pytest.raises(ValueError, match=r"vocab_size=16"):
        vocab_parallel_cross_entropy(logits, target, axis=FOUR, vocab_size=16)
    with pytest.raises(ValueError, match=r"target of shape \[2, 3\], not \[6\]"):
        vocab_parallel_cross_entropy(logits, target.flatten(), axis=FOUR)
    with pytest.raises(ValueError, match="reduction='max'"):
        vocab_parallel_cross_entropy(logits, target, axis=FOUR, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label_smoothing=2"):
        vocab_parallel_cross_entropy(logits, target, axis=FOUR, label_smoothing=2)


def test_what_attention_and_gathering_refuse() -> None:
    with pytest.raises(ValueError, match="batch_first=False"):
        Attention.from_dense(nn.MultiheadAttention(8, 4), FOUR)
    with pytest.raises(ValueError, match=r"over one rank or torch.nn.MultiheadAttention, not Linear"):
        Attention.from_dense(nn.Linear(8, 8), FOUR)
    with pytest.raises(ValueError, match="causal=True with a mask"):
        Attention(8, 4, causal=True)(torch.zeros(1, 2, 8), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="gradients='all'"):
        gather_along(torch.zeros(2), FOUR, 0, gradients="all")  # type: ignore[arg-type]


def test_on_one_rank_a_layer_is_the_dense_one() -> None:
    one = Axis("tp", [3], 0)
    dense = nn.Linear(8, 10)
    x = torch.randn(2, 8)
    for layer in (ColumnParallelLinear.from_dense(dense, one), RowParallelLinear.from_dense(dense, one)):
        assert torch.allclose(layer(x), dense(x))


def test_parameters_that_torch_makes_anew_keep_their_layouts() -> None:
    axis = Axis("tp", range(2), 0)
    layer = ColumnParallelLinear(4, 6, axis=axis)
    layouts = [layout_of(parameter) for parameter in layer.parameters()]
    assert None not in layouts
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    for change in (
        copy.deepcopy,
        lambda made: made.to_empty(device="meta"),
        lambda made: made.load_state_dict(state, assign=True) and made,
    ):
        again = change(copy.deepcopy(layer))
        assert [layout_of(parameter) for parameter in again.parameters()] == layouts
