"""State dicts between transformers' names and those of distributed modules."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

import smp_lite as smp
from tests.tensor.smp_api import hf_models


@pytest.fixture(autouse=True)
def _session() -> None:
    smp.init_in_memory({"partitions": 1})


def translators(model: str) -> tuple[Any, Any]:
    module = importlib.import_module(f"smp_lite.nn.huggingface.{model}")
    return (
        getattr(module, f"translate_state_dict_to_hf_{model}"),
        getattr(module, f"translate_hf_state_dict_to_smdistributed_{model}"),
    )


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gptneo", "bert", "roberta"])
def test_there_and_back(name: str) -> None:
    to_hf, to_smp = translators(name)
    torch.manual_seed(0)
    dense = hf_models.MODELS[name]()
    state = dense.state_dict()
    torch.manual_seed(1)
    other = hf_models.MODELS[name]()
    smp.set_tensor_parallelism(other)
    model = smp.DistributedModel(other)
    here = to_smp(state)
    assert here.keys() == model.state_dict().keys()
    assert any(".seq_layers.1.attention.query.weight" in key for key in here)
    model.load_state_dict(here)

    # The loaded one computes what the dense one does, and gives the same state back.
    back = to_hf(model.state_dict())
    assert back.keys() == state.keys()
    for key, tensor in state.items():
        assert torch.equal(back[key], tensor), key
    for pairs in smp.state.module_manager.translate_functions:
        assert pairs[0](model.state_dict()).keys() == state.keys() and pairs[1](state).keys() == here.keys()
    ids = torch.randint(hf_models.VOCABULARY, (2, 6))
    with torch.no_grad():
        expected = dense.eval()(input_ids=ids, labels=ids)
        found = model.get_module().eval()(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)


def test_a_block_of_gpt2_and_its_hooks() -> None:
    from smp_lite.nn.huggingface.gpt2 import (
        get_hf_gpt2_transformer_layer_hooks,
        translate_hf_block_state_dict_to_smdistributed,
        translate_layer_state_dict_to_hf_gpt2_block,
    )

    block = hf_models.MODELS["gpt2"]().transformer.h[1].eval()
    init, forward, result = get_hf_gpt2_transformer_layer_hooks()
    args, kwargs = init(block.attn.config, 1)
    layer = smp.nn.DistributedTransformerLayer(*args, **kwargs).eval()
    here = translate_hf_block_state_dict_to_smdistributed(block.state_dict())
    layer.load_state_dict(here)
    back = translate_layer_state_dict_to_hf_gpt2_block(here)
    assert {key: tensor.tolist() for key, tensor in back.items()} == {
        key: tensor.tolist() for key, tensor in block.state_dict().items()
    }
    x = torch.randn(2, 5, 16)
    args, kwargs = forward(x)
    causal = torch.ones(5, 5).tril().bool()
    expected = block(x, attention_mask=causal[None, None])
    torch.testing.assert_close(result(layer(*args, **kwargs)), expected)


def test_masks_of_old_releases() -> None:
    from smp_lite.nn.huggingface import gpt2

    here = gpt2.translate_hf_state_dict_to_smdistributed(hf_models.MODELS["gpt2"]().state_dict())
    old = gpt2.translate_state_dict_to_hf_gpt2(here, max_seq_len=20)
    assert old["transformer.h.1.attn.bias"].shape == (1, 1, 20, 20)
    assert old["transformer.h.0.attn.bias"][0, 0, 3].tolist() == [1] * 4 + [0] * 16
    assert old["transformer.h.0.attn.masked_bias"] == -1e4
    assert gpt2.translate_hf_state_dict_to_smdistributed_gpt2(old).keys() == here.keys()


CAUSAL = ("gpt2", "gptj", "gptneo", "gpt2 blocks")
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
NOT_CAUSAL = torch.ones(2, 1, 6, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "call", "said"),
    [
        ("gpt2", {"past_key_values": 1}, "does not support past_key_values"),
        ("gpt2", {"output_attentions": True}, "does not support output_attentions"),
        ("gpt2", {"token_type_ids": torch.zeros(2, 6, dtype=torch.long)}, "num_token_types=0"),
        ("gptj", {"position_ids": torch.arange(6)[None]}, "position_ids with rotary_dim"),
        ("gpt2 blocks", {"use_cache": True}, "use_cache=False"),
        *((name, {"attention_mask": LEFT}, "lets a token attend to nothing") for name in CAUSAL),
        *((name, {"attention_mask": NOT_CAUSAL}, "attention_mask of shape") for name in CAUSAL),
        ("gpt2", {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "several texts"),
        ("gptneo", {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "several texts"),
    ],
)
def test_what_a_distributed_model_does_not_do(name: str, call: dict[str, Any], said: str) -> None:
    net = hf_models.MODELS[name]()
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net).get_module()
    with pytest.raises((ValueError, smp.SMPError), match=said):
        model(input_ids=torch.zeros(2, 6, dtype=torch.long), **call)


@pytest.mark.parametrize("name", CAUSAL)
def test_padding_on_the_right(name: str) -> None:
    plain = hf_models.MODELS[name]()
    net = copy.deepcopy(plain)
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net).get_module()
    call = {"input_ids": torch.arange(12).reshape(2, 6), "attention_mask": LEFT.flip(-1)}
    for grad in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with grad():
            torch.testing.assert_close(model(**call).logits, plain(**call).logits, rtol=1e-5, atol=1e-5)


# Attention under its own name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 0.125),
        ({"scale_attn_by_layer_idx": True, "layer_idx": 3}, 0.03125),
        ({"scale_attention_scores": False, "scale_attn_by_layer_idx": True, "layer_idx": 3}, 0.25),
        ({"scale": 0.1}, 0.1),
    ],
)
def test_scales_of_flash_attention(options: dict[str, Any], scale: float) -> None:
    assert smp.nn.FlashAttentionLayer(attention_head_size=64, **options).scale == pytest.approx(scale)


def test_flash_attention() -> None:
    with pytest.raises(ValueError, match="needs attention_head_size"):
        smp.nn.FlashAttentionLayer()
    with pytest.raises(ValueError, match="needs layer_idx"):
        smp.nn.FlashAttentionLayer(attention_head_size=2, scale_attn_by_layer_idx=True)
    qkv = torch.randn(2, 3, 3, 2, 4)
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    scores = query @ key.mT / 2
    scores = scores + torch.tensor([[-0.125, -0.0625, 0.0], [-2 / 256, -1 / 256, 0.0]])[:, None]
    scores = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    layer = smp.nn.FlashAttentionLayer(0.0, 4, use_alibi=True)
    found = layer(qkv, causal=True)
    assert found.shape == (2, 2, 3, 4)
    torch.testing.assert_close(found, scores.softmax(-1) @ value)
