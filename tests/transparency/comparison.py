"""Trains a case with the library and with plain torch, and says where the two differ.

Both runs start from one seed, take the same batches, and are never reseeded on the way, so a random
number drawn once too often shows in everything after it. Between steps the batch is rolled by one
sample: the second step is not a repetition of the first, data-dependent branches go other ways in
it, and plans kept from the first step are put to the test.

The same code runs in one process that plays all stages and in each rank of an MPI job, where it
compares what that rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.record.values.microbatch import merge_outputs
from smp_lite.record.values.structure import flatten
from tests.models import Batch, Case, HookRecord, plain_step

__all__ = [
    "NUM_MICROBATCHES",
    "NUM_SAMPLES",
    "Difference",
    "Snapshot",
    "compare",
    "differences",
    "differences_from_plain",
    "gradients_of",
    "make_optimizer",
    "on",
    "place",
    "plain_run",
    "rolled",
    "smp_run",
    "snapshot",
    "too_large",
]

NUM_MICROBATCHES = 4
NUM_SAMPLES = 8


@dataclass(frozen=True)
class Snapshot:
    """What one training step leaves behind, as detached copies.

    Attributes:
        outputs: all leaves of what the step function returned, a list over microbatches each.
        gradients: by parameter name; None where there is none.
        parameters: after the optimizer's step.
        buffers: by name.
        hooks: how often each module's hooks have fired since the start.
    """

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    hooks: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same to the bit.

    Attributes:
        step_index: which training step.
        what: which thing.
        relative: norm of the deviation over the norm of the value; infinite where they cannot be
        compared.
    """

    step_index: int
    what: str
    relative: float

    def __str__(self) -> str:
        return f"step {self.step_index}, {self.what}: {self.relative:.1e}"


def make_optimizer(case: Case, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """One with state: AdamW, but momentum where sums may be rounded in other ways.

    AdamW divides gradients by their own size, which would blow such a rounding up to a full step.
    """
    if case.exact:
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def rolled(batch: Batch, step_index: int) -> Batch:
    """The batch of a step: samples moved on by one place for each step."""
    return {name: tensor.roll(step_index, dims=0) for name, tensor in batch.items()}


@cache
def plain_run(
    case: Case,
    num_steps: int = 2,
    num_samples: int = NUM_SAMPLES,
    device: torch.device | None = None,
) -> list[Snapshot]:
    """Plain torch, one process; a snapshot for each step. None: on torch's default device."""
    device = device or torch.get_default_device()
    torch.manual_seed(0)
    model = case.build().to(device)
    record = case.install_hooks(model) if case.install_hooks else None
    optimizer = make_optimizer(case, model.parameters())
    torch.manual_seed(1)
    snapshots = []
    for step_index in range(num_steps):
        optimizer.zero_grad()
        batch = on(device, rolled(case.batch(num_samples), step_index))
        done = plain_step(case, model, batch, NUM_MICROBATCHES)
        gradients = gradients_of(model.named_parameters())
        optimizer.step()
        snapshots.append(snapshot(model, merge_outputs(done.outputs), gradients, record))
    return snapshots


def on(device: torch.device, batch: Batch) -> Batch:
    """The batch of a script that moves it by itself."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def snapshot(
    model: nn.Module,
    outputs: Any,
    gradients: dict[str, Tensor | None],
    record: HookRecord | None = None,
) -> Snapshot:
    """What a step of plain torch left behind."""
    return Snapshot(
        _outputs(outputs),
        gradients,
        _copies(model.named_parameters()),
        _copies(model.named_buffers()),
        _fired(record),
    )


def place(model: nn.Module, stages: dict[str, int]) -> None:
    """Puts named modules on stages; an entry of its own overrules its parent's."""
    for name, module in model.named_modules():
        if name in stages:
            smp.set_partition(module, stages[name])


def smp_run(
    case: Case,
    *,
    num_steps: int = 2,
    num_samples: int = NUM_SAMPLES,
    stages: dict[str, int] | None = None,
    batch_of: Callable[[Batch], Batch] | None = None,
    optimizer_every: int = 1,
    prepare: Callable[[smp.DistributedModel], None] | None = None,
    **model_options: Any,
) -> list[Snapshot]:
    """The same by the library, in the session that is open; what this process holds.

    Args:
        case: what to train.
        num_steps: optimizer steps.
        num_samples: in the whole batch.
        stages: placement by module name, for ``auto_partition: False``; None: the library decides.
        batch_of: this rank's part of the batch; None: all of it.
        optimizer_every: training steps for one of the optimizer; gradients add up in between.
        prepare: called with the wrapped model before the first step.
        model_options: for ``DistributedModel``.
    """
    torch.manual_seed(0)
    module = case.build()
    record = case.install_hooks(module) if case.install_hooks else None
    model = smp.DistributedModel(module, **model_options)
    if stages is not None:
        place(module, stages)
    optimizer = smp.DistributedOptimizer(make_optimizer(case, model.parameters()))

    @smp.step
    def train(model: smp.DistributedModel, batch: Batch) -> Any:
        output = case.forward_loss(model, batch)
        model.backward(case.loss_of(output))
        return output

    if prepare is not None:
        prepare(model)
    torch.manual_seed(1)
    snapshots = []
    for step_index in range(num_steps):
        if step_index % optimizer_every == 0:
            optimizer.zero_grad()
        batch = rolled(case.batch(num_samples), step_index)
        outputs = _outputs(train(model, batch_of(batch) if batch_of else batch))
        gradients = gradients_of(model.local_named_parameters())
        if (step_index + 1) % optimizer_every == 0:
            optimizer.step()
        snapshots.append(
            Snapshot(
                outputs,
                gradients,
                _copies(model.local_named_parameters()),
                _copies(model.local_named_buffers()),
                _fired(record),
            )
        )
    return snapshots


def compare(case: Case, placement: str, **options: Any) -> list[Difference]:
    """Runs both in the session that is open.

    Args:
        case: what to train.
        placement: "auto" or "zigzag", as the session is configured.
        options: for :func:`smp_run`.
    """
    stages = case.manual_stages(smp.state.num_stages) if placement == "zigzag" else None
    found = smp_run(case, stages=stages, **options)
    return differences_from_plain(case, found)


def differences_from_plain(case: Case, found: list[Snapshot]) -> list[Difference]:
    """How an undivided batch's run differs from plain torch."""
    expected = plain_run(case, len(found), device=smp.state.device)
    return [
        difference
        for step_index, (ours, plain) in enumerate(zip(found, expected, strict=True))
        for difference in differences(ours, plain, step_index)
    ]


def differences(ours: Snapshot, plain: Snapshot, step_index: int) -> list[Difference]:
    """Everything in which a process's snapshot deviates from the plain one."""
    found = []
    if len(ours.outputs) != len(plain.outputs):
        found.append(Difference(step_index, "number of outputs", float("inf")))
    pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(ours.outputs, plain.outputs))]
    for kind in ("gradients", "parameters", "buffers"):
        mine, theirs = getattr(ours, kind), getattr(plain, kind)
        pairs += [(f"{kind[:-1]} {name}", value, theirs[name]) for name, value in mine.items()]
    if smp.state.world is None:  # else each rank has its own modules' counts only
        pairs.append(("calls of hooks", ours.hooks, plain.hooks))
    for name, a, b in pairs:
        relative = _relative(a, b)
        if relative is not None:
            found.append(Difference(step_index, name, relative))
    return found


def too_large(case: Case, found: list[Difference]) -> list[str]:
    """The differences that may not be: any, where the order of sums is the same.

    Else 1e-6 in the first step; later ones start from parameters that differ already, and a
    gradient is worse conditioned than the parameters it is taken at.
    """
    limits = (0.0, 0.0) if case.exact else (1e-6, 1e-5)
    return [str(d) for d in found if d.relative > limits[min(d.step_index, 1)]]


def _relative(ours: Any, plain: Any) -> float | None:
    """None where both are the same to the bit."""
    if isinstance(ours, list) and isinstance(plain, list) and len(ours) == len(plain):
        worst = [d for a, b in zip(ours, plain) if (d := _relative(a, b)) is not None]
        return max(worst) if worst else None
    if not isinstance(ours, Tensor) or not isinstance(plain, Tensor):
        return None if ours == plain and type(ours) is type(plain) else float("inf")
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return float("inf")
    if torch.equal(ours, plain):
        return None
    if not (ours.is_floating_point() or ours.is_complex()) or not torch.isfinite(ours).all():
        return float("inf")
    scale = float(plain.norm())
    return float((ours - plain).norm()) / scale if scale else float("inf")


def _outputs(result: Any) -> list[Any]:
    leaves: list[Any] = []
    flatten(result, leaves)
    return [
        [tensor.detach().clone() for tensor in leaf.outputs] if isinstance(leaf, smp.StepOutput) else leaf
        for leaf in leaves
    ]


def gradients_of(named: Iterator[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    """Copies of the gradients, by name."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}


def _copies(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def _fired(record: HookRecord | None) -> dict[str, tuple[int, int]]:
    if record is None:
        return {}
    names = {*record.forward_calls, *record.backward_calls}
    return {name: (record.forward_calls[name], record.backward_calls[name]) for name in names}
