"""A script that does what the sweep does with one model, and needs nothing of it."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from tests.sweep.cases import Case, cases
from tests.sweep.training import NUM_MICROBATCHES, plain, train

__all__ = ["script"]

_SCRIPT = """\
import json

import torch
from torch.nn import functional as F
from transformers import {config_name} as Config
from {module} import {architecture} as Model

import smp_lite as smp

config = Config.from_dict(json.loads({config!r}))
torch.manual_seed(7)
batch = {{
{batch}
}}


def loss_of(output):
    if isinstance(output, dict) and output.get("loss") is not None:
        return output["loss"].mean()
    return sum(
        F.mse_loss(tensor.float(), torch.arange(tensor.numel()).cos().view(tensor.shape))
        for tensor in tensors(output)
    )


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() and output.requires_grad else []
    if isinstance(output, dict):
        output = output.values()
    return [t for part in output for t in tensors(part)] if hasattr(output, "__iter__") else []


def build():
    torch.manual_seed(0)
    return Model(config).train()


smp.init_in_memory({{"partitions": {stages}, "microbatches": {microbatches}}})
module = build()
model = smp.DistributedModel(module)


@smp.step
def train_step(model, batch):
    loss = loss_of(model(**batch))
    model.backward(loss)
    return loss


torch.manual_seed(1)
print("library", [loss.item() for loss in train_step(model, batch).outputs])

plain = build()
torch.manual_seed(1)
for part in range({microbatches}):
    loss = loss_of(plain(**{{name: value.chunk({microbatches})[part] for name, value in batch.items()}}))
    print("plain", loss.item())
    (loss / {microbatches}).backward()
expected = dict(plain.named_parameters())
for name, parameter in module.named_parameters():
    ours, theirs = parameter.grad, expected[name].grad
    if (ours is None) != (theirs is None) or (ours is not None and not torch.equal(ours, theirs)):
        print("gradient of", name, "differs by", None if ours is None else (ours - theirs).norm().item())
"""


def script(model_type: str, num_stages: int) -> str:
    """One step of the first class of this model type that trains in plain torch.

    Raises:
        LookupError: none does.
    """
    case = _first_that_trains(model_type)
    module = case.module()
    batch = case.batch(module)
    return _SCRIPT.format(
        config_name=type(module.config).__name__,
        module=case.architecture.__module__,
        architecture=case.architecture.__name__,
        config=json.dumps(json.loads(module.config.to_json_string())),
        batch="\n".join(f"    {name!r}: {_literal(value)}," for name, value in batch.items()),
        microbatches=NUM_MICROBATCHES,
        stages=num_stages,
    )


def _first_that_trains(model_type: str) -> Case:
    for case in cases(model_type):
        try:
            train(plain(), case.module(), case.batch(case.module()))
        except Exception:
            continue
        return case
    raise LookupError(f"no class of {model_type!r} trains in plain torch")


def _literal(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_floating_point():
        return f"torch.randn{tuple(value.shape)}"
    if (value == value.flatten()[0]).all():
        return f"torch.full({tuple(value.shape)}, {value.flatten()[0].item()})"
    return f"torch.tensor({value.tolist()})"
