"""A module that is replaced computes and trains as it did, whatever a script has done to it before, or it is
an error that names what cannot be."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from smp_lite import session
from smp_lite.tensor_parallel.replacement import replace_marked
from tests.harness import run_distributed
from tests.tensor.smp_api import replacement_law_cases as cases
from tests.tensor.smp_api.hf_models import MODELS
from tests.tensor.smp_api.test_marks import DistributedOuter, Outer, register
from tests.tensor.smp_api.test_modules import parameters_of

CASES = "tests.tensor.smp_api.replacement_law_cases"


@pytest.fixture(autouse=True)
def _session() -> None:
    smp.init_in_memory({"partitions": 1})


def anew() -> None:
    smp.reset()
    smp.init_in_memory({"partitions": 1})


def wrapped(net: nn.Module) -> smp.DistributedModel:
    smp.set_tensor_parallelism(net)
    return smp.DistributedModel(net)


# What refers to the old layers ------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_old_layer_that_the_model_still_reaches_is_refused(partitions: int) -> None:
    kwargs = {"parameters": parameters_of(2, True, "memory", partitions)}
    for told in run_distributed(f"{CASES}:referring", 2 * partitions, kwargs=kwargs):
        for name, text in told.items():
            assert cases.REFERRING[name.partition(", ")[0]][1] in text, (name, text)
            assert "replacement_law_cases.py:" in text and "submodule" in text, (name, text)


@pytest.mark.parametrize("delayed", [False, True])
def test_an_optimizer_that_was_made_before_the_split_is_refused(delayed: bool) -> None:
    kwargs = {"parameters": parameters_of(2, True, "memory"), "delayed": delayed}
    for refused, cleared, stepped, late in run_distributed(f"{CASES}:early_optimizer", 2, kwargs=kwargs):
        assert refused.startswith(
            "smp.DistributedOptimizer: the optimizer was made before the model was split"
        )
        assert "param_groups[0] holds the old parameter 'up.weight'" in refused
        assert "from model.parameters() after smp.DistributedModel(...)" in refused
        for text in (cleared, stepped):
            assert "grad of 'up.weight'" in text and "a split layer has replaced this parameter" in text
        assert late == "ran"


def test_so_is_one_that_was_made_before_a_plan_has_split_the_model() -> None:
    kwargs = {"parameters": parameters_of(2, True, "memory")}
    for told in run_distributed(f"{CASES}:early_optimizer_of_a_plan", 2, kwargs=kwargs):
        assert "holds the old parameter 'up.weight'" in told


def test_an_old_parameter_says_what_it_was_and_no_numbers() -> None:
    net = cases.Net()
    old, layer = net.up.weight, net.up
    wrapped(net)
    assert old.shape == (8, 8) and old.numel() == 64 and old.requires_grad and old.dtype is torch.float32
    assert repr(old) == "<the parameter 'up.weight', which a split layer has replaced>"
    for read in (lambda: old + 1, lambda: old.data, lambda: old.grad, lambda: torch.stack([old, old])):
        with pytest.raises(smp.SMPError, match=r"of 'up.weight' at .*test_replacement_law.py:\d+: a split"):
            read()
    with pytest.raises(smp.SMPError, match=r"still calls \.train\(\) of the old one"):
        layer.eval()
    for registers in (layer.register_forward_hook, layer.register_full_backward_pre_hook):
        with pytest.raises(smp.SMPError, match=rf"still calls \.{registers.method}\(\) of the old one"):
            registers(lambda *_: None)
    with pytest.raises(smp.SMPError, match=r"detach of 'up.weight'"):
        layer.state_dict()
    assert str(inspect.signature(layer.forward)) == str(inspect.signature(nn.Linear(1, 1).forward))


def test_a_model_that_was_replaced_is_not_wrapped_again() -> None:
    net = nn.Linear(2, 2)
    wrapped(net)
    anew()
    with pytest.raises(smp.SMPError, match="was replaced by its split layer before"):
        smp.DistributedModel(net)


def test_the_generator_goes_on_as_if_nothing_had_been_made() -> None:
    torch.manual_seed(3)
    net = MODELS["gpt2"]()
    expected = torch.get_rng_state()
    wrapped(net)
    assert torch.equal(torch.get_rng_state(), expected)


# What is on parameters and modules --------------------------------------------------------------------------


def test_what_a_script_notes_on_parameters_goes_over() -> None:
    net, model = cases.Net(), MODELS["gpt2"]()
    net.up.weight.rate = 0.5
    wrapped(net)
    assert net.up.weight.rate == 0.5 and not hasattr(net.down.weight, "rate")
    anew()
    model.transformer.h[1].attn.c_attn.weight.rate = 0.25
    model.transformer.h[0].mlp.c_fc.weight.rate = 0.75
    found = {name: p.rate for name, p in wrapped(model).named_parameters() if hasattr(p, "rate")}
    layers = "transformer.seq_layers"
    assert {name.partition(f"{layers}.")[2]: rate for name, rate in found.items()} == {
        "0.output.dense1.weight": 0.75,
        **{f"1.attention.{name}.weight": 0.25 for name in ("query", "key", "value")},
    }


def test_a_number_for_each_element_does_not() -> None:
    net = cases.Net()
    net.up.weight.mask = torch.ones(8, 8)
    with pytest.raises(
        smp.SMPError, match=r"weight in up \(Linear\) has an attribute 'mask' of its own shape"
    ):
        wrapped(net)


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.second.weight = self.first.weight


class DistributedTied(smp.nn.DistributedModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = smp.nn.DistributedLinear(width, width, bias=False)
        self.second = smp.nn.DistributedLinear(width, width)


def shared_layer() -> nn.Module:
    model = cases.plain_gpt2()
    model.transformer.h[1] = model.transformer.h[0]
    return model


def shared_weight() -> nn.Module:
    model = cases.plain_gpt2()
    model.transformer.h[1].mlp.c_fc.weight = model.transformer.h[0].mlp.c_fc.weight
    return model


def shared_layer_of_bert() -> nn.Module:
    model = MODELS["bert"]()
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Tied(4), r"first\.weight and second\.weight are one parameter in the model \(Tied\)"),
        (shared_layer, r"transformer\.h\.0\.ln_1\.weight and transformer\.h\.1\.ln_1\.weight are one"),
        (shared_weight, r"transformer\.h\.0\.mlp\.c_fc\.weight and transformer\.h\.1\.mlp\.c_fc\.weight are"),
        (
            shared_layer_of_bert,
            r"layer\.0\..* and layer\.1\..* are one parameter in .*encoder \(BertEncoder\)",
        ),
    ],
)
def test_weights_that_would_be_trained_apart_are_refused(build: Callable[[], nn.Module], said: str) -> None:
    smp.tp_register_with_module(Tied, DistributedTied)
    with pytest.raises(smp.SMPError, match=said):
        wrapped(build())


def test_a_layer_that_stands_in_another_module_as_well_stays_whole() -> None:
    register()
    net = nn.ModuleDict({"outer": Outer(3)})
    net["inner"] = net["outer"].inner
    smp.set_tensor_parallelism(net)
    with pytest.warns(UserWarning, match=r"outer \(Outer\) is not distributed: its inner stands in another"):
        replace_marked(session.current(), net)
    assert type(net["outer"]) is Outer and net["outer"].inner is net["inner"]
    assert isinstance(net["inner"], smp.nn.DistributedLinear)


class Extra(Outer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.shift = nn.Parameter(torch.ones(width))


def extra_of_linear() -> nn.Module:
    net = nn.Linear(2, 2)
    net.scale = nn.Parameter(torch.ones(1))
    return net


def in_two_types() -> nn.Module:
    net = nn.Linear(2, 2)
    net.bias.data = net.bias.data.double()
    return net


def with_bias() -> nn.Module:
    model = cases.plain_gpt2(tie_word_embeddings=False)
    model.lm_head = nn.Linear(16, cases.VOCABULARY)
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            extra_of_linear,
            r"the model \(Linear\) has scale, which the DistributedLinear that would replace it",
        ),
        (lambda: Extra(3), r"the model \(Extra\) has shift, which the DistributedOuter"),
        (
            in_two_types,
            r"the model \(Linear\) has bias in torch\.float64, and other weights in torch\.float32",
        ),
        (
            with_bias,
            r"has lm_head\.bias, which the DistributedTransformerLMHead that would replace it has not",
        ),
    ],
)
def test_weights_that_the_counterpart_has_not_are_refused(build: Callable[[], nn.Module], said: str) -> None:
    smp.tp_register_with_module(Extra, DistributedOuter, lambda width: ((width, 2.0), {}))
    with pytest.raises(smp.SMPError, match=said):
        wrapped(build())


def test_new_weights_are_said_of_each_model() -> None:
    class Other(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width)

    smp.tp_register_with_module(Other, smp.nn.DistributedLinear, lambda width: ((width, width), {}))
    told = []
    for _ in range(2):
        anew()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(nn.Sequential(Other(2)))
        told.append(sum("with new weights" in str(each.message) for each in caught))
    assert told == [1, 1]


def evaluating_part() -> nn.Module:
    model = cases.gpt2().train()
    model.transformer.h[1].mlp.dropout.eval()
    return model


def test_parts_in_another_mode_are_refused() -> None:
    with pytest.raises(
        smp.SMPError, match=r"is in training, and its transformer\.h\.1\.mlp\.dropout in eval"
    ):
        wrapped(evaluating_part())
    anew()
    wrapped(cases.without_dropout(evaluating_part()))  # nothing depends on it


def test_other_methods_are_refused() -> None:
    model = cases.gpt2()
    model.train = lambda mode=True: model
    with pytest.raises(ValueError, match=r"the model \(GPT2LMHeadModel\) has been given another train"):
        wrapped(model)


# Hugging Face models that are not as configured -------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("name", cases.FOLLOWED)
def test_what_modules_say_goes_before_the_configuration(name: str) -> None:
    expected = cases.dense_losses(name)
    marks = [""] if "bert" in name or "tied" in name else ["", "transformer"]
    for mark in marks:
        kwargs = {"name": name, "parameters": {**parameters_of(2, True, "speed"), "microbatches": 1}}
        for losses, kinds in run_distributed(f"{CASES}:losses", 2, kwargs={**kwargs, "mark": mark}):
            assert "DistributedTransformerLayer" in kinds
            assert losses == pytest.approx(expected, abs=2e-6)


def change(where: str, **values: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = cases.plain_gpt2()
        for key, value in values.items():
            setattr(model.get_submodule(where), key, value)
        return model

    return build


def of_config(key: str, value: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = cases.plain_gpt2()
        setattr(model.config, key, value)
        return model

    return build


class OtherAttention(nn.Module):
    pass


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (change("transformer", ln_f=nn.Identity()), "transformer.ln_f is of class Identity, and its config"),
        (change("transformer.h.0", attn=OtherAttention()), "transformer.h.0.attn is of class OtherAttention"),
        (change("transformer.h.0.mlp", act=nn.Tanh()), "transformer.h.0: its activation mlp.act is Tanh"),
        (change("transformer.h.0.attn.resid_dropout", p=0.1), "probabilities of dropout are 0.1 in attn."),
        (change("transformer.h.1.ln_2", eps=0.1), "transformer.h.1: epsilons of norms are"),
        (change("transformer.h.1.attn", scaling=0.1), "transformer.h.1: attn.scaling is 0.1"),
        (change("transformer.h.1.attn", num_heads=1), "transformer.h.1.attn.num_heads is 1, and its"),
        (change("transformer.wte", padding_idx=2), "transformer.wte.padding_idx is 2, and its configuration"),
        (change("", loss_function=lambda **_: 0), "has been given another loss_function"),
        (
            of_config("n_layer", 3),
            "transformer.h.2 is nothing, and its configuration makes it of class GPT2B",
        ),
        (of_config("n_layer", 1), "transformer.h.1 is of class GPT2Block, and its configuration makes it no"),
        (of_config("output_hidden_states", True), "config.output_hidden_states=True"),
        (of_config("output_attentions", True), "set config.output_attentions = False"),
    ],
)
def test_what_cannot_be_followed_is_refused(build: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(smp.SMPError, match=re.escape(said)):
        wrapped(build())


@pytest.mark.parametrize("what", ["hidden_states", "attentions"])
def test_what_replaced_blocks_do_not_give_the_model_around_is_refused(what: str) -> None:
    net = cases.plain_gpt2()
    smp.set_tensor_parallelism(net.transformer.h)
    model = smp.DistributedModel(net)
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert model(ids, use_cache=False).logits.isfinite().all()
    with pytest.raises(
        ValueError, match=f"does not give the model its {what}: call it without output_{what}"
    ):
        model(ids, use_cache=False, **{f"output_{what}": True})


def test_options_of_the_user_go_before_both() -> None:
    model = cases.no_dropout()
    smp.set_tensor_parallelism(model, attention_dropout_prob=0.25)
    layers = smp.DistributedModel(model).get_module().transformer.seq_layers
    assert [layer.attention.scores.dropout for layer in layers] == [0.25, 0.25]
    assert [layer.output.hidden_dropout_prob for layer in layers] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["gptj", "gptneo", "bert"])
def test_state_of_a_plain_models_optimizer_is_that_of_the_same_parameters(name: str, tmp_path: Path) -> None:
    kwargs = {"name": name, "folder": str(tmp_path), "parameters": parameters_of(2, True, "speed")}
    for expected, found in run_distributed(f"{CASES}:moved_optimizer", 2, kwargs=kwargs):
        assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.ci
def test_checkpoints_that_do_not_move_off_tensor_parallelism_say_why(tmp_path: Path) -> None:
    parameters = {**parameters_of(2, True, "speed"), "microbatches": 1}
    for told in run_distributed(
        f"{CASES}:moved_off", 2, kwargs={"folder": str(tmp_path), "parameters": parameters}
    ):
        for way in ("off", "on"):
            assert "three parameters stand for each fused c_attn" in told[f"{way}, portable=False"]
            assert "load_optimizer=False" in told[f"{way}, portable=False"]
            assert "has the split layers' names" in told[f"{way}, portable=True"]
        assert "here they are not replaced" in told["off, portable=True"]
        assert "here they are replaced" in told["on, portable=True"]
