"""Sequence-parallel layers in one process: which tokens a rank has, fake tensors, errors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_lite.nn.sequence import (
    SequenceAttention,
    SequenceMesh,
    all_to_all_attention,
    cross_entropy_sequence,
    ring_attention,
)
from smp_lite.nn.sequence.ring import _block
from tests.tensor.grid.dense import Transformer
from tests.tensor.sequence.cases import split_transformer

MESH = SequenceMesh.from_ranks(range(4), 1)


def test_positions() -> None:
    assert MESH.positions(16).tolist() == [2, 3, 12, 13]
    assert MESH.positions(16, index=3).tolist() == [6, 7, 8, 9]
    assert MESH.order(16).tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    plain = SequenceMesh.from_ranks(range(4), 1, zigzag=False)
    assert plain.positions(16).tolist() == [4, 5, 6, 7]
    assert plain.order(16).tolist() == list(range(16))
    x = torch.arange(32).view(2, 16)
    assert torch.equal(MESH.in_sequence(MESH.in_rank_order(x)), x)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [True, False])
def test_blocks_cover_what_is_causal_and_zigzag_balances_them(size: int, zigzag: bool) -> None:
    tokens, work = 4, []
    for rank in range(size):
        mesh = SequenceMesh.from_ranks(range(size), rank, zigzag=zigzag)
        mine = mesh.positions(tokens * size)
        done = 0
        for other in range(size):
            theirs = mesh.positions(tokens * size, index=other)
            seen = torch.zeros(tokens, tokens, dtype=torch.bool)
            block = _block(mesh, other, tokens, True)
            if block is not None:
                part = torch.ones_like(seen[block.queries, block.keys])
                seen[block.queries, block.keys] = part.tril() if block.diagonal else part
                done += part.numel()
            assert torch.equal(seen, mine[:, None] >= theirs[None, :])
        work.append(done)
    assert (len(set(work)) == 1) == (zigzag or size == 1)


@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
def test_a_fake_transformer_trains_without_other_ranks(exchange: str) -> None:
    with FakeTensorMode():
        split = split_transformer(Transformer(11, 16, 16, 8, 4), MESH, exchange, True)
        split.recompute = "blocks"
        ids = MESH.split_batch(torch.randint(0, 11, (3, 16)))
        logits = split(ids, MESH.positions(16))
        assert logits.shape == (3, 16, 3)
        loss = cross_entropy_sequence(logits, ids, MESH, 11, vocabulary_split=True)
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in split.parameters())


def _heads(heads: int, tokens: int = 4) -> torch.Tensor:
    return torch.zeros(2, heads, tokens, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: MESH.split_input(torch.zeros(2, 12, 3)),
            r"\(tokens\) .*\[2, 12, 3\], 12 .* x 2\); .* 8 or 16",
        ),
        (lambda: MESH.split_input(torch.zeros(2)), r"\[2\] has no tokens in dimension 1"),
        (lambda: MESH.positions(12), "sequence of tokens 12 does not divide into 8 parts"),
        (lambda: ring_attention(_heads(3), _heads(2), _heads(2), MESH), "3 heads .* no multiple of 2"),
        (
            lambda: ring_attention(_heads(2), _heads(2, 8), _heads(2, 8), MESH, causal=True),
            "causal attention of 4 tokens a rank to 8 keys a rank",
        ),
        (
            lambda: ring_attention(_heads(2), _heads(2), _heads(2), MESH, mask=torch.zeros(16, 16)),
            r"\[16, 16\] .* \[2, 2, 4, 16\]: .* split_mask",
        ),
        (
            lambda: ring_attention(
                _heads(2), _heads(2), _heads(2), MESH, mask=torch.zeros(4, 16, requires_grad=True)
            ),
            "mask that requires a gradient",
        ),
        (
            lambda: all_to_all_attention(_heads(8), _heads(2), _heads(2), MESH),
            "heads of keys, 2 .* nearest: 4; ring attention takes any number",
        ),
        (lambda: SequenceAttention(12, 6, MESH, "all_to_all"), "with all_to_all: num_heads 6 .* 4 or 8"),
        (lambda: SequenceAttention(12, 6, MESH, "rings"), "exchange='rings': it is 'ring' or 'all_to_all'"),
        (lambda: SequenceAttention(12, 6, MESH, dropout=0.5), "dropout=0.5 .* not supported"),
        (
            lambda: cross_entropy_sequence(torch.zeros(2, 4, 9), torch.zeros(2, 16).long(), MESH, 9),
            r"need targets of shape \[2, 4\], got \[2, 16\]",
        ),
        (
            lambda: cross_entropy_sequence(torch.zeros(2, 4, 3), torch.zeros(2, 4).long(), MESH, 9),
            r"on each of 1 ranks are 3 classes, not 9",
        ),
    ],
)
def test_errors_name_what_is_wrong(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=words):
        call()
