"""The batch of a step in numbers and words, to compare it between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from ..record.values.structure import flatten

__all__ = ["describe_inputs", "input_digest", "input_tensors"]


def input_tensors(inputs: list[Any]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(microbatch, number among its leaves, tensor) of all but parameters."""
    for m, (args, kwargs) in enumerate(inputs):
        leaves: list[Any] = []
        flatten((args, kwargs), leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
                yield m, i, leaf


def _bytes_digest(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        tensor = tensor.detach().to_dense()
    data = tensor.detach().cpu().contiguous()
    hasher = hashlib.blake2b(str((data.dtype, tuple(data.shape))).encode(), digest_size=8)
    hasher.update(data.reshape(-1).view(torch.uint8).numpy())
    return int.from_bytes(hasher.digest(), "little") >> 3


def input_digest(inputs: list[Any]) -> int:
    """A number made of the bytes of all tensors among the inputs; never 0."""
    return hash(tuple(_bytes_digest(tensor) for _, _, tensor in input_tensors(inputs))) | 1


def describe_inputs(inputs: list[Any]) -> list[str]:
    """One line for each tensor among the inputs."""
    return [
        f"got as tensor {i} of microbatch {m} {tensor.dtype}{list(tensor.shape)} with digest "
        f"{_bytes_digest(tensor):x}"
        for m, i, tensor in input_tensors(inputs)
    ]
