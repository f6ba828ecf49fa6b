"""Kernels of attention on GPUs, as graphs of segments see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from smp_lite.runtime.graphs import looking


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_attention_draws_only_with_dropout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, where the kernels have the tag of those that draw, and give a seed on the host."""
    monkeypatch.setattr(looking, "home", lambda: torch.device("cuda", 0))
    attention = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    between = (None, True) if kind == "efficient" else ()
    with FakeTensorMode(), looking._Operations():
        x = torch.empty(2, 4, 16, 8, device="cuda:0", dtype=torch.bfloat16)
        attention(x, x, x, *between, dropout_p=0.0)
        with pytest.raises(looking._Found, match="draws random numbers"):
            attention(x, x, x, *between, dropout_p=0.1)


def test_a_seed_on_the_host_is_no_work_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing is captured: outside of this no result may be the host's."""
    monkeypatch.setattr(looking, "home", lambda: torch.device("meta"))
    x = torch.empty(2, 4, 16, 8, device="meta")
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    with _SeedOnTheHost(), looking._Operations():
        attention(x, x, x, None, True)
    with pytest.raises(looking._Found, match="computes on another device"), looking._Operations():
        torch.ops.aten.scalar_tensor(1.0, device="cpu")


class _SeedOnTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, logsumexp, *_ = func(*args, **(kwargs or {}))
        return output, logsumexp, *(torch.zeros((), dtype=torch.int64) for _ in range(2))
