"""Plans for models that come without one: what is found, and what is left whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_lite.errors import SMPError
from smp_lite.nn.plans import derive_plan
from tests.tensor.plans.architectures import build


class Pair(nn.Module):
    """Two linear layers, and between them what a test wants."""

    def __init__(self, between: Callable[[Pair, Tensor], Tensor], p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)
        self.dropout, self.norm, self.scale = nn.Dropout(p), nn.LayerNorm(16), nn.Parameter(torch.ones(16))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, self.up(x)))


SAFE: dict[str, Callable[[Pair, Tensor], Tensor]] = {
    "gelu": lambda module, y: F.gelu(y),
    "squared": lambda module, y: F.relu(y).pow(2),
    "scaled": lambda module, y: 0.5 * y * (1.0 + torch.tanh(y)) - 1,
    "nothing": lambda module, y: y,
    "other dtype": lambda module, y: y.float().sigmoid().to(y.dtype),
}
UNSAFE: dict[str, Callable[[Pair, Tensor], Tensor]] = {
    "norm": lambda module, y: module.norm(y),
    "softmax": lambda module, y: y.softmax(-1),
    "a parameter": lambda module, y: y * module.scale,
    "a constant tensor": lambda module, y: y + torch.arange(16.0),
    "cut": lambda module, y: torch.cat([y[..., 8:], y[..., :8]], -1),
    "chunked": lambda module, y: torch.cat(y.chunk(2, -1)[::-1], -1),
    "reshaped": lambda module, y: y.view(*y.shape[:-1], 4, 4).transpose(-1, -2).flatten(-2),
    "mean": lambda module, y: y - y.mean(-1, keepdim=True),
    "another layer": lambda module, y: y + module.other(y[..., :8]),
    "in place": lambda module, y: y.index_fill_(-1, torch.tensor([0]), 0.0),
    "functional dropout": lambda module, y: F.dropout(y, 0.5),
}


@pytest.mark.parametrize("case", SAFE)
def test_safe(case: str) -> None:
    model = nn.ModuleDict({"block": Pair(SAFE[case])})
    assert derive_plan(model) == {"block.up": "colwise", "block.down": "rowwise"}


@pytest.mark.parametrize("case", UNSAFE)
def test_unsafe(case: str) -> None:
    with pytest.raises(SMPError, match="no pair of Linear layers"):
        derive_plan(nn.ModuleDict({"block": Pair(UNSAFE[case])}))


def test_dropout() -> None:
    model = Pair(lambda module, y: module.dropout(F.silu(y)), p=0.1)
    assert derive_plan(model) == {"up": "colwise", "dropout": "local_dropout", "down": "rowwise"}


def test_gates() -> None:
    class Gated(nn.Module):
        def __init__(self, same: bool) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(8, 16), nn.Linear(8, 16 if same else 1)
            self.down = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    assert derive_plan(Gated(True)) == {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    with pytest.raises(SMPError):
        derive_plan(Gated(False))


def test_sequences() -> None:
    model = nn.Sequential(
        *(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        *(nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
    )
    pairs = {"0": "colwise", "2": "rowwise", "4": "colwise", "5": "local_dropout", "7": "rowwise"}
    assert derive_plan(model) == pairs
    with pytest.raises(SMPError, match="Sequential has no pair"):
        derive_plan(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)))
    with pytest.raises(SMPError, match="Sequential has no pair"):
        derive_plan(nn.Sequential(nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 8)))


def test_what_is_shared_or_hooked_or_used_twice_stays_whole() -> None:
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    with pytest.raises(SMPError):
        derive_plan(tied)
    hooked = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    hooked[0].register_forward_hook(lambda module, args, output: None)
    with pytest.raises(SMPError):
        derive_plan(hooked)
    with pytest.raises(SMPError):
        derive_plan(Pair(lambda module, y: y + F.relu(module.up(module.down(y)))))


def test_what_is_safe_in_one_mode_alone() -> None:
    for wanted in (True, False):

        def between(module: Pair, y: Tensor, wanted: bool = wanted) -> Tensor:
            return F.relu(y) if module.training == wanted else y.softmax(-1)

        with pytest.raises(SMPError):
            derive_plan(Pair(between))


def test_models_are_left_as_they_were() -> None:
    model = build("llama").eval()
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    plan = derive_plan(model)
    assert set(plan) == {
        f"model.layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "up", "down")
    }
    assert before == {name: (id(p), p._version) for name, p in model.named_parameters()}
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "number", [lambda h: h.shape[-1], lambda h: h.size(-1), lambda h: h.numel(), lambda h: len(h)]
)
def test_a_pair_between_which_sizes_are_read_stays_whole(number: Callable[[Tensor], float]) -> None:
    """A part has other sizes, and what is made of them would be another number."""
    with pytest.raises(SMPError, match="no plan can be derived that is certainly safe"):
        derive_plan(Pair(lambda pair, h: torch.relu(h) / number(h)))
