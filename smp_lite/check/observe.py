"""What both runs of a step note of each call, small enough to send from one process to the other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..record.code.reads import places_read
from ..record.code.watch import mentioned_in
from ..record.describe.signature import stable_text
from ..record.values.structure import flatten

__all__ = ["Call", "Key", "StepNotes", "notes_of_state", "print_of", "state_of"]

Key = tuple[int, str, int]
"""Microbatch, label, and how many calls of that label came before in the microbatch."""


@dataclass(frozen=True)
class Print:
    """A tensor or another value, told from others: a digest, and enough to show."""

    digest: str
    shown: str
    norm: float = 0.0


@dataclass
class Call:
    """One call of a module or of a torch function.

    Attributes:
        given: prints of the arguments' leaves.
        result: prints of the result's leaves.
        state: of a module: its attributes and what its code reads elsewhere, as text by name.
        line: where the user's code makes the call.
    """

    given: tuple[Print, ...]
    result: tuple[Print, ...]
    state: dict[str, str] = field(default_factory=dict)
    line: str = ""


@dataclass
class StepNotes:
    """Everything noted of one step.

    Attributes:
        calls: in the order in which they ran.
        outcome: prints of results, gradients, buffers and random states, by name.
        error: of the step, if it raised.
    """

    calls: dict[Key, Call] = field(default_factory=dict)
    outcome: dict[str, Print] = field(default_factory=dict)
    error: str = ""


def print_of(value: Any) -> Print:
    """The print of a leaf; tensors by their bytes."""
    if not isinstance(value, torch.Tensor):
        text = stable_text(value)
        return Print(text, text)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        data = value.detach()
        if data.layout is not torch.strided:
            data = data.to_dense()
        data = data.cpu().contiguous()
        kind = f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
        hasher = hashlib.blake2b(kind.encode(), digest_size=12)
        hasher.update(data.reshape(-1).view(torch.uint8).numpy())
        numbers = data.reshape(-1)[:3].tolist()
        norm = float(data.double().norm()) if data.dtype.is_floating_point and data.numel() else 0.0
    return Print(hasher.hexdigest(), f"{kind} {numbers}", norm)


def prints(value: Any) -> tuple[Print, ...]:
    """Prints of all leaves of a nest."""
    leaves: list[Any] = []
    flatten(value, leaves)
    return tuple([print_of(leaf) for leaf in leaves])


def state_of(module: nn.Module) -> dict[str, str]:
    """Plain Python state that a call of the module may depend on, as text."""
    found = {}
    for name, part in module.named_modules():
        for key, value in part.__dict__.items():
            if not key.startswith("_") or key == "_forward_hooks":
                found[f"attribute {name}.{key}" if name else f"attribute {key}"] = _text(value)
    names = mentioned_in(module)
    for place in places_read(module, names).places:
        found[place.name] = _text(place.value())
    return found


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return print_of(value).shown if not value.is_meta else "a tensor"
    if isinstance(value, list | tuple | dict | set):
        text = repr(value)
        return (
            text if len(text) < 200 and " at 0x" not in text else f"a {type(value).__name__} of {len(value)}"
        )
    text = repr(value)
    return text if len(text) < 200 and " at 0x" not in text else type(value).__name__


def notes_of_state(module: nn.Module) -> dict[str, Print]:
    """Gradients and buffers of a model."""
    found = {}
    for name, parameter in module.named_parameters():
        found[f"the gradient of {name}"] = print_of(parameter.grad)
    for name, buffer in module.named_buffers():
        found[f"the buffer {name}"] = print_of(buffer)
    return found
