"""Which tensors of a batch share memory, and that they still do in new memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smp_lite.steps.overlaps import memory_of, overlaps, tensors_in


def members(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [overlap.members for overlap in overlaps(tensors)]


def moved(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same batch in other memory, as another rank has it."""
    (overlap,) = overlaps(tensors)
    memory, made = tensors_in(overlap)
    memory.copy_(memory_of(overlap, tensors))
    return [made[number] for number in range(len(tensors))]


def test_tensors_of_their_own_are_left_alone() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    assert members([rows[0], torch.ones(3), rows[1], rows[:0]]) == []
    assert members([torch.empty(5, 0), torch.empty(5, 0)]) == []
    assert members([rows.to_sparse(), rows.to_sparse(), torch.empty(2, device="meta")]) == []


def test_groups_are_found_whatever_their_order() -> None:
    rows, other = torch.arange(40.0).reshape(4, 10), torch.zeros(5)
    # The first holds the second and the fourth, which do not touch each other.
    assert members([rows, rows[1], other, rows[3, 2:], other[2:], torch.ones(2)]) in (
        [(0, 1, 3), (2, 4)],
        [(2, 4), (0, 1, 3)],
    )
    assert members([rows[:, ::2], rows[:, 1::2]]) == [(0, 1)]


def test_what_is_changed_in_one_is_changed_in_the_other() -> None:
    numbers = torch.arange(12.0).reshape(3, 4)
    batch = [numbers[:, 1:], numbers[:, :-1], numbers.t()]
    here = moved(batch)
    for tensor, original in zip(here, batch, strict=True):
        assert torch.equal(tensor, original)
        assert tensor.stride() == original.stride()
        assert tensor.data_ptr() != original.data_ptr()
    version = here[1]._version
    here[0].fill_(7.0)
    assert here[1]._version > version  # torch itself knows it
    batch[0].fill_(7.0)
    assert all(torch.equal(tensor, original) for tensor, original in zip(here, batch, strict=True))


def test_larger_items_lie_where_they_may() -> None:
    """Eight bytes behind an address that only a multiple of 16 makes a multiple of 8."""
    numbers = torch.arange(9.0)
    batch = [numbers[1:], numbers[2:8].view(torch.float64)]
    here = moved(batch)
    assert all(torch.equal(tensor, original) for tensor, original in zip(here, batch, strict=True))
    assert here[1].data_ptr() - here[0].data_ptr() == 4
