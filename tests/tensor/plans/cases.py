"""What the tests of plans run in the ranks; each asserts there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_lite.comm.groups.axis import Axis
from smp_lite.errors import SMPError
from smp_lite.nn.layout import ParameterLayout, layout_of, sum_partial_gradients, whole_of
from smp_lite.nn.plans import (
    check_parallelized,
    derive_plan,
    load_whole_state_dict,
    parallelize,
    whole_state_dict,
)
from tests.tensor.axis_cases import axis_of_all
from tests.tensor.plans.architectures import batch, build, build_by_default
from tests.tensor.plans.known_models import batch_of, build_known

STEPS = 3


def start() -> Axis:
    """The axis over all ranks; every rank draws the same numbers from here on."""
    torch.manual_seed(0)
    return axis_of_all()


def relative(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-30) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), least)


def whole_gradient(parameter: nn.Parameter) -> torch.Tensor:
    layout = layout_of(parameter)
    assert parameter.grad is not None
    return parameter.grad if layout is None else whole_of(parameter.grad, layout)


def train_alike(dense: nn.Module, parallel: nn.Module, example: dict[str, Any], split: int = 1) -> None:
    """Loss, gradients and three steps of AdamW.

    Args:
        split: at least as many parameters have parts.
    """
    names = [name for name, parameter in parallel.named_parameters() if layout_of(parameter) is not None]
    assert len(names) >= split, names
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in dense.named_parameters()]
    models = (dense, parallel)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5) for model in models]
    for step in range(STEPS):
        losses = []
        for model in models:
            model.zero_grad()
            loss = model(**example).loss
            loss.backward()
            losses.append(loss.detach())
        assert relative(losses[1], losses[0]) < 1e-6, (step, losses)
        sum_partial_gradients(parallel)
        if step == 0:
            expected = dict(dense.named_parameters())
            largest = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
            for name, parameter in parallel.named_parameters():
                gradient = expected[name].grad
                assert (parameter.grad is None) == (gradient is None), name
                if gradient is not None:
                    error = relative(whole_gradient(parameter), gradient, largest / 100)
                    assert error < 1e-5, f"gradient of {name}: {error:.3g}"
        for optimizer in optimizers:
            optimizer.step()
    state, found = dense.state_dict(), whole_state_dict(parallel)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert relative(found[name], tensor, 1e-2) < 1e-5, name


def architecture(name: str, attention: str, changes: dict[str, Any] | None = None) -> None:
    """The plan that comes with the model."""
    axis = start()
    dense = build(name, attention, **(changes or {}))
    parallel = copy.deepcopy(dense)
    parallelize(parallel, axis)
    example = batch()
    check_parallelized(dense, parallel, example, tolerance=1e-5)
    train_alike(dense, parallel, example, split=4)


def any_architecture(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64) -> int:
    """The plan that comes with the model, compared once; how many parameters have parts."""
    axis = start()
    dense = build_by_default(name, attention, dtype)
    parallel = copy.deepcopy(dense)
    parallelize(parallel, axis)
    check_parallelized(dense, parallel, batch(90), tolerance=1e-5 if dtype is torch.float64 else 1e-3)
    return sum(layout_of(parameter) is not None for parameter in parallel.parameters())


GPT2_PLAN = {
    "h.*.attn.c_attn": "packed_colwise:3",
    "h.*.attn.split_size": "local_size",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
    "wte": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
OPT_PLAN = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.out_proj": "rowwise",
    "layers.*.fc1": "colwise",
    "layers.*.fc2": "rowwise",
}
OPT_PLAN = {f"model.decoder.{name}": style for name, style in OPT_PLAN.items()}
BERT_PLAN = {
    **{f"encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
LLAMA_PLANS = {
    "features of the embedding": {"embed_tokens": "embedding_colwise", "lm_head": "rowwise_rep"},
    "gathered": {
        **{f"layers.*.self_attn.{name}_proj": "colwise_rep" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise_rep",
    },
    "one of three": {"layers.*.mlp.down_proj": "rowwise_split_input", "norm": "replicate"},
}
"""Plans that do not come with the models."""


def given_plans() -> None:
    """GPT-2 (Conv1D, fused and tied weights), OPT (counts heads), BERT (parts between modules), Llama."""
    axis = start()
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    for attention in ("eager", "sdpa"):
        dense = build("gpt2", attention, n_embd=32, n_layer=2, n_head=4, **no_dropout)
        parallel = copy.deepcopy(dense)
        parallelize(parallel, axis, GPT2_PLAN)
        assert parallel.lm_head.weight is parallel.transformer.wte.weight
        train_alike(dense, parallel, batch(), split=10)

        dense = build("opt", attention, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)
        parallel = copy.deepcopy(dense)
        parallelize(parallel, axis, OPT_PLAN)
        assert parallel.model.decoder.layers[0].self_attn.num_heads == 4 // axis.size
        train_alike(dense, parallel, batch(), split=10)
        dense = build(
            "bert", attention, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=True
        )
        parallel = copy.deepcopy(dense)
        parallelize(parallel, axis, BERT_PLAN)
        train_alike(dense, parallel, batch(), split=10)
    for plan in LLAMA_PLANS.values():
        dense = build("llama")
        parallel = copy.deepcopy(dense)
        parallelize(parallel, axis, plan)
        train_alike(dense, parallel, batch())


def known_plan_of(name: str, attention: str = "eager") -> None:
    """Our own plan for a model that comes with none."""
    axis = start()
    dense = build_known(name, attention)
    parallel = copy.deepcopy(dense)
    parallelize(parallel, axis)
    example = batch_of(name)
    check_parallelized(dense, parallel, example, tolerance=1e-5)
    if "labels" in example:
        train_alike(dense, parallel, example, split=10)


def known_plan_with_dropout() -> None:
    """T5 drops features between its two split layers: the whole model's masks. Attention must not."""
    axis = start()
    dense = build_known("t5 gated", dropout_rate=0.3)
    for module in dense.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
    parallel = copy.deepcopy(dense)
    parallelize(parallel, axis)
    example = batch_of("t5 gated")
    check_parallelized(dense.train(), parallel.train(), example, tolerance=1e-5)
    losses = [float(dense(**example).loss) for _ in range(2)]
    assert losses[0] != losses[1]  # it does drop


def fast_experts() -> None:
    """Mixtures of experts by grouped matrix products."""
    axis = start()
    dense = build("mixtral", dtype=torch.float32, experts="grouped_mm", intermediate_size=64)
    parallel = copy.deepcopy(dense)
    parallelize(parallel, axis)
    check_parallelized(dense, parallel, batch())


def checkpointed(name: str = "llama") -> None:
    """Gradient checkpointing of the model's own; a module used twice; frozen weights."""
    axis = start()
    dense = build(name)
    dense.train()
    dense.model.layers[1].mlp = dense.model.layers[0].mlp
    dense.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    parallel = copy.deepcopy(dense)
    parallelize(parallel, axis)
    assert not parallel.model.layers[0].self_attn.q_proj.weight.requires_grad
    for arguments in ({"use_reentrant": True}, {"use_reentrant": False}):
        parallel.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        check_parallelized(dense, parallel, batch(), tolerance=1e-5)
    assert parallel.model.layers[1].mlp is parallel.model.layers[0].mlp


def states() -> None:
    """Whole state dicts, of tied and padded weights, and back; frozen optimizers' names stay."""
    axis = start()
    dense = build("qwen2")
    parallel = copy.deepcopy(dense)
    parallelize(parallel, axis)
    state = whole_state_dict(parallel)
    assert list(state) == list(dense.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in dense.state_dict().items())
    changed = {name: tensor * 2 for name, tensor in state.items()}
    load_whole_state_dict(parallel, changed)
    found = whole_state_dict(parallel)
    assert all(torch.equal(found[name], tensor) for name, tensor in changed.items())
    assert parallel.lm_head.weight is parallel.model.embed_tokens.weight


def mismatches_are_seen() -> None:
    """The comparison says no where outputs, or only gradients, are wrong."""
    axis = start()
    dense = build("qwen3")
    plan = dict(dense._tp_plan)

    def split() -> nn.Module:
        parallel = copy.deepcopy(dense)
        parallelize(parallel, axis, plan)
        return parallel

    check_parallelized(dense, split(), batch())
    parallel = split()
    with torch.no_grad():
        parallel.model.layers[0].mlp.up_proj.weight[0, 0] += 0.5
    with pytest.raises(SMPError, match=r"output 0 of the split model .* differs"):
        check_parallelized(dense, parallel, batch())
    parallel = split()
    norm = parallel.model.layers[0].self_attn.q_norm  # as if the plan had not named it
    norm.smp_layouts["weight"] = ParameterLayout((8,), ((),))
    norm._mark()
    with pytest.raises(SMPError, match=r"gradient of model.layers.0.self_attn.q_norm.weight .* differs"):
        check_parallelized(dense, parallel, batch())
    parallel = split()
    parallel.lm_head.gather_output = False
    with pytest.raises(SMPError, match="something in it returns this rank's part"):
        check_parallelized(dense, parallel, {"input_ids": batch()["input_ids"]})
    before = torch.full_like(parallel.model.norm.weight, 3.0)
    parallel = split()
    parallel.model.norm.weight.grad = before
    check_parallelized(dense, parallel, batch())
    assert parallel.model.norm.weight.grad is before


DERIVED: dict[str, dict[str, Any]] = {"llama": {}, "gpt_neox": {}}
"""Models whose plans are derived as if they had none."""


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down, self.norm = nn.Linear(inner, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(F.silu(self.gate(x)) * self.up(x) * 0.5 + 1))


class Drawing(GatedMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.silu(self.gate(x)) * self.up(x), 0.3, self.training)
        return x + self.down(y + torch.randn_like(y))


def drawn_for_all_features() -> None:
    """Where the code draws, whole features give what the dense model gives."""
    axis = start()
    dense = Drawing(8, 12).double()
    parallel = copy.deepcopy(dense)
    gathered = dict.fromkeys(("gate", "up"), "colwise_gather_output")
    parallelize(parallel, axis, {**gathered, "down": "rowwise_split_input"})
    x = torch.randn(4, 8, dtype=torch.float64)
    check_parallelized(dense, parallel, x)
    assert not torch.allclose(dense(x), dense(x))  # it does draw


def derived_plans() -> None:
    """What derive_plan finds is right, dropout included."""
    axis = start()
    for name, changes in DERIVED.items():
        dense = build(name, **changes)
        parallel = copy.deepcopy(dense)
        plan = derive_plan(parallel)
        parallelize(parallel, axis, plan)
        train_alike(dense, parallel, batch(), split=4)
    dense = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.LayerNorm(8), GatedMLP(8, 12)
    ).double()
    parallel = copy.deepcopy(dense)
    plan = derive_plan(parallel)
    assert plan["2"] == plan["5.dropout"] == "local_dropout"
    parallelize(parallel, axis, plan)
    x = torch.randn(4, 8, dtype=torch.float64)
    check_parallelized(dense, parallel, x)
    with_dropout = dense(x)
    assert not torch.allclose(with_dropout, dense(x))  # it does drop
