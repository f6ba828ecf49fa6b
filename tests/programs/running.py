"""Runs a program by the library and by plain torch, and says where the two differ."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import smp_lite as smp
from smp_lite.record.values.structure import flatten
from tests.programs.plain import Plain
from tests.programs.registry import Program, programs

__all__ = ["Notes", "differences", "parameters_of", "run_in_memory", "run_on_ranks"]


class Notes:
    """What a program says must be the same."""

    def __init__(self) -> None:
        self.values: list[tuple[str, Any]] = []

    def value(self, name: str, value: Any) -> None:
        """Notes any nest of tensors and Python values, as it is now."""
        leaves: list[Any] = []
        flatten(value, leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, smp.StepOutput):
                for m, tensor in enumerate(leaf.outputs):
                    self.values.append((f"{name}[{i}] of microbatch {m}", tensor.detach().clone()))
            else:
                kept = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
                self.values.append((f"{name}[{i}]" if len(leaves) > 1 else name, kept))

    def model(self, model: Any) -> None:
        """Notes the gradients that are here and the whole state; collective over the mp group."""
        for name, parameter in model.local_named_parameters():
            gradient = None if parameter.grad is None else parameter.grad.detach().clone()
            self.values.append((f"gradient of {name}", gradient))
        for name, value in model.state_dict().items():
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            self.values.append((f"state {name}", kept))


def parameters_of(
    program: Program, num_stages: int, pipeline: str, *, static: bool = False
) -> dict[str, Any]:
    """The SMP parameters of one run."""
    parameters = {
        "partitions": num_stages,
        "microbatches": program.microbatches,
        "pipeline": pipeline,
        **dict(program.parameters),
    }
    return {**parameters, "static_mode": True} if static else parameters


def run_in_memory(program: Program, num_stages: int, pipeline: str, *, static: bool = False) -> list[str]:
    """One process plays all stages; the differences from plain torch.

    Raises:
        SMPError: the library refuses the program.
    """
    expected = _run(program, Plain(program.microbatches))
    smp.reset()
    smp.init_in_memory(parameters_of(program, num_stages, pipeline, static=static))
    try:
        found = _run(program, smp)
    finally:
        smp.reset()
    return differences(found, expected, program.tolerance)


def run_on_ranks(name: str) -> list[str]:
    """In each rank of an MPI job with the parameters in the environment: the differences on this rank."""
    program = programs()[name]
    smp.init()
    replica = (smp.dp_rank(), smp.dp_size())
    average = None
    if replica[1] > 1:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Split(color=smp.mp_rank(), key=smp.dp_rank())

        def average(tensor: Tensor) -> None:
            comm.Allreduce(MPI.IN_PLACE, tensor.numpy())

    try:
        found = _run(program, smp)
    finally:
        smp.reset()
    expected = _run(program, Plain(program.microbatches, replica, average))
    return differences(found, expected, program.tolerance)


def _run(program: Program, api: Any) -> Notes:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    notes = Notes()
    program.function(api, notes)
    notes.value("torch's random state", torch.get_rng_state())
    notes.values.append(("random's state", random.getstate()))
    return notes


def differences(found: Notes, expected: Notes, tolerance: float) -> list[str]:
    """What differs, in words; gradients that are on other ranks are not compared."""
    texts = []
    ours = found.values
    held = {name for name, _ in ours}
    theirs = [
        (name, value)
        for name, value in expected.values
        if name in held or not name.startswith("gradient of ")
    ]
    names, plain_names = [name for name, _ in ours], [name for name, _ in theirs]
    if names != plain_names:
        at = next((i for i, (a, b) in enumerate(zip(names, plain_names, strict=False)) if a != b), -1)
        first = f"; the first that differs: {names[at]!r} instead of {plain_names[at]!r}" if at >= 0 else ""
        return [f"noted {len(names)} values instead of {len(plain_names)}{first}"]
    for (name, mine), (_, plain) in zip(ours, theirs, strict=True):
        text = _difference(mine, plain, tolerance)
        if text:
            texts.append(f"{name}: {text}")
    return texts


def _difference(mine: Any, plain: Any, tolerance: float) -> str:
    if isinstance(mine, Tensor) and isinstance(plain, Tensor):
        if mine.shape != plain.shape or mine.dtype != plain.dtype:
            return f"{mine.dtype}{list(mine.shape)} instead of {plain.dtype}{list(plain.shape)}"
        if torch.equal(mine, plain) or ((mine.isnan() == plain.isnan()).all() and _equal_or_nan(mine, plain)):
            return ""
        if mine.is_floating_point() and tolerance:
            # Where sums are taken in another order, what is zero but for rounding is other rounding.
            deviation = float((mine - plain).norm() / (plain.norm() + 1e-3))
            return "" if deviation <= tolerance else f"off by {deviation:.1e} of its size"
        return f"{mine.flatten()[:3].tolist()} instead of {plain.flatten()[:3].tolist()}"
    if isinstance(mine, float) and isinstance(plain, float) and tolerance:
        return "" if abs(mine - plain) <= tolerance * (abs(plain) + 1e-3) else f"{mine} instead of {plain}"
    if type(mine) is not type(plain):
        return f"a {type(mine).__name__} instead of a {type(plain).__name__}"
    return "" if mine == plain or (mine != mine and plain != plain) else f"{mine!r} instead of {plain!r}"


def _equal_or_nan(mine: Tensor, plain: Tensor) -> bool:
    return bool(((mine == plain) | (mine.isnan() & plain.isnan())).all())
