"""Tensors whose memory has been given back, as sharded parameters' is while nobody uses them."""

from __future__ import annotations

import torch

from smp_lite.record.state.python_state import PythonState
from smp_lite.record.values.memory import digest_of, is_given_back


def test_nobody_reads_them() -> None:
    """To read one ends the process."""
    tensor, other = torch.ones(2, 3).t(), torch.ones(4)  # to make it contiguous reads it
    tensor.untyped_storage().resize_(0)
    assert is_given_back(tensor) and not is_given_back(other)
    assert not is_given_back(torch.empty(0)) and not is_given_back(torch.ones(2, device="meta"))
    assert digest_of(tensor) == 0 != digest_of(other)
    state = PythonState()
    state.add([tensor, other], "a list")
    assert state.changed() is None
    other.add_(1)
    assert "in place" in (state.changed() or "")
