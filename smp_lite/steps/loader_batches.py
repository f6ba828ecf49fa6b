"""``smp.batches``: what a data loader gives, as the job's configuration counts it.

SageMaker and Colossal-AI cut one batch of the loader into microbatches. Enflame (``accum_degree``) and LiBai
(accumulation steps) take several batches of the loader for one optimizer step, each a microbatch. A step
function gets a step's whole batch in either case; so there, several are joined to one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch

from .. import session as session_module
from ..errors import SMPError
from ..record.values.structure import flatten, rebuild

__all__ = ["batches", "check_samples"]


def batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Goes through a data loader, one batch for each step.

    Args:
        loader: gives batches: tensors, or tuples, lists and dicts of them, all of one size along dimension 0.

    Yields:
        The loader's own batches; where the configuration consumes n of them for a step, n joined along
        dimension 0, which the step function cuts into n microbatches again.

    Raises:
        SMPError: the number of batches is no multiple of n, or batches of one step are not alike.
    """
    plan = session_module.current().plan
    if plan is None or plan.microbatches.source == "slice":
        yield from loader
        return
    count = plan.microbatches.count
    key = plan.said("microbatches").text()
    if isinstance(loader, Sized) and len(loader) % count:
        raise SMPError(
            f"the data loader has {len(loader)} batches, and {key} takes {count} for each step: "
            f"{len(loader) % count} would be left over; leave them out (drop_last, a shorter sampler)"
        )
    waiting: list[Any] = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) == count:
            yield _joined(waiting, key)
            waiting = []
    if waiting:
        raise SMPError(
            f"the data loader ended with {len(waiting)} batch(es) left over: {key} takes {count} for each "
            "step; leave them out"
        )


def check_samples(samples: Callable[[], set[int]]) -> None:
    """Holds a training step against the batch sizes that the configuration says (LiBai's does).

    What the loader gives is what trains, and may be fewer samples at the end of an epoch: a warning.

    Args:
        samples: gives the sizes of the tensors of one microbatch.
    """
    session = session_module.current()
    plan = session.plan
    if session.rank != 0 or plan is None or plan.microbatches.size is None:
        return
    if (found := samples()) and plan.microbatches.size not in found:
        said, size = plan.said("microbatches.size"), plan.microbatches.size
        is_default = f"{said.key} is not said, and by default {size}"
        says = is_default if said.is_default else f"{said.text()} means {size}"
        sizes = " or ".join(map(str, sorted(found)))
        warnings.warn(
            f"{says} samples in a microbatch, and those of this step have {sizes}, "
            f"which is what counts: give the data loader batch_size={size}, or say in the configuration what "
            "it gives",
            stacklevel=3,
        )


def _joined(parts: list[Any], key: str) -> Any:
    """One batch from several of the same nesting and shapes."""
    flat: list[list[Any]] = []
    specs = []
    for part in parts:
        leaves: list[Any] = []
        specs.append(flatten(part, leaves))
        flat.append(leaves)
    joined = []
    for column in zip(*flat, strict=False):
        tensors = [leaf for leaf in column if isinstance(leaf, torch.Tensor)]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if (tensors and len(tensors) < len(column)) or len(shapes) > 1 or () in shapes:
            raise SMPError(
                f"{key} joins {len(parts)} batches of the data loader for each step, and they are not alike: "
                f"tensors of shapes {sorted(map(list, shapes))}; leave out the shorter one (drop_last)"
            )
        joined.append(torch.cat(tensors) if tensors else column[0])
        if not tensors and any(leaf != column[0] for leaf in column[1:]):
            raise SMPError(
                f"{key} joins {len(parts)} batches of the data loader for each step, and a value that is no "
                f"tensor differs between them: {column[0]!r} and others. Make it a tensor with one entry for "
                "each sample"
            )
    if any(spec != specs[0] for spec in specs[1:]) or len({len(leaves) for leaves in flat}) > 1:
        raise SMPError(
            f"{key} joins {len(parts)} batches of the data loader for each step, nested differently"
        )
    return rebuild(specs[0], iter(joined))
