"""What a test needs to know of a model: one `Case` each.

A case is plain torch. The same ``forward_loss`` runs for the plain model and inside a training step
of the library under test, where ``model`` is the library's wrapper; so a case can neither know nor
help the library, and equal results mean that an unmodified user model works.

``zigzag_stages`` places blocks so that execution jumps back and forth between stages
(0, 3, 1, 2, 0, 3, ... with four): the order that a design made for a chain of stages cannot run.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Batch", "Case", "HookRecord", "regression_loss", "split_batch", "zigzag_stages"]

Batch = dict[str, Any]


def regression_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """The step of most cases: one input ``x``, one output, mean squared error to ``target``."""
    return F.mse_loss(model(batch["x"]), batch["target"])


def _output_itself(output: Any) -> Tensor:
    return output


@dataclass
class HookRecord:
    """How often the hooks of each module fired, by module name."""

    forward_calls: Counter[str] = field(default_factory=Counter)
    backward_calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Case:
    """One model with its batches and its step.

    Attributes:
        name: key in the registry.
        build: makes the model; deterministic after ``torch.manual_seed``.
        batch: num_samples -> keyword inputs of the step; every tensor has samples first, and the
            same call gives the same values.
        forward_loss: (model, batch) -> what the step function returns: the scalar loss, or a
            structure that holds it.
        loss_of: picks the scalar loss out of that.
        exact: results must agree to the bit; False where a split changes the order of a sum.
        random_in_blocks: blocks draw random numbers, which a split cannot draw in the plain
            model's order: runs with one seed are to be compared with each other instead.
        unused_parameters: trainable parameters that get no gradient.
        requires: package without which the model cannot be built.
        pretendable: a device in Python has kernels for it (`tests.pretended_device`).
        install_hooks: puts hooks on the model's blocks and returns what they will count; a
            comparison installs them on both sides, since they change values too.
        train_steps: optimizer steps after which results are compared; more than one, so that
            state kept from one step to the next shows.
        notes: what this model is here to catch.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    notes: str
    forward_loss: Callable[[Callable[..., Any], Batch], Any] = regression_loss
    loss_of: Callable[[Any], Tensor] = _output_itself
    exact: bool = True
    random_in_blocks: bool = False
    unused_parameters: frozenset[str] = frozenset()
    requires: str | None = None
    pretendable: bool = True
    install_hooks: Callable[[nn.Module], HookRecord] | None = None
    train_steps: int = 2

    @property
    def available(self) -> bool:
        """Whether its package is installed, and the device of pytest's ``--device`` can run it."""
        if not self.pretendable and os.environ.get("SMP_LITE_TESTS_DEVICE") == "pretended":
            return False
        return self.requires is None or importlib.util.find_spec(self.requires) is not None

    def manual_stages(self, num_stages: int) -> dict[str, int]:
        """The zigzag placement of this model; leaves the global random state as it was."""
        with torch.random.fork_rng(devices=[]):
            return zigzag_stages(self.build(), num_stages)


def zigzag_stages(model: nn.Module, num_stages: int) -> dict[str, int]:
    """Places successive blocks on stages 0, S-1, 1, S-2, ... and over again.

    Every module inside a block has an entry of its own, as if the block had been constructed under
    ``smp.partition``. Containers have none. A block that holds a parameter of an earlier block goes
    to that one's stage, since a shared parameter can live on one stage only.
    """
    pattern = [place // 2 if place % 2 == 0 else num_stages - 1 - place // 2 for place in range(num_stages)]
    stages: dict[str, int] = {}
    stage_of_parameter: dict[nn.Parameter, int] = {}
    num_placed = 0
    for block_name, block in _blocks(model):
        parameters = list(block.parameters())
        shared = [stage_of_parameter[p] for p in parameters if p in stage_of_parameter]
        if shared:
            stage = shared[0]
        else:
            stage = pattern[num_placed % num_stages]
            num_placed += 1
        stage_of_parameter.update(dict.fromkeys(parameters, stage))
        for inner_name, _ in block.named_modules():
            stages[f"{block_name}.{inner_name}" if inner_name else block_name] = stage
    return stages


def _blocks(container: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules to place whole, depth first: a module that holds a ModuleList is opened instead."""
    for name, child in container.named_children():
        if any(isinstance(module, nn.ModuleList) for module in child.modules()):
            yield from _blocks(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def split_batch(batch: Batch, num_microbatches: int) -> list[Batch]:
    """Cuts each tensor of the batch into equal microbatches along its first dimension.

    Raises:
        ValueError: the number of samples is not a multiple of ``num_microbatches``.
    """
    for name, tensor in batch.items():
        if len(tensor) % num_microbatches:
            raise ValueError(
                f"{name!r} has {len(tensor)} samples, which do not divide into "
                f"{num_microbatches} microbatches: ask the case for a multiple"
            )
    parts = {name: tensor.chunk(num_microbatches) for name, tensor in batch.items()}
    return [
        {name: tensors[microbatch_index] for name, tensors in parts.items()}
        for microbatch_index in range(num_microbatches)
    ]
