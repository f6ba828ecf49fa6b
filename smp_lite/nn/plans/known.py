"""Plans of our own for architectures that ``transformers`` ships without one: BERT, GPT-2, T5, ViT.

As Megatron-LM splits a transformer (Shoeybi et al. 2019, section 3): each rank has whole heads of every
attention, and a part of the inner features of every feed-forward block. Embeddings, norms and output layers
stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...errors import SMPError
from .patterns import Names, shipped_plan
from .styles import STYLES

__all__ = ["KNOWN", "known_plan", "plan_for"]


def _attention(name: str, inputs: str, output: str) -> dict[str, str]:
    """Plain attention: queries, keys and values from layers of their own."""
    return {f"{name}.{each}": "colwise" for each in inputs.split()} | {f"{name}.{output}": "rowwise"}


def _bert() -> dict[str, str]:
    layer = "encoder.layer.*"
    plan = {f"{layer}.intermediate.dense": "colwise", f"{layer}.output.dense": "rowwise"}
    for kind in ("attention", "crossattention"):
        plan |= _attention(f"{layer}.{kind}", "self.query self.key self.value", "output.dense")
    return plan


def _gpt2() -> dict[str, str]:
    """Its Conv1D holds queries, keys and values (of cross attention: keys and values) side by side."""
    plan = {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise", "h.*.crossattention.q_attn": "colwise"}
    for kind, number in (("attn", 3), ("crossattention", 2)):
        plan |= {
            f"h.*.{kind}.c_attn": f"packed_colwise:{number}",
            f"h.*.{kind}.split_size": "local_size",
            f"h.*.{kind}.c_proj": "rowwise",
        }
    return plan


def _t5() -> dict[str, str]:
    """The first block of a stack has an Embedding with a column for each head, whose output, the scores'
    bias, all blocks of the stack add."""
    plan: dict[str, str] = {}
    for stack in ("encoder", "decoder"):
        layer = f"{stack}.block.*.layer.*"
        for kind in ("SelfAttention", "EncDecAttention"):
            plan |= _attention(f"{layer}.{kind}", "q k v", "o")
        plan |= {
            f"{layer}.SelfAttention.relative_attention_bias": "embedding_heads",
            **{f"{layer}.DenseReluDense.{name}": "colwise" for name in ("wi", "wi_0", "wi_1")},
            f"{layer}.DenseReluDense.dropout": "local_dropout",
            f"{layer}.DenseReluDense.wo": "rowwise",
        }
    return plan


def _vit() -> dict[str, str]:
    return {
        **_attention("layers.*.attention", "q_proj k_proj v_proj", "o_proj"),
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    }


KNOWN: Mapping[str, Mapping[str, str]] = {"bert": _bert(), "gpt2": _gpt2(), "t5": _t5(), "vit": _vit()}
"""By ``config.model_type``: patterns of names to styles, for all variants of an architecture."""


def known_plan(model: nn.Module) -> dict[str, str]:
    """What of our plan for a model's architecture matches it, for
    :func:`~smp_lite.nn.plans.parallelize`; ``{}`` where there is none."""
    plan = KNOWN.get(getattr(getattr(model, "config", None), "model_type", ""), {})
    names = Names(model, [style for style, each in STYLES.items() if each.kind == "number"])
    return {pattern: style for pattern, style in plan.items() if names.matching(pattern, style)}


def plan_for(model: nn.Module) -> tuple[dict[str, str], bool]:
    """The plan that comes with a model, or ours for its architecture; and whether it came with it.

    Raises:
        SMPError: there is neither.
    """
    try:
        return shipped_plan(model), True
    except SMPError:
        if plan := known_plan(model):
            return plan, False
        raise
