"""The rows of a batch: which replica and which microbatch gets which.

Each rank has the whole batch. A replica takes a run of its rows, and cuts it into microbatches of
``per_device_batch_size / microbatches`` rows, rounded up; what is left over at the end of an epoch makes
fewer or smaller ones. Rows that are too few for all replicas make one more microbatch of one row, for which
the others compute a row again that counts nothing: replicas that share parameters must run the same shapes.
All ranks know all cuts, so they need not tell each other what they count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...errors import SMPError

__all__ = ["Rows", "cut", "join", "number_of_rows", "repeated", "rows_of"]


class Rows(NamedTuple):
    """Some rows of a batch that follow each other."""

    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


def cut(num_rows: int, num_replicas: int, num_microbatches: int, per_replica: int) -> list[list[Rows]]:
    """For each replica its microbatches: of the same sizes, or empty ones in the place of one row.

    Args:
        num_rows: of the batch of all replicas.
        num_replicas: that share it.
        num_microbatches: of a full batch.
        per_replica: rows of a full batch of one replica.
    """
    size = -(-per_replica // num_microbatches)
    each, left = divmod(num_rows, num_replicas)
    found = []
    for replica in range(num_replicas):
        start, end = replica * each, (replica + 1) * each
        own = [Rows(at, min(at + size, end)) for at in range(start, end, size)]
        if left:
            at = num_replicas * each + replica
            own.append(Rows(at, at + 1) if at < num_rows else Rows(num_rows, num_rows))
        found.append(own)
    return found


def number_of_rows(inputs: Any) -> int:
    """Of a batch: the length of its first tensor.

    Raises:
        SMPError: it has no tensor with rows.
    """
    stack = [inputs]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
        if isinstance(value, Mapping):
            stack.extend(reversed(list(value.values())))
        elif isinstance(value, list | tuple):
            stack.extend(reversed(value))
    raise SMPError(
        "the batch has no tensor, so its rows cannot be counted: let the data collator return tensors"
    )


def rows_of(inputs: Any, rows: Rows, num_rows: int, name: str = "inputs") -> Any:
    """Those rows of everything in the batch.

    Raises:
        SMPError: something in it has another number of rows.
    """
    if isinstance(inputs, torch.Tensor):
        if inputs.dim() == 0:
            return inputs
        if inputs.shape[0] != num_rows:
            raise SMPError(
                f"{name} has the shape {list(inputs.shape)} in a batch of {num_rows} rows, so it cannot be "
                "cut "
                "into microbatches and replicas: let the data collator put the batch first, or use "
                '"microbatches": 1 and one replica'
            )
        return inputs[rows.start : rows.end]
    if isinstance(inputs, Mapping):
        found = {key: rows_of(value, rows, num_rows, f"{name}[{key!r}]") for key, value in inputs.items()}
        return found if type(inputs) is dict else type(inputs)(found)  # type: ignore[call-arg]
    if isinstance(inputs, list | tuple):
        if inputs and not any(isinstance(item, torch.Tensor | Mapping) for item in inputs):
            if len(inputs) != num_rows:
                raise SMPError(
                    f"{name} is a list of {len(inputs)} in a batch of {num_rows} rows, so it cannot be cut "
                    "into "
                    'microbatches and replicas: leave it out, or use "microbatches": 1 and one replica'
                )
            return inputs[rows.start : rows.end]
        return type(inputs)(rows_of(item, rows, num_rows, f"{name}[{i}]") for i, item in enumerate(inputs))
    return inputs


def repeated(inputs: Any, row: int, count: int, num_rows: int) -> Any:
    """A row of everything in the batch, several times."""
    one = rows_of(inputs, Rows(row, row + 1), num_rows)
    return join([(Rows(i, i + 1), one) for i in range(count)], "inputs")


def join(parts: list[tuple[Rows, Any]], name: str = "output") -> Any:
    """Outputs of several cuts, in the order of the batch.

    Raises:
        SMPError: something in them has no row for each row of the batch.
    """
    parts = sorted(parts, key=lambda part: part[0].start)
    first = parts[0][1]
    if isinstance(first, torch.Tensor):
        if len(parts) == 1:
            return first
        for rows, tensor in parts:
            if tensor.dim() == 0 or tensor.shape[0] != rows.count:
                raise SMPError(
                    f"{name} has the shape {list(tensor.shape)} for {rows.count} rows, so that of the whole "
                    "batch "
                    "cannot be put together from microbatches and replicas: name it in ignore_keys, ask for "
                    'prediction_loss_only=True, or use "microbatches": 1 and one replica'
                )
        return torch.cat([tensor for _, tensor in parts])
    if isinstance(first, Mapping):
        return {key: join([(rows, part[key]) for rows, part in parts], f"{name}[{key!r}]") for key in first}
    if isinstance(first, list | tuple):
        items = [join([(rows, part[i]) for rows, part in parts], f"{name}[{i}]") for i in range(len(first))]
        return type(first)(items)
    return first
