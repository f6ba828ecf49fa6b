"""Shapes inside distributed modules, at degrees that need no processes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import smp_lite as smp
from smp_lite.comm.groups.axis import Axis
from smp_lite.nn.distributed import CannotShare, Region
from smp_lite.nn.layout import layout_of

B, S, H, T = 4, 5, 16, 8


@pytest.fixture(autouse=True)
def _session() -> None:
    smp.init_in_memory({"partitions": 1})


@pytest.fixture
def _degree(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Region:
    """The region of a rank of eight, for modules that are made in the test."""
    own_batches, splits_features = request.param
    region = Region(Axis("tp", range(T), 3), own_batches, splits_features)
    monkeypatch.setattr(Region, "of_session", classmethod(lambda cls: region))
    return region


WAYS = [(own, splits) for own in (True, False) for splits in (True, False)]


@pytest.mark.parametrize(
    ("own_batches", "splits_features", "rows", "inside"),
    [
        # Degree 8: eight batches of 4, or one of 32, make [32, S, H / 8].
        (True, True, B, (T * B, S, H // T)),
        (False, True, T * B, (T * B, S, H // T)),
        (True, False, B, (T * B, S, H)),
        (False, False, T * B, (T * B, S, H)),
    ],
)
def test_activations_enter_and_leave(
    own_batches: bool, splits_features: bool, rows: int, inside: tuple[int, ...]
) -> None:
    region = Region(Axis("tp", range(T), 3), own_batches, splits_features)
    with FakeTensorMode():
        outside = torch.empty(rows, S, H, requires_grad=True)
        found = region.enter(outside)
        assert tuple(found.shape) == inside
        back = region.leave(found)
        assert back.shape == outside.shape
        back.sum().backward()
        assert outside.grad is not None and outside.grad.shape == outside.shape


@pytest.mark.parametrize("_degree", WAYS, indirect=True)
def test_every_module_hands_back_what_it_got(_degree: Region) -> None:
    rows = B if _degree.own_batches else T * B
    sizes = {"num_attention_heads": 8, "attention_head_size": 2, "hidden_size": H}
    with FakeTensorMode():
        x, mask = torch.empty(rows, S, H), torch.empty(rows, 1, 1, S)
        assert smp.nn.DistributedLinear(H, 7)(x).shape == (rows, S, 7)
        embedding = smp.nn.DistributedEmbedding(9, H)
        assert embedding(torch.zeros(rows, S, dtype=torch.long)).shape == x.shape
        layer = smp.nn.DistributedTransformerLayer(**sizes, intermediate_size=24)
        hidden, same = layer((x, mask))
        assert hidden.shape == x.shape and same is mask
        model = smp.nn.DistributedTransformerLMHead(
            2, **sizes, intermediate_size=24, vocab_size=11, num_positions=S, causal_mask_size=S
        )
        ids = torch.zeros(rows, S, dtype=torch.long)
        assert model((ids, ids, None, None)).shape == (rows, S, 11)
        assert model((ids, None, None, None, ids)).shape == ()


@pytest.mark.parametrize("_degree", WAYS, indirect=True)
@pytest.mark.parametrize("tied", [True, False])
def test_a_split_vocabulary(_degree: Region, tied: bool) -> None:
    rows = B if _degree.own_batches else T * B
    model = smp.nn.DistributedTransformerLMHead(
        *(1, 8, 2, H, 16, 11, S),
        distribute_embedding=True,
        tie_input_output_embedding=tied,
        use_lm_head_bias=True,
        return_logits=True,
    )
    assert (model.lm_head.weight is model.word_embedding.weight) == tied
    for parameter in (model.word_embedding.weight, model.lm_head.weight):
        layout = layout_of(parameter)
        assert parameter.shape == (2, H) and layout is not None and layout.shape == (11, H)
    assert model.lm_head.bias.shape == (2,)
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(rows, S, dtype=torch.long)
        assert model((ids,)).shape == (rows, S, 11)
        loss, logits = model((ids, None, None, None, ids))
        assert loss.shape == () and logits.shape == (rows, S, 11)


@pytest.mark.parametrize("_degree", [(True, True)], indirect=True)
def test_parts_that_ranks_hold(_degree: Region) -> None:
    layer = smp.nn.DistributedTransformerLayer(8, 2, H, 24, pre_layernorm=True)
    shapes = {
        name: (list(p.shape), smp.utils.get_distribution_axis(p)) for name, p in layer.named_parameters()
    }
    assert shapes["attention.query.weight"] == ([2, 16], 0)
    assert shapes["attention.value.bias"] == ([2], 0)
    assert shapes["attention.dense.weight"] == ([16, 2], 1)
    assert shapes["attention.dense.bias"] == shapes["attention.pre_layernorm.weight"] == ([2], 0)
    assert shapes["output.dense1.weight"] == ([3, 16], 0)
    assert shapes["output.dense2.weight"] == ([16, 3], 1)
    assert shapes["output.layernorm.bias"] == ([2], 0)


@pytest.mark.parametrize("_degree", [(False, False)], indirect=True)
def test_norms_and_last_biases_are_whole_where_activations_are(_degree: Region) -> None:
    layer = smp.nn.DistributedTransformerLayer(8, 2, H, 24)
    whole = {n for n, p in layer.named_parameters() if layout_of(p) is None}
    norms = {f"{half}.layernorm.{kind}" for half in ("attention", "output") for kind in ("weight", "bias")}
    assert whole == {"attention.dense.bias", "output.dense2.bias", *norms}


@pytest.mark.parametrize("_degree", [(False, True)], indirect=True)
def test_sizes_that_ranks_cannot_share(_degree: Region) -> None:
    for make, said in (
        (lambda: smp.nn.DistributedLinear(60, 60), r"in_features=60: the 8 .* can: 56 or 64"),
        (lambda: smp.nn.DistributedEmbedding(5, 12), "embedding_dim=12"),
        (lambda: smp.nn.DistributedAttentionLayer(12, 4, H), "num_attention_heads=12"),
        (lambda: smp.nn.DistributedAttentionLayer(8, 4, 20), "hidden_size=20"),
        (lambda: smp.nn.DistributedTransformerOutputLayer(H, 20), "intermediate_size=20"),
    ):
        with pytest.raises(CannotShare, match=said):
            make()
    with pytest.raises(smp.SMPError, match=r"max_norm=1\.0 looks at whole rows"):
        smp.nn.DistributedEmbedding(5, H, max_norm=1.0)


def test_what_modules_refuse() -> None:
    layers = smp.nn
    for call, kind, said in (
        (lambda: layers.DistributedAttentionLayer(post_layernorm=False), ValueError, "at least one of them"),
        (lambda: layers.DistributedTransformerLayer(2, 4, 8, 8, nonsense=1), TypeError, "'nonsense'"),
        (
            lambda: layers.DistributedTransformerOutputLayer(8, 8, activation="x"),
            ValueError,
            "activation='x'",
        ),
        (lambda: layers.DistributedTransformer(0), ValueError, "num_layers=0"),
        (
            lambda: layers.DistributedAttentionLayer(2, 4, 8, query_key_layer_scaling=True),
            ValueError,
            "query_key_layer_scaling=True needs layer_idx",
        ),
        (lambda: layers.DistributedAttentionLayer(2, 4, 8)(torch.ones(1, 2, 8)), ValueError, "takes a tuple"),
        (
            lambda: layers.DistributedAttentionLayer(2, 4, 8)((torch.ones(1, 2, 8), torch.ones(1, 2))),
            ValueError,
            "four dimensions",
        ),
        (
            lambda: layers.DistributedAttentionLayer(2, 4, 8, causal_mask_size=1)(
                (torch.ones(1, 2, 8), None)
            ),
            ValueError,
            "a sequence of 2 tokens, and causal_mask_size=1",
        ),
        (lambda: layers.DistributedLinear(4, 4)(torch.ones(1, 3)), ValueError, "in_features=4"),
    ):
        with pytest.raises(kind, match=said):
            call()
    layers.DistributedTransformerLayer(2, 4, 8, 8, fused_softmax=True, fused_bias_gelu=True)  # of kernels
