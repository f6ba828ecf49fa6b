"""The styles of tensor-parallel plans: those of ``transformers`` 5, and some of ours.

What is exactly equal to the dense model is a :class:`Style`; the others stand in :data:`REFUSED`, with why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["REFUSED", "STYLES", "Style"]


@dataclass(frozen=True)
class Style:
    """
    Attributes:
        kind: ``column``, ``row``, ``vocabulary``, ``features``: a Linear, Conv1D or Embedding that is split,
            or a bare parameter of a module; ``dropout``, ``summands``, ``summed``, ``share``, ``tail``: see
            :mod:`smp_lite.nn.plans.modules`; ``partial``: stays whole, its gradients are summands;
            ``whole``: nothing changes; ``number``: an attribute that counts what is split.
        options: of the split module.
        packed: the split dimension holds this many matrices of one size; of ours: ``packed_colwise:3``.
        gives_parts: the output of such a module is this rank's part of the features.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    packed: int = 1
    gives_parts: bool = False


STYLES = {
    "colwise": Style("column", gives_parts=True),
    "colwise_gather_output": Style("column", {"gather_output": True, "pad": True}),
    "colwise_rep": Style("column", {"gather_output": True, "pad": True}),
    "packed_colwise": Style("column", packed=2, gives_parts=True),
    "rowwise": Style("row"),
    "rowwise_split_input": Style("row", {"input_is_parallel": False}),
    "rowwise_rep": Style("row", {"input_is_parallel": False}),
    "packed_rowwise": Style("row", packed=2),
    "embedding_rowwise": Style("vocabulary"),
    "embedding_colwise": Style("features"),
    "embedding_heads": Style("features", {"gather_output": False}, gives_parts=True),
    "replicate": Style("whole"),
    "local_params": Style("whole"),
    "replicated_with_grad_allreduce": Style("partial"),
    "all_reduce": Style("summed"),
    "moe_tp_experts": Style("summands"),
    "moe_identity_expert": Style("share"),
    "mla_kv_a_proj": Style("tail"),
    "local_dropout": Style("dropout"),
    "local_size": Style("number"),
}

_BY_EXPERT = (
    "it splits by expert, not by features: use moe_tp_experts for the experts, and packed_colwise and "
    "rowwise for their parameters"
)

REFUSED = {
    "sequence_parallel": "it needs the tokens between layers to be split too, which no style of a plan says: "
    "build the model from smp_lite.nn.one_d's layers with sequence_parallel=True, or leave this out (norms "
    "then run on whole sequences, which is as right)",
    "grouped_gemm": _BY_EXPERT,
    "ep_dispatch_experts": _BY_EXPERT,
    "ep_router": _BY_EXPERT,
    "gather": "it says nothing about weights: use colwise_gather_output on the layer before",
}
"""Styles that a plan may name, and why they are refused."""
