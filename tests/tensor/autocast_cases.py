"""What the tests of autocast run in the ranks: split layers against plain torch's under the same autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import smp_lite as smp
from smp_lite.comm.groups.axis import Axis
from smp_lite.nn.one_d import ColumnParallelLinear, RowParallelLinear, vocab_parallel_cross_entropy
from smp_lite.nn.plans import parallelize
from smp_lite.nn.sequence import SequenceMesh, cross_entropy_sequence
from smp_lite.session import current
from tests.tensor.smp_api import reference
from tests.tensor.smp_api.cases import options_of

H, ROWS, TOKENS, CLASSES = reference.HIDDEN, 2, 6, 11
SIZES = {"hidden_size": H, "hidden_dropout_prob": 0.0, "pre_layernorm": True, "post_layernorm": True}

Call = Callable[[torch.Tensor], torch.Tensor]


def _parallelized(net: nn.Module, plan: dict[str, str], axis: Axis) -> nn.Module:
    parallelize(net, axis, plan)
    return net


def _attention(split: bool) -> Call:
    if not split:
        dense = reference.Attention(options_of("both"))
        return lambda x: dense(x, None, torch.zeros(1, 1, 1, 1))
    heads = {"num_attention_heads": reference.HEADS, "attention_head_size": reference.HEAD}
    layer = smp.nn.DistributedAttentionLayer(**heads, **SIZES, attention_dropout_prob=0.0)
    return lambda x: layer((x, None))


LAYERS: dict[str, Callable[[bool, Axis], Call]] = {
    "DistributedLinear": lambda split, _: (smp.nn.DistributedLinear if split else nn.Linear)(H, 20),
    "attention": lambda split, _: _attention(split),
    "output": lambda split, _: (
        smp.nn.DistributedTransformerOutputLayer(intermediate_size=reference.INTERMEDIATE, **SIZES)
        if split
        else reference.Output(options_of("both"))
    ),
    "ColumnParallelLinear": lambda split, axis: (
        ColumnParallelLinear(H, 20, axis=axis, gather_output=True) if split else nn.Linear(H, 20)
    ),
    "RowParallelLinear": lambda split, axis: (
        RowParallelLinear(H, 20, axis=axis, input_is_parallel=False) if split else nn.Linear(H, 20)
    ),
}
SHARED: dict[str, Callable[[bool, Axis], Call]] = {
    "Conv1D": lambda split, axis: (
        _parallelized(_convolutions(), {"0": "colwise", "1": "rowwise"}, axis) if split else _convolutions()
    ),
}
"""Where ranks have one batch."""


def _convolutions() -> nn.Module:
    return nn.Sequential(Conv1D(20, H), Conv1D(H, 20))


def _run(make: Callable[[bool, Axis], Call], split: bool, x: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    call = make(split, current().axis("tp"))
    given = x.clone().requires_grad_()
    for parameter in call.parameters() if isinstance(call, nn.Module) else ():
        if parameter.dim() == 1:
            parameter.data.add_(0.3)  # zeros would hide a bias
    with torch.autocast("cpu", torch.bfloat16):
        output = call(given)
    weight = torch.linspace(-1.0, 1.0, output[0].numel()).reshape(output[0].shape)
    (output.float() * weight).sum().backward()
    assert given.grad is not None
    return {"output": output.detach(), "gradient": given.grad}


def layers(prescaled: bool, optimize: str) -> dict[str, Any]:
    """Output and the input's gradient of each layer, split and dense."""
    parameters = {"partitions": 1, "microbatches": 1, "ddp": True, "tensor_parallel_degree": 2}
    smp.init({**parameters, "prescaled_batch": prescaled, "optimize": optimize})
    generator = torch.Generator().manual_seed(0 if prescaled else smp.rank())
    found = {}
    for name, make in {**LAYERS, **(SHARED if prescaled else {})}.items():
        for dtype in (torch.float32, torch.bfloat16):
            shared = torch.Generator().manual_seed(0) if name.endswith("ParallelLinear") else generator
            x = torch.randn(ROWS, TOKENS, H, generator=shared).to(dtype)
            found[f"{name} of {dtype}"] = [_run(make, split, x) for split in (True, False)]
    return found


def losses() -> dict[str, Any]:
    """The loss and the logits' gradient, of logits over two ranks and over one process's."""
    parameters = {"partitions": 1, "microbatches": 1, "ddp": True, "tensor_parallel_degree": 2}
    smp.init({**parameters, "prescaled_batch": True})
    axis = current().axis("tp")
    torch.manual_seed(0)
    mesh = SequenceMesh(axis, zigzag=False)
    targets = torch.randint(CLASSES + 1, (ROWS, TOKENS))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(ROWS, TOKENS, CLASSES + 1).mul(3).to(dtype)

        def one(x: torch.Tensor, reduction: str) -> torch.Tensor:
            return F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction=reduction)

        def by_classes(x: torch.Tensor, reduction: Any) -> torch.Tensor:
            return vocab_parallel_cross_entropy(
                axis.part(x, -1), targets, axis=axis, reduction=reduction
            ).flatten()

        def by_tokens(x: torch.Tensor, reduction: Any) -> torch.Tensor:
            return cross_entropy_sequence(
                axis.part(x, 1), axis.part(targets, 1), mesh, CLASSES + 1, reduction=reduction
            )

        for name, call, dim, reductions in (
            ("classes", by_classes, -1, ("mean", "sum", "none")),
            ("tokens", by_tokens, 1, ("mean", "sum")),
        ):
            for reduction in reductions:
                results = []
                for loss_of in (call, one):
                    given = logits.clone().requires_grad_()
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = loss_of(given, reduction)
                    loss.sum().backward()
                    assert given.grad is not None
                    grad = axis.part(given.grad, dim)
                    results.append({"output": loss.detach().flatten(), "gradient": grad})
                found[f"{name}, {reduction}, of {dtype}"] = results
    return found
