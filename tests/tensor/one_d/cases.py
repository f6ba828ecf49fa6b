"""What the tests of the layers split over one axis run in the ranks; each asserts there."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_lite.comm.groups.axis import Axis
from smp_lite.nn.layout import layout_of, sum_partial_gradients, whole_of
from smp_lite.nn.one_d import (
    Attention,
    ColumnParallelLinear,
    FeatureParallelDropout,
    FeatureParallelEmbedding,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    SequenceParallelRMSNorm,
    VocabParallelEmbedding,
    copy_to_ranks,
    gather_along,
    reduce_scatter_along,
    split_along,
    sum_over_ranks,
    vocab_parallel_cross_entropy,
)
from smp_lite.nn.one_d.parts import ONE_RANK
from tests.tensor.axis_cases import axis_of_all
from tests.tensor.one_d.comparing import assert_close, compare, received_by

BATCH, SEQUENCE, WIDTH = 2, 12, 24
"""Of all inputs; 2, 3 and 4 ranks can share them."""


SECTIONS = (12, 24)
"""Of 36 features."""


def start() -> Axis:
    """The axis over all ranks; every rank draws the same numbers from here on."""
    torch.manual_seed(0)
    return axis_of_all()


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


# Operations -----------------------------------------------------------------------------------------------


def operations() -> None:
    """Each pair against autograd through the same sums, computed in one process from all ranks' inputs.

    The loss is the sum of every rank's own: rank r's is its output times its own numbers. Where all ranks are
    to do the same with the output, they use the same numbers, and one of them counts.
    """
    axis = start()
    p, r = axis.size, axis.index
    inputs = [torch.randn(4 * p, 3, 2 * p, dtype=torch.float64) for _ in range(p)]
    factors = [torch.randn(4 * p, 3, 2 * p, dtype=torch.float64) for _ in range(p)]

    def run(function: Any, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Output and gradient."""
        x = x.clone().requires_grad_()
        y = function(x)
        (first,) = torch.autograd.grad(((y**2) * factor).sum(), x)
        return y.detach(), first

    whole, same = inputs[0], factors[0]
    # What all ranks hold goes to work that is split: rank r weighs it by its own numbers.
    y, first = run(lambda x: copy_to_ranks(x, axis), whole, factors[r])
    assert_close(y, whole, "copy")
    assert_close(first, 2 * whole * torch.stack(factors).sum(0), "copy, backward")
    # Summands become what all ranks hold.
    y, first = run(lambda x: sum_over_ranks(x, axis), inputs[r], same)
    total = torch.stack(inputs).sum(0)
    assert_close(y, total, "sum")
    assert_close(first, 2 * total * same, "sum, backward")
    for dim in (0, -1):
        parts = [each.chunk(p, dim)[i] for i, each in enumerate(inputs)]
        joined = torch.cat(parts, dim)
        y, first = run(lambda x, d=dim: gather_along(x, axis, d, gradients="same"), parts[r], same)
        assert_close(y, joined, "gather")
        assert_close(first, (2 * joined * same).chunk(p, dim)[r], "gather, the same gradients")
        y, first = run(lambda x, d=dim: gather_along(x, axis, d, gradients="summand"), parts[r], factors[r])
        assert_close(y, joined, "gather")
        summed = 2 * joined * torch.stack(factors).sum(0)
        assert_close(first, summed.chunk(p, dim)[r], "gather, summands of gradients")
        mine = [factor.chunk(p, dim)[0] for factor in factors]
        y, first = run(lambda x, d=dim: split_along(x, axis, d), whole, mine[r])
        assert_close(y, whole.chunk(p, dim)[r], "split")
        assert_close(first, 2 * whole * torch.cat(mine, dim), "split, backward")
        y, first = run(lambda x, d=dim: reduce_scatter_along(x, axis, d), inputs[r], mine[r])
        assert_close(y, total.chunk(p, dim)[r], "reduce-scatter")
        assert_close(first, 2 * total * torch.cat(mine, dim), "reduce-scatter, backward")


def gradients_of_gradients() -> None:
    """A penalty on the gradient of the input, through a column- and a row-parallel layer."""
    axis = start()
    dense = nn.Sequential(nn.Linear(WIDTH, 36), nn.Tanh(), nn.Linear(36, WIDTH)).double()
    parallel = nn.Sequential(
        ColumnParallelLinear.from_dense(dense[0], axis),
        nn.Tanh(),
        RowParallelLinear.from_dense(dense[2], axis),
    )
    x = tokens(BATCH, WIDTH)
    for module in (dense, parallel):
        inner = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(inner).square().sum(), inner, create_graph=True)
        slope.square().sum().backward()
    for expected, found in zip(dense.parameters(), parallel.parameters(), strict=True):
        layout = layout_of(found)
        if expected.grad is None:
            assert found.grad is None
            continue
        assert layout is not None and found.grad is not None
        assert_close(whole_of(found.grad, layout), expected.grad, "gradient of the penalty")


# Linear layers --------------------------------------------------------------------------------------------


def linear_layers(dtype: torch.dtype = torch.float64) -> None:
    """Both layers in all forms, forward and backward."""
    axis = start()

    def sequence(x: Tensor) -> Tensor:
        return axis.part(x, 1)

    def features(y: Tensor) -> Tensor:
        return axis.part(y, -1)

    for bias in (True, False):
        dense = nn.Linear(WIDTH, 36, bias, dtype=dtype)
        x = tokens(BATCH, SEQUENCE, WIDTH, dtype=dtype)

        def fresh(dense: nn.Linear = dense) -> nn.Linear:
            dense.zero_grad()
            return dense

        column, row = ColumnParallelLinear.from_dense, RowParallelLinear.from_dense
        compare(fresh(), column(dense, axis), x, output=features)
        compare(fresh(), column(dense, axis, gather_output=True), x)
        compare(fresh(), column(dense, axis, gather_output=True, sections=SECTIONS), x)
        compare(
            fresh(),
            column(dense, axis, sections=SECTIONS),
            x,
            output=lambda y: torch.cat([axis.part(piece, -1) for piece in y.split(SECTIONS, -1)], -1),
        )
        compare(fresh(), column(dense, axis, sequence_parallel=True), x, mine=sequence, output=features)
        compare(fresh(), row(dense, axis), x, mine=features)
        compare(fresh(), row(dense, axis, input_is_parallel=False), x)
        compare(fresh(), row(dense, axis, sequence_parallel=True), x, mine=features, output=sequence)
    odd = nn.Linear(WIDTH, 37, dtype=dtype)
    compare(odd, column(odd, axis, gather_output=True, pad=True), x)


def a_layer_used_twice() -> None:
    """One parameter, two uses, one gradient."""
    axis = start()
    dense = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH)).double()
    parallel = nn.Sequential(
        ColumnParallelLinear.from_dense(dense[0], axis),
        nn.Tanh(),
        RowParallelLinear.from_dense(dense[2], axis),
    )
    compare(dense, parallel, tokens(BATCH, SEQUENCE, WIDTH), repeat=2)


def same_seed_same_layer() -> None:
    """Constructors draw what the dense ones draw, and leave the random stream where those leave it."""
    axis = start()
    makers = [
        (lambda: nn.Linear(WIDTH, 36), lambda: ColumnParallelLinear(WIDTH, 36, axis=axis)),
        (lambda: nn.Linear(WIDTH, 36), lambda: RowParallelLinear(WIDTH, 36, axis=axis)),
        (lambda: nn.Embedding(37, WIDTH, 3), lambda: VocabParallelEmbedding(37, WIDTH, 3, axis=axis)),
        (lambda: nn.Embedding(37, WIDTH, 3), lambda: FeatureParallelEmbedding(37, WIDTH, 3, axis=axis)),
        (lambda: Attention(WIDTH, 12, 6), lambda: Attention(WIDTH, 12, 6, axis=axis)),
    ]
    for dense, parallel in makers:
        torch.manual_seed(7)
        expected = dense()
        drawn = torch.rand(1)
        torch.manual_seed(7)
        layer = parallel()
        assert torch.equal(torch.rand(1), drawn)
        found = layer.to_dense().state_dict()
        assert found.keys() == expected.state_dict().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.state_dict().items())


def copies_keep_their_layouts() -> None:
    """torch copies a parameter without its attributes."""
    axis = start()
    layers = (
        Attention(WIDTH, 12, 3, axis=axis),
        VocabParallelEmbedding(37, WIDTH, axis=axis),
        FeatureParallelEmbedding(37, WIDTH, axis=axis),
        SequenceParallelLayerNorm(WIDTH, axis=axis),
        RowParallelLinear(WIDTH, WIDTH, axis=axis),
    )
    for layer in layers:
        copied = copy.deepcopy(layer)
        for found, expected in zip(copied.parameters(), layer.parameters(), strict=True):
            assert found is not expected
            assert layout_of(found) == layout_of(expected) is not None
        expected_state = layer.to_dense().state_dict()
        assert all(torch.equal(t, expected_state[n]) for n, t in copied.to_dense().state_dict().items())


def frozen_stays_frozen() -> None:
    axis = start()
    dense = nn.Linear(WIDTH, 36).requires_grad_(False)
    for layer in (ColumnParallelLinear.from_dense(dense, axis), RowParallelLinear.from_dense(dense, axis)):
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        assert not any(parameter.requires_grad for parameter in layer.to_dense().parameters())


# Embeddings and the loss ----------------------------------------------------------------------------------


def embeddings(dtype: torch.dtype = torch.float64) -> None:
    axis = start()
    for vocab in (36, 37):  # the second has padding on any number of ranks
        for padding_idx in (None, 0, 17, 35):
            dense = nn.Embedding(vocab, WIDTH, padding_idx, dtype=dtype)
            index = torch.randint(0, vocab, (BATCH, SEQUENCE))
            index[0, :4] = torch.tensor([0, 17, 35, vocab - 1])
            makers = (
                lambda d: VocabParallelEmbedding.from_dense(d, axis),
                lambda d: FeatureParallelEmbedding.from_dense(d, axis),
            )
            for make in makers:
                dense.zero_grad()
                compare(dense, make(dense), index)
            dense.zero_grad()
            parallel = VocabParallelEmbedding.from_dense(dense, axis, sequence_parallel=True)
            compare(dense, parallel, index, output=lambda y: axis.part(y, 1))
    parallel = VocabParallelEmbedding.from_dense(dense, axis)
    for wrong in (vocab, -1):
        with pytest.raises(IndexError, match=rf"index {wrong} is not in 0\.\.{vocab - 1}"):
            parallel(torch.tensor([1, wrong]))


def padding_never_matters() -> None:
    """A tied vocabulary that does not divide, trained: padding stays zero, whatever one finds there."""
    axis = start()
    vocab = 4 * axis.size + 1
    embedding = VocabParallelEmbedding(vocab, WIDTH, axis=axis, dtype=torch.float64)
    dense = embedding.to_dense()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (dense, embedding)]
    index, target = torch.randint(0, vocab, (2, BATCH, SEQUENCE))
    bias = torch.full((embedding.weight.shape[0],), 50.0, dtype=torch.float64)
    valid = min(max(vocab - axis.index * len(bias), 0), len(bias))
    bias[:valid] = 0  # the padding's logits are large
    for _ in range(3):
        losses = []
        hidden = dense(index)
        losses.append(F.cross_entropy((hidden @ dense.weight.T).flatten(0, 1), target.flatten()))
        hidden = copy_to_ranks(embedding(index), axis)
        logits = hidden @ embedding.weight.T + bias
        losses.append(vocab_parallel_cross_entropy(logits, target, axis=axis, vocab_size=vocab))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_close(losses[1], losses[0], "loss", tolerance=1e-9)
    assert not embedding.weight[valid:].any()
    assert_close(embedding.to_dense().weight, dense.weight, "weight", tolerance=1e-9)


def cross_entropies(dtype: torch.dtype = torch.float64) -> None:
    axis = start()
    for vocab in (24, 25, 4 * axis.size + 1):
        padded = -(-vocab // axis.size) * axis.size
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                logits = (3 * tokens(BATCH, SEQUENCE, vocab)).to(dtype)
                target = torch.randint(0, vocab, (BATCH, SEQUENCE))
                target[0, :3] = -100
                target[1, 0] = vocab - 1
                whole = logits.clone().requires_grad_()
                expected = F.cross_entropy(
                    whole.flatten(0, 1),
                    target.flatten(),
                    reduction=reduction,
                    label_smoothing=smoothing,
                )
                filled = torch.cat(
                    [logits, torch.full((BATCH, SEQUENCE, padded - vocab), 99.0, dtype=dtype)], -1
                )
                mine = axis.part(filled, -1).clone().requires_grad_()
                found = vocab_parallel_cross_entropy(
                    mine,
                    target,
                    axis=axis,
                    vocab_size=vocab,
                    reduction=reduction,
                    label_smoothing=smoothing,
                )
                assert_close(found, expected.view_as(found), "loss")
                weights = torch.linspace(1, 2, found.numel()).to(dtype)
                (found.flatten() * weights).sum().backward()
                (expected.flatten() * weights).sum().backward()
                gradient = torch.cat([whole.grad, whole.grad.new_zeros(BATCH, SEQUENCE, padded - vocab)], -1)
                assert_close(mine.grad, axis.part(gradient, -1).clone(), "gradient of the logits")
    nothing = torch.full((BATCH, SEQUENCE), -100)
    assert vocab_parallel_cross_entropy(mine, nothing, axis=axis, vocab_size=vocab).isnan()
    ignored_7 = torch.full((BATCH, SEQUENCE), 7)
    loss = vocab_parallel_cross_entropy(
        mine, ignored_7, axis=axis, vocab_size=vocab, ignore_index=7, reduction="sum"
    )
    assert loss == 0
    with pytest.raises(IndexError, match=rf"target {vocab} is not in 0\.\.{vocab - 1}"):
        vocab_parallel_cross_entropy(mine, nothing + 100 + vocab, axis=axis, vocab_size=vocab)


# Attention and norms --------------------------------------------------------------------------------------


def attentions(dtype: torch.dtype = torch.float64) -> None:
    axis = start()
    x = tokens(BATCH, SEQUENCE, WIDTH, dtype=dtype)
    for kv_heads in (12, 6, 4, 3, 2, 1):
        for causal, bias in ((False, True), (True, False)):
            dense = Attention(WIDTH, 12, kv_heads, 4, bias, out_bias=True, causal=causal, dtype=dtype)
            parallel = Attention.from_dense(dense, axis)
            shared = kv_heads % axis.size != 0
            assert (layout_of(parallel.k_proj.weight).partial_over == (axis,)) == shared
            compare(dense, parallel, x)
            state = parallel.to_dense().state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in dense.state_dict().items())
            dense.zero_grad()
            parallel = Attention.from_dense(dense, axis, sequence_parallel=True)
            compare(dense, parallel, x, mine=lambda x: axis.part(x, 1), output=lambda x: axis.part(x, 1))
    masks = (
        torch.rand(BATCH, 1, SEQUENCE, SEQUENCE) < 0.8,
        torch.randn(BATCH, 12, SEQUENCE, SEQUENCE).to(dtype),
        torch.randn(12, SEQUENCE, SEQUENCE).to(dtype),
    )
    masks[0][..., 0] = True
    dense = Attention(WIDTH, 12, 3, 4, dtype=dtype)
    for mask in masks:
        dense.zero_grad()
        compare(dense, Attention.from_dense(dense, axis), x, call=lambda m, x, mask=mask: m(x, mask))


def attention_with_a_learned_mask() -> None:
    """Whole on each rank, of its own heads, or of all: the gradient is that of the dense layer."""
    axis = start()
    x = tokens(BATCH, SEQUENCE, WIDTH)
    theirs = nn.MultiheadAttention(WIDTH, 12, batch_first=True, dtype=torch.float64)
    ours = Attention.from_dense(theirs, axis)
    for heads in (1, 12):
        mask = tokens(1, heads, SEQUENCE, SEQUENCE)
        whole, own = mask.clone().requires_grad_(), mask.clone().requires_grad_()
        of_all = whole.expand(BATCH, 12, SEQUENCE, SEQUENCE).flatten(0, 1)
        theirs(x, x, x, need_weights=False, attn_mask=of_all)[0].square().sum().backward()
        ours(x, own).square().sum().backward()
        assert whole.grad is not None and own.grad is not None
        assert_close(own.grad, whole.grad, "gradient of the mask")


def attention_like_torch() -> None:
    """Also with dropout, which draws what torch draws."""
    axis = start()
    x = tokens(BATCH, SEQUENCE, WIDTH)
    for dropout in (0.0, 0.3):
        theirs = nn.MultiheadAttention(WIDTH, 12, dropout, batch_first=True, dtype=torch.float64)
        ours = Attention.from_dense(theirs, axis)
        torch.manual_seed(3)
        expected = theirs(x, x, x, need_weights=False)[0]
        torch.manual_seed(3)
        assert_close(ours(x), expected, "output")


def dropout_like_dense() -> None:
    """Between two parallel layers, with the dense layer's mask, and its random stream afterwards."""
    axis = start()
    dense = nn.Sequential(nn.Linear(WIDTH, 36), nn.Dropout(0.4), nn.Linear(36, WIDTH)).double()
    parallel = nn.Sequential(
        ColumnParallelLinear.from_dense(dense[0], axis),
        FeatureParallelDropout.from_dense(dense[1], axis),
        RowParallelLinear.from_dense(dense[2], axis),
    )
    drawn = []

    def seeded(module: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        y = module(x)
        drawn.append(torch.rand(1))
        return y

    compare(dense, parallel, tokens(BATCH, SEQUENCE, WIDTH), call=seeded)
    assert torch.equal(*drawn)


def norms(dtype: torch.dtype = torch.float64) -> None:
    """Sequence-parallel norms around a parallel pair, as in a block."""
    axis = start()

    def part(x: Tensor) -> Tensor:
        return axis.part(x, 1)

    pairs = (
        (nn.LayerNorm(WIDTH, dtype=dtype), SequenceParallelLayerNorm),
        (nn.LayerNorm(WIDTH, bias=False, dtype=dtype), SequenceParallelLayerNorm),
        (nn.RMSNorm(WIDTH, dtype=dtype), SequenceParallelRMSNorm),
    )
    for norm, kind in pairs:
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        dense = nn.Sequential(norm, nn.Linear(WIDTH, 36), nn.GELU(), nn.Linear(36, WIDTH)).to(dtype)
        parallel = nn.Sequential(
            kind.from_dense(norm, axis),
            ColumnParallelLinear.from_dense(dense[1], axis, sequence_parallel=True),
            nn.GELU(),
            RowParallelLinear.from_dense(dense[3], axis, sequence_parallel=True),
        )
        compare(dense, parallel, tokens(BATCH, SEQUENCE, WIDTH, dtype=dtype), mine=part, output=part)
        state = parallel[0].to_dense().state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in norm.state_dict().items())


# Checkpointing, volumes, DTensor --------------------------------------------------------------------------


def block(axis: Axis) -> nn.Module:
    """An attention and an MLP with residuals."""
    return Block(Attention(WIDTH, 12, 3, 4, dtype=torch.float64), axis)


class Block(nn.Module):
    def __init__(self, attention: Attention, axis: Axis) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, 48).double(), nn.Linear(48, WIDTH).double()
        self.attention = attention if axis is ONE_RANK else Attention.from_dense(attention, axis)
        self.up = ColumnParallelLinear.from_dense(up, axis)
        self.down = RowParallelLinear.from_dense(down, axis)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(x)))


def checkpointed() -> None:
    """Recomputation gives the same gradients, to the bit."""
    axis = start()
    layer = block(axis)
    x = tokens(BATCH, SEQUENCE, WIDTH)
    found = []
    for reentrant in (None, True, False):
        layer.zero_grad()
        inner = x.clone().requires_grad_()
        y = layer(inner) if reentrant is None else checkpoint(layer, inner, use_reentrant=reentrant)
        y.square().sum().backward()
        found.append([inner.grad, *(parameter.grad for parameter in layer.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def volumes() -> None:
    """Elements received, forward and backward, against the formulas."""
    axis = start()
    p = axis.size
    tokens_here, share = BATCH * SEQUENCE, Fraction(p - 1, p)
    x = tokens(BATCH, SEQUENCE, WIDTH).requires_grad_()

    def forward_backward(function: Any, *inputs: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        with received_by(axis) as forward:
            y = function(*inputs)
        with received_by(axis) as backward:
            y.sum().backward()
        return forward, backward

    up = ColumnParallelLinear(WIDTH, 48, axis=axis, dtype=torch.float64)
    down = RowParallelLinear(48, WIDTH, axis=axis, dtype=torch.float64)
    one = 2 * share * tokens_here * WIDTH  # an all-reduce of the activations
    assert forward_backward(lambda x: down(up(x)), x) == ({"all_reduce": one}, {"all_reduce": one})
    attention = Attention(WIDTH, 12, 3, axis=axis, dtype=torch.float64)
    assert forward_backward(attention, x) == ({"all_reduce": one}, {"all_reduce": one})

    up.sequence_parallel = True
    down = RowParallelLinear(48, WIDTH, axis=axis, sequence_parallel=True, dtype=torch.float64)
    mine = axis.part(x.detach(), 1).clone().requires_grad_()
    half = {"all_gather": one / 2, "reduce_scatter": one / 2}
    assert forward_backward(lambda x: down(up(x)), mine) == (half, half)

    gathered = ColumnParallelLinear(WIDTH, 48, axis=axis, gather_output=True, dtype=torch.float64)
    assert forward_backward(gathered, x) == ({"all_gather": share * tokens_here * 48}, {"all_reduce": one})
    embedding = VocabParallelEmbedding(37, WIDTH, axis=axis)
    index = torch.randint(0, 37, (BATCH, SEQUENCE))
    assert forward_backward(embedding, index) == ({"all_reduce": one}, {})
    by_features = FeatureParallelEmbedding(37, WIDTH, axis=axis)
    assert forward_backward(by_features, index) == ({"all_gather": one / 2}, {})
    logits = tokens(BATCH, SEQUENCE, 40 // p).requires_grad_()
    for smoothing, rows in ((0.0, 3), (0.1, 4)):
        loss = forward_backward(
            lambda logits, s=smoothing: vocab_parallel_cross_entropy(
                logits, index, axis=axis, vocab_size=40 // p * p, label_smoothing=s
            ),
            logits,
        )
        assert loss == ({"all_reduce": 2 * share * tokens_here * rows}, {})


def like_dtensor(address: str) -> None:
    """DTensor's ``parallelize_module`` over gloo in the same ranks gives the same."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    from smp_lite.comm.transports.gloo import use_loopback

    axis = start()
    use_loopback(True)
    store = dist.FileStore(address, axis.size)
    dist.init_process_group("gloo", store=store, rank=axis.index, world_size=axis.size)
    try:
        mesh = init_device_mesh("cpu", (axis.size,))
        x = tokens(BATCH, SEQUENCE, WIDTH)
        theirs = nn.ModuleDict(
            {
                "norm": nn.LayerNorm(WIDTH).double(),
                "up": nn.Linear(WIDTH, 48).double(),
                "down": nn.Linear(48, WIDTH).double(),
            }
        )
        for sequence in (False, True):
            dense = copy.deepcopy(theirs)
            plan: dict[str, Any] = {
                "up": ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate()),
                "down": RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
            }
            if sequence:
                plan["norm"] = SequenceParallel()
            oracle = parallelize_module(copy.deepcopy(theirs), mesh, plan)
            norm = SequenceParallelLayerNorm.from_dense(dense["norm"], axis) if sequence else dense["norm"]
            up = ColumnParallelLinear.from_dense(dense["up"], axis, sequence_parallel=sequence)
            down = RowParallelLinear.from_dense(dense["down"], axis, sequence_parallel=sequence)
            ours = nn.ModuleDict({"norm": norm, "up": up, "down": down})
            results = []
            for module in (oracle, ours):
                inner = (axis.part(x, 1) if sequence else x).clone().requires_grad_()
                y = module["down"](F.gelu(module["up"](module["norm"](inner))))
                (y * torch.linspace(0, 1, y.numel(), dtype=torch.float64).view_as(y)).sum().backward()
                results.append((y, inner.grad))
            assert_close(results[1][0], results[0][0].detach(), "output")
            assert_close(results[1][1], results[0][1], "gradient of the input")
            sum_partial_gradients(ours)
            for (name, found), expected in zip(ours.named_parameters(), oracle.parameters(), strict=True):
                gradient = expected.grad
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                layout = layout_of(found)
                mine = found.grad if layout is None else whole_of(found.grad, layout)
                assert_close(mine, gradient, f"gradient of {name}")
        vocab = nn.Embedding(4 * axis.size, WIDTH)
        oracle = parallelize_module(
            copy.deepcopy(vocab), mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        )
        index = torch.randint(0, 4 * axis.size, (BATCH, SEQUENCE))
        ours = VocabParallelEmbedding.from_dense(vocab, axis)
        outputs = [oracle(index), ours(index)]
        for y in outputs:
            y.square().sum().backward()
        assert_close(outputs[1], outputs[0].detach(), "embedding")
        assert_close(
            whole_of(ours.weight.grad, layout_of(ours.weight)),
            oracle.weight.grad.full_tensor(),
            "its gradient",
        )
    finally:
        dist.destroy_process_group()
