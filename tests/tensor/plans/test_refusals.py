"""What a plan cannot do, or cannot do exactly, is an error that names it; no other process is needed."""

from __future__ import annotations

import copy
import inspect
import math
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_lite.comm.groups.axis import Axis
from smp_lite.errors import SMPError
from smp_lite.nn.layout import layout_of
from smp_lite.nn.plans import known_plan, load_whole_state_dict, parallelize, whole_state_dict
from tests.tensor.plans.architectures import build
from tests.tensor.plans.known_models import FAMILIES, batch_of, build_known

TWO = Axis("tp", range(2), 1)
FOUR = Axis("tp", range(4), 2)


class MLP(nn.Module):
    def __init__(self, width: int = 8, inner: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm, self.dropout = nn.LayerNorm(inner), nn.Dropout(p)
        self.gate = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Chunked(MLP):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, dim=-1)
        return self.down(torch.cat([first * second, second], -1))


class Sliced(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(torch.cat([y[..., :4], y[..., 4:]], -1))


class Normed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class Softmaxed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.attend(self.up(x)))

    def attend(self, y: Tensor) -> Tensor:
        return y.softmax(-1)


class Dropping(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.up(x)))


class Mixed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x))


class Returned(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Sized(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.inner = 16

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(-1, self.inner))


_WHITE = torch.eye(16)

#: Between the two layers of a pair, by what is refused there.
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "takes glu of": lambda y: F.glu(torch.cat([y, y], 0)),
    "takes flip of": lambda y: y.flip(-1),
    "takes roll of": lambda y: torch.roll(y, 1, -1),
    "takes @ of": lambda y: y @ y.mT @ y,
    "takes matmul of": lambda y: torch.matmul(y, _WHITE),
    "takes einsum of": lambda y: torch.einsum("bsf,fg->bsg", y, _WHITE),
    "takes linear of": lambda y: F.linear(y, _WHITE),
    "takes cat of": lambda y: torch.cat([y, y], -1),
    "takes scaled_dot_product_attention of": lambda y: F.scaled_dot_product_attention(y, y, y),
    "computes with the number of this rank's features, in 'y / y.shape": lambda y: y / y.shape[-1],
    "computes with the number of this rank's features, in 'y \\* ": lambda y: y * math.sqrt(1 / y.size(-1)),
    "computes with the number of this rank's features, in 'y - ": lambda y: y - y.numel(),
    "decides by the number": lambda y: y if y.shape[-1] > 12 else -y,
}


def _between(function: Callable[[Tensor], Tensor]) -> type[MLP]:
    """A class whose forward has that expression in it, since it is its code that is read."""
    source = textwrap.dedent(inspect.getsource(function)).strip()
    code = source.partition("lambda y: ")[2].rstrip(",")
    path = Path(tempfile.mkdtemp()) / "between.py"
    path.write_text(f"def forward(self, x):\n    y = self.up(x)\n    return self.down({code})\n")
    scope = {"torch": torch, "F": F, "math": math, "_WHITE": _WHITE}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return type("Between", (MLP,), {"forward": scope["forward"]})


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) / 2


PAIR = {"up": "colwise", "down": "rowwise"}


def refused(model: nn.Module, plan: dict[str, str] | None, match: str, axis: Axis = TWO) -> None:
    """And the model is left as it was."""
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(SMPError, match=match):
        parallelize(model, axis, plan)
    assert kinds == [type(module) for module in model.modules()]
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
        assert layout_of(parameter) is None


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (
            Chunked,
            r"Chunked\) cuts what a colwise layer gives, in 'self.up\(x\).chunk\(2, dim=-1\)'.*packed",
        ),
        (Sliced, r"Sliced\) cuts what a colwise layer gives, in 'y\[..., :4\]'"),
        (Normed, r"Normed\) gives this rank's part of the features to norm \(LayerNorm\)"),
        (Softmaxed, r"takes softmax of this rank's part of the features, in 'y.softmax\(-1\)'"),
        (Mixed, r"meet whole values, in 'self.up\(x\) \* self.gate\(x\)'"),
        (Returned, r"returns this rank's part of the features, and no layer of the plan takes it"),
        (Sized, r"uses self.inner=16, the number of features of the whole up.*\"local_size\""),
    ],
)
def test_code_that_would_compute_something_else(kind: type[MLP], match: str) -> None:
    refused(nn.ModuleDict({"mlp": kind()}), {"mlp.up": "colwise", "mlp.down": "rowwise"}, match)


@pytest.mark.parametrize("match", MIXING)
def test_functions_that_mix_features_or_count_them(match: str) -> None:
    refused(_between(MIXING[match])(), PAIR, match)


@pytest.mark.parametrize("kind", [nn.Softmax, nn.GLU])
def test_modules_that_look_at_several_features(kind: type[nn.Module]) -> None:
    class Given(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.soft = kind(-1)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.soft(self.up(x)))

    refused(Given(), PAIR, f"features to soft \\({kind.__name__}\\), which looks at several")


class Headed(MLP):
    """Sizes of heads, and attention of each, are as on the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = self.up(x).shape
        y = self.up(x).view(batch, tokens, width // 4, 4).transpose(1, 2)
        y = (y @ y.mT / math.sqrt(y.shape[-1])).softmax(-1) @ y
        return self.down(y.transpose(1, 2).reshape(batch, tokens, width))


def test_heads_may_meet_and_be_counted() -> None:
    parallelize(Headed(), TWO, PAIR)


def test_code_that_cannot_be_seen() -> None:
    class Hidden(MLP):
        def forward(self, x: Tensor) -> Tensor:
            for name in ("up", "down"):
                x = getattr(self, name)(x)
            return x

    refused(Hidden(), PAIR, r"Hidden\) cannot be seen to call up, .*colwise_gather_output")


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x))


class Taker(nn.Module):
    def __init__(self, soft: bool) -> None:
        super().__init__()
        self.down, self.soft = nn.Linear(16, 8), soft

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return x + self.down(y.softmax(-1) if self.soft else y)


class Both(nn.Module):
    def __init__(self, soft: bool = False) -> None:
        super().__init__()
        self.giver, self.taker = Giver(), Taker(soft)

    def forward(self, x: Tensor) -> Tensor:
        return self.taker(self.giver(x), x)


def test_parts_that_go_from_one_module_to_another() -> None:
    plan = {"both.giver.up": "colwise", "both.taker.down": "rowwise"}
    parallelize(nn.ModuleDict({"both": Both()}), TWO, plan)
    refused(
        nn.ModuleDict({"both": Both(soft=True)}),
        plan,
        r"both.taker \(Taker\) takes softmax of this rank's part",
    )
    refused(Both(), {"giver.up": "colwise"}, r"gives this rank's part of the features to taker \(Taker\)")


def test_dropout_on_parts() -> None:
    refused(Dropping(p=0.5), PAIR, r"applies dropout \(dropout, p=0.5\).*\"local_dropout\"")
    parallelize(Dropping(p=0.5), TWO, {**PAIR, "dropout": "local_dropout"})
    parallelize(Dropping(p=0.0), TWO, PAIR)


def _drop(y: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    if p == 0.0 or not training:
        return y
    return y * torch.empty_like(y).bernoulli_(1 - p) / (1 - p)


def _whole_rows(y: Tensor, p: float) -> Tensor:
    """Of stochastic depth, which drops samples."""
    shape = (y.shape[0],) + (1,) * (y.ndim - 1)
    return y * y.new_empty(shape).bernoulli_(1 - p)


class Noise(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.p, self.training)


class Drawing(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.rate, self.zero = 0.5, 0.0
        self.noise, self.silence, self.alpha = Noise(0.5), Noise(0.0), nn.AlphaDropout(0.5)
        self.acting = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        self.quiet = nn.Sequential(nn.ReLU(), nn.Dropout(0.0))


class Functional(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(x), 0.5, self.training))


class Keyword(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(x), p=self.rate))


class Default(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x))
        return self.down(F.dropout1d(y))


class Native(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.dropout(self.up(x), 0.5, self.training))


class OfTwo(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        p = self.rate if self.training else 0.0
        return self.down(F.dropout(torch.transpose(self.up(x), 0, 1), p).transpose(0, 1))


class InPlace(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y * torch.empty(y.shape).bernoulli_(0.5))


class Like(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y + torch.randn_like(y))


class InSizes(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        rows, inner = y.shape
        return self.down(y + torch.rand(rows, inner))


class Bernoulli(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y * torch.bernoulli(torch.full_like(y, 0.5)))


class Helped(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(_drop(self.up(x), training=self.training))


class Method(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x), self.rate))

    def drop(self, y: Tensor, rate: float) -> Tensor:
        return F.dropout(y, rate)


class Attending(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).view(1, 2, -1, 4)
        return self.down(F.scaled_dot_product_attention(y, y, y, None, 0.5).view(len(x), -1))


class Inside(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.noise(self.up(x)))


class Alpha(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.alpha(self.up(x)))


class InSequence(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.acting(self.up(x)))


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (
            Functional,
            r"\(Functional\) applies dropout \(F.dropout\(self.up\(x\), 0.5, self.training\)\) on this",
        ),
        (Keyword, r"applies dropout \(nn.functional.dropout\(self.up\(x\), p=self.rate\)\)"),
        (Default, r"applies dropout \(F.dropout1d\(y\)\)"),
        (Native, r"applies dropout \(torch.dropout\(self.up\(x\), 0.5, self.training\)\)"),
        (OfTwo, r"applies dropout \(F.dropout\(torch.transpose\(self.up\(x\), 0, 1\), p\)\)"),
        (InPlace, r"draws random numbers \(torch.empty\(y.shape\).bernoulli_\(0.5\)\)"),
        (
            Like,
            r"draws random numbers \(torch.randn_like\(y\)\).*'colwise_gather_output'.*rowwise_split_input",
        ),
        (InSizes, r"draws random numbers \(torch.rand\(rows, inner\)\)"),
        (Bernoulli, r"draws random numbers \(torch.bernoulli\(torch.full_like\(y, 0.5\)\)\)"),
        (Helped, r"draws random numbers \(torch.empty_like\(y\).bernoulli_\(1 - p\)\)"),
        (Method, r"applies dropout \(F.dropout\(y, rate\)\)"),
        (Attending, r"applies dropout \(F.scaled_dot_product_attention\(y, y, y, None, 0.5\)\)"),
        (Inside, r"mlp.noise \(Noise\) applies dropout \(F.dropout\(y, self.p, self.training\)\)"),
        (Alpha, r"applies dropout \(alpha, p=0.5\) on this rank's part"),
        (InSequence, r"mlp.acting \(Sequential\) applies dropout \(1, p=0.5\)"),
    ],
)
def test_random_numbers_for_parts(kind: type[MLP], match: str) -> None:
    refused(nn.ModuleDict({"mlp": kind()}), {"mlp.up": "colwise", "mlp.down": "rowwise"}, match)
    plan = {"mlp.up": "colwise_gather_output", "mlp.down": "rowwise_split_input"}
    parallelize(nn.ModuleDict({"mlp": kind()}), TWO, plan)


class Zero(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.dropout(self.up(x), 0.0, self.training), self.zero)
        y = F.dropout(F.dropout(y, 0.5, False), p=0.0 if self.training else self.zero)
        return self.down(_drop(_drop(F.alpha_dropout(y, 0.5), self.zero, self.training), 0.0))


class Branching(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.training and self.zero > 0:
            y = y + torch.randn_like(y)
        return self.down(self.quiet(self.silence(y)))


class OfSamples(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = y * (torch.rand(y.shape[0], 1) > 0.5) * torch.rand(y.size(0), 1) * torch.rand(len(y), 1)
        rows, _ = y.shape
        return self.down(_whole_rows(y * torch.rand(rows, 1) * torch.rand(x.shape[:-1])[:, None], 0.5))


class OfWholes(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(F.dropout(x + torch.randn_like(x), 0.5))))
        return F.dropout(y, 0.5, self.training) + torch.randn_like(y)


@pytest.mark.parametrize("kind", [Zero, Branching, OfSamples, OfWholes])
def test_random_numbers_that_are_none_or_for_the_whole(kind: type[MLP]) -> None:
    parallelize(nn.ModuleDict({"mlp": kind()}), TWO, {"mlp.up": "colwise", "mlp.down": "rowwise"})


def test_patterns() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(MLP() for _ in range(2))})
    refused(
        model,
        {"layers.*.upp": "colwise"},
        r"'layers.\*.upp': 'colwise' matches no .*nearest names: layers.\*.up",
    )
    refused(model, {"layers.*.up": "columns"}, r"'columns' is no style; there are all_reduce, colwise")
    refused(
        model,
        {"layers.*.up": "colwise", "layers.0.*": "rowwise"},
        r"layers.0.up is to be 'colwise' by 'layers.\*.up' and 'rowwise' by 'layers.0.\*'",
    )
    refused(model, None, "comes without a tensor-parallel plan.*derive_plan")
    refused(
        model, {"layers.*.norm": "colwise"}, r"'colwise' is for a Linear, but layers.0.norm is a LayerNorm"
    )
    refused(model, {"layers.*.up.weight": "colwise"}, "parameter of a Linear: name the layer itself")
    refused(model, {"layers.*.up": "sequence_parallel"}, r"'sequence_parallel' is not supported: .*one_d")
    refused(model, {"layers.*.up": "ep_dispatch_experts"}, r"splits by expert")
    refused(model, {"layers.*.up": "packed_colwise:3"}, r"16 output features, which are not 3 matrices")


def test_layers_of_their_own() -> None:
    refused(
        nn.Sequential(OwnLinear(4, 4), nn.Linear(4, 4)),
        {"0": "colwise", "1": "rowwise"},
        "whose forward is its own",
    )
    model = MLP()
    nn.utils.parametrizations.weight_norm(model.up)
    with pytest.raises(SMPError, match="up computes its weight from others"):
        parallelize(model, TWO, PAIR)


def test_a_split_model_is_not_split_again() -> None:
    model = MLP()
    parallelize(model, TWO, PAIR)
    with pytest.raises(SMPError, match="up is split already"):
        parallelize(model, TWO, PAIR)


def test_sizes() -> None:
    refused(MLP(inner=6), PAIR, r"up \('up': 'colwise'\): .*out_features is 6, .*4 ranks.*: 4 or 8", FOUR)
    refused(
        nn.Sequential(nn.Linear(6, 4)),
        {"0": "rowwise_split_input"},
        r"in_features is 6, .*: 4 or 8",
        FOUR,
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48},
            r"q_proj has 6 heads of head_dim=8, .*: 4 or 8",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
            r"k_proj has 3 heads of head_dim=8, .*: 4",
        ),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}, r"has 6 heads .*: 4 or 8"),
    ],
)
def test_heads(changes: dict[str, int], match: str) -> None:
    refused(build("llama", **changes), None, match, FOUR)


def test_ties() -> None:
    model = build("llama", tie_word_embeddings=True)
    plan = dict(model._tp_plan)
    one = {name: style for name, style in plan.items() if name != "model.embed_tokens"}
    refused(
        model, one, r"lm_head.weight .* same parameter as model.embed_tokens.weight, which is not in the plan"
    )
    other = {**plan, "model.embed_tokens": "embedding_colwise"}
    refused(model, other, r"same parameter as .*, which is split in another way")
    parallelize(model, TWO)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    layout = layout_of(model.lm_head.weight)
    assert layout is not None and layout.padded == {0: 98}
    assert len([p for p in model.parameters() if p is model.lm_head.weight]) == 1


def test_weights_shared_with_a_module_outside() -> None:
    model = nn.ModuleDict({"one": MLP(), "two": MLP()})
    model["two"].up.weight = model["one"].up.weight
    plan = {"one.up": "colwise", "one.down": "rowwise"}
    refused(model, plan, r"one.up.weight .* same parameter as two.up.weight, which is not in the plan")
    parallelize(model, TWO, {"*.up": "colwise", "*.down": "rowwise"})
    assert model["two"].up.weight is model["one"].up.weight

    model = nn.ModuleDict({"one": MLP(), "two": MLP()})
    model["two"].up.weight = nn.Parameter(model["one"].up.weight.detach())
    refused(model, plan, r"one.up.weight shares memory with two.up.weight")


def gpt2(**changes: Any) -> nn.Module:
    return build(
        "gpt2", n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **changes
    )


def test_gpt2() -> None:
    plan = {"h.*.attn.c_attn": "colwise", "h.*.attn.c_proj": "rowwise"}
    refused(gpt2(), plan, r"cuts what a colwise layer gives, in 'self.c_attn\(encoder_hidden_states\).split")
    plan["h.*.attn.c_attn"] = "packed_colwise:3"
    refused(gpt2(), plan, r'self.split_size=32, .*"transformer.h.0.attn.split_size": "local_size"')
    wrong = {**plan, "h.*.attn.split_size": "local_size"}
    refused(
        gpt2(n_inner=36),
        {**wrong, "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"},
        "36",
        Axis("tp", range(8), 1),
    )


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        (
            "bert",
            {"attention_probs_dropout_prob": 0.1},
            r"BertSelfAttention\) applies dropout \(self.dropout=0.1\)",
        ),
        ("gpt2", {"attn_pdrop": 0.1}, r"GPT2Attention\) applies dropout \(self.attn_dropout=0.1\)"),
        ("t5", {"dropout_rate": 0.1}, r"T5Attention\) applies dropout \(self.dropout=0.1\)"),
        (
            "vit",
            {"attention_probs_dropout_prob": 0.1},
            r"ViTAttention\) applies dropout \(self.attention_dropout=0.1\)",
        ),
        ("bert", {"num_attention_heads": 2}, "query has 2 heads of attention_head_size=16, .*4 ranks.*: 4"),
        ("gpt2", {"n_head": 2}, r"c_attn has 2 heads of head_dim=16, .*4 ranks.*: 4"),
        ("t5", {"num_heads": 6}, r"relative_attention_bias.*embedding_dim is 6, .*4 ranks.*: 4 or 8"),
        ("vit", {"num_attention_heads": 2}, r"q_proj has 2 heads of head_dim=16, .*4 ranks.*: 4"),
    ],
)
def test_what_our_own_plans_cannot_split(name: str, changes: dict[str, Any], match: str) -> None:
    refused(build_known(name, **changes), None, match, FOUR if "heads" in match or "dim" in match else TWO)


def test_a_bias_of_scores_is_split_with_the_heads() -> None:
    model = build_known("t5")
    plan = known_plan(model)
    bias = "encoder.block.*.layer.*.SelfAttention.relative_attention_bias"
    whole = {name: style for name, style in plan.items() if name != bias}
    refused(
        model, whole, r"SelfAttention \(T5Attention\) lets this rank's part of the features meet whole values"
    )
    refused(model, {**plan, bias: "embedding_colwise"}, r"T5Attention\) lets this rank's part .* meet whole")
    parallelize(model, TWO)
    attention = model.encoder.block[0].layer[0].SelfAttention
    assert (attention.n_heads, attention.relative_attention_bias.weight.shape) == (2, (8, 2))


def test_our_own_plans_are_for_models_that_come_without_one() -> None:
    assert known_plan(MLP()) == known_plan(build("llama")) == {}
    model = build_known("vit")
    model.config.base_model_tp_plan = {"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"}
    assert set(parallelize(model, TWO).values()) == {"colwise", "rowwise"}
    assert layout_of(model.vit.layers[0].attention.q_proj.weight) is None
    assert not [name for name in known_plan(build_known("t5")) if "wi_" in name]
    assert [name for name in known_plan(build_known("t5 gated")) if "wi_" in name]


def test_phi3_counts_heads_by_its_configuration() -> None:
    plan = {"layers.*.self_attn.qkv_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
    refused(build("phi3"), plan, r"counts heads by self.config.num_attention_heads.*colwise_gather_output")
    plan = {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    refused(build("phi3"), plan, r"cuts what a colwise layer gives, in .*chunk\(2, dim=-1\)")


def test_experts() -> None:
    model = build("mixtral")
    plan = dict(model._tp_plan)
    whole = {name: style for name, style in plan.items() if not name.endswith("experts.down_proj")}
    refused(model, whole, r"MixtralExperts\) lets this rank's part of the features meet whole values")
    alone = {name: style for name, style in plan.items() if not name.endswith("experts.gate_up_proj")}
    refused(
        model, alone, r"'moe_tp_experts', but its parameter .*experts.gate_up_proj is whole on every rank"
    )
    unpacked = {**plan, "model.layers.*.mlp.experts.gate_up_proj": "colwise"}
    refused(model, unpacked, r"MixtralExperts\) cuts what a colwise layer gives")


def test_which_key_heads_a_rank_computes() -> None:
    """Two key heads on four ranks: the first two ranks' query heads attend to the first."""
    for rank in range(4):
        model = build("llama")
        parallelize(model, Axis("tp", range(4), rank))
        attention = model.model.layers[0].self_attn
        assert attention.num_key_value_groups == 1
        assert attention.k_proj.rows == attention.v_proj.rows == slice(rank // 2 * 8, rank // 2 * 8 + 8)
        layout = layout_of(attention.k_proj.weight)
        assert layout is not None and not layout.axes and len(layout.partial_over) == 1


def test_copies_keep_their_parts() -> None:
    model = build("qwen3")
    parallelize(model, TWO)
    copied = copy.deepcopy(model)
    for (name, found), expected in zip(copied.named_parameters(), model.parameters(), strict=True):
        assert layout_of(found) == layout_of(expected), name
        assert found is not expected


def test_on_one_rank_states_go_both_ways() -> None:
    one = Axis("tp", [0], 0)
    dense = build("llama", tie_word_embeddings=True)
    model = copy.deepcopy(dense)
    parallelize(model, one)
    state = whole_state_dict(model)
    assert list(state) == list(dense.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in dense.state_dict().items())
    other = build("llama", tie_word_embeddings=True, attention_bias=False, mlp_bias=False)
    with pytest.raises(SMPError, match=r"missing \[.*bias"):
        load_whole_state_dict(model, other.state_dict())
    state["model.norm.weight"] = state["model.norm.weight"] + 1
    load_whole_state_dict(model, state)
    assert torch.equal(model.model.norm.weight, dense.model.norm.weight + 1)


def test_what_is_changed_is_returned() -> None:
    model = build("llama")
    found = parallelize(
        model,
        TWO,
        {
            "layers.*.mlp.gate_proj": "colwise",
            "layers.*.mlp.up_proj": "colwise",
            "model.layers.*.mlp.down_proj": "rowwise",
        },
    )
    assert found == {
        f"model.layers.{i}.mlp.{name}": style
        for i in range(2)
        for name, style in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise"))
    }
    assert model.model.layers[1].mlp.up_proj.weight.shape == (24, 32)
    assert layout_of(model.model.layers[1].self_attn.q_proj.weight) is None


def _asked_for_attentions(name: str, way: str) -> Any:
    in_config = way == "config"
    model = build_known(name, **({"output_attentions": True} if in_config else {})).eval()
    batch = batch_of(name, 0, 2)
    parallelize(model, TWO)
    return model(**batch) if in_config else model(**batch, output_attentions=True)


@pytest.mark.parametrize("way", ["argument", "config"])
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_weights_of_some_heads_are_refused(name: str, way: str) -> None:
    with pytest.raises(SMPError, match="output_attentions=True: each rank has some of the heads of"):
        _asked_for_attentions(name, way)


def test_attention_weights_under_a_plan_that_comes_with_the_model() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    model = build("llama")
    parallelize(model, TWO)
    with pytest.raises(SMPError, match="some of the heads of LlamaAttention"):
        model.model.layers[0].self_attn(torch.zeros(2, 4, 8), output_attentions=True)
    alone = build("llama")
    parallelize(alone, Axis("tp", (0,), 0))
    assert alone(input_ids=ids, output_attentions=True).attentions
