"""What a graph could not repeat, as far as the recording tells: such a segment runs as it always does.

A graph is the kernels of one run. It repeats no Python, no random numbers drawn anew, no hook, and its memory
has one place. So a segment with anything of that kind is no graph, and the reason is said once.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...comm.wires.announced import AnnouncedWire
from ...comm.wires.grouped import GroupedCarrier
from ...comm.wires.wire import Wire
from ...devices import home
from ...plan.step.segments import Segment
from ...record.commands.recording import Command, Recording, nothing_around
from ...record.describe.checkpointed_calls import CheckpointedRun, is_marked
from ...record.state.places import PLAIN
from ...record.values.structure import LEAF, Spec

__all__ = ["modules_of", "why_none", "why_not"]

_TORCH = str(Path(torch.__file__).resolve().parent)
_PLAIN_NESTS = {"tuple": 1, "list": 1, "slice": 1, "dict": 2, "namedtuple": 2}
"""Kinds of nests, and where the specs of their parts begin."""
_FIXED = (*PLAIN, torch.device, torch.layout, torch.memory_format, slice, type(...))
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TABLES = frozenset(["_parameters", "_buffers", "_modules"])
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def modules_of(recording: Recording, segment: Segment) -> list[nn.Module]:
    """The modules that the segment calls."""
    found = [recording.commands[index].module for index in segment.commands]
    return list({id(module): module for module in found if module is not None}.values())


def why_none(*, shared: bool, sharded: bool, offloaded: bool, splits: bool, wire: Wire | None) -> str:
    """Why no segment of a stage may be a graph; "": some may.

    Args:
        shared: several ranks compute the stage.
        sharded: parameters are.
        offloaded: activations are.
        splits: gradients of weights may have actions of their own.
        wire: None: none that stands against it.
    """
    if isinstance(wire, AnnouncedWire) and isinstance(wire.carrier, GroupedCarrier):
        # What it sends keeps the device busy until the receiver's host has come, and a capture waits for it.
        return "the wire is nccl, on which two ranks that capture could wait for each other"
    if shared:
        return "several ranks share a stage, and talk to each other within modules"
    if sharded:
        return "parameters are sharded"
    if offloaded:
        return "activations are offloaded"
    return "gradients of weights may come in actions of their own (pipeline)" if splits else ""


def why_not(recording: Recording, segment: Segment) -> str | None:
    """Why the segment cannot be a graph; None: nothing is known."""
    if recording.around_backward is not nothing_around:
        return "Python code runs in its backward"
    if not recording.complete or recording.inputs:
        return "the script looks at its values, or at gradients of its inputs, within the step"
    for index in segment.commands:
        command = recording.commands[index]
        if (reason := _why_not_command(command)) is not None:
            return f"{command.label} {reason}"
    gradients = [recording.commands[index].ambient.grad for index in segment.commands]
    if not segment.has_backward and any(gradients):
        return "autograd notes it, and no backward comes"
    if segment.has_backward and not all(gradients):
        return "autograd notes a part of it only"
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return "there are hooks for all modules"
    for module in modules_of(recording, segment):
        for part in module.modules():
            if (reason := _why_not_part(part)) is not None:
                return f"{type(part).__name__} {reason}"
    return None


def _why_not_command(command: Command) -> str | None:
    if command.parameter is not None:
        return None
    if command.input is not None or command.on_made or command.bare or command.carried:
        return "runs with state that is put in its place for it"
    if command.seed_key is not None or command.seeds or command.draw is not None:
        return "draws random numbers"
    if command.changes or command.touches:
        return "changes tensors in place"
    if command.ambient.inference or any(is_on for is_on, _ in command.ambient.autocast):
        return "runs under autocast or in inference mode"
    meta = command.meta
    if meta is None or meta.changed or meta.buffers or meta.unguarded or meta.sets_attributes:
        return "could not be described, or does more than compute"
    if command.module is None and not _is_torchs(command.function):
        return "is a function of the script's own"
    for number, source in enumerate(command.sources):
        if source < 0 and not _is_plain_input(command.arguments.tensors[number]):
            return "is given a tensor that is not an ordinary one of the device"
    leaves = [leaf for leaf in command.arguments.leaves if not isinstance(leaf, torch.Tensor | None)]
    if not all(isinstance(leaf, _FIXED) for leaf in leaves) or not _is_plain_nest(command.arguments.spec):
        return "is given an object"
    return None


def _is_plain_nest(spec: Spec) -> bool:
    """Whether it is of Python's own containers, which hold nothing beside what is in them."""
    if spec is LEAF:
        return True
    parts = spec[_PLAIN_NESTS[spec[0]] :] if spec[0] in _PLAIN_NESTS else (spec,)
    return spec[0] in _PLAIN_NESTS and all(map(_is_plain_nest, parts))


def _is_torchs(function: Any) -> bool:
    if isinstance(function, types.FunctionType):
        return function.__code__.co_filename.startswith(_TORCH)
    return isinstance(
        function,
        types.BuiltinFunctionType
        | types.MethodDescriptorType
        | types.WrapperDescriptorType
        | types.MethodWrapperType,
    )


def _is_plain_input(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device == home() and not tensor.requires_grad


def _why_not_part(part: nn.Module) -> str | None:
    if isinstance(part, torch.jit.ScriptModule) or getattr(part, "_compiled_call_impl", None) is not None:
        return "is compiled"
    if type(part).__module__.startswith("torch._dynamo"):
        return "is compiled"
    if isinstance(part, CheckpointedRun) or is_marked(part):
        return "is checkpointed"
    if any(getattr(part, name, None) for name in _HOOKS):
        return "has hooks"
    own = [value for key, value in part.__dict__.items() if key not in _TABLES]
    return "holds a tensor that is neither parameter nor buffer" if _hold_tensor(own, set()) else None


def _hold_tensor(values: Iterable[Any], seen: set[int]) -> bool:
    """Whether any is a tensor, or a container of Python's with one in it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, list | tuple | set | frozenset | dict) and id(value) not in seen:
            seen.add(id(value))
            if _hold_tensor(value.values() if isinstance(value, dict) else value, seen):
                return True
    return False
