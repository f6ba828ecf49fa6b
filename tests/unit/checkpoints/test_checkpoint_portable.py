"""A full checkpoint resumes on any number of partitions, and in plain PyTorch, as if nothing had happened.

On real ranks: `tests/launch/api/test_api_checkpoint.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.api_support import NUM_MICROBATCHES, in_memory, place, same

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")

WORDS, WIDTH = 11, 8
SAVED, ALL = 3, 6
"""Steps before the save, and all."""


class Tied(nn.Module):
    """An embedding that is also the head, blocks between, a buffer that changes, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1][1].bias.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(words))
        return self.head(self.norm(hidden.flatten(0, 1)))


def build(seed: int = 7) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups, not in the order of the model's parameters, with settings of their own."""
    named = list(net.named_parameters())
    few = [p for name, p in named if "bias" in name and p.requires_grad]
    others = [p for name, p in reversed(named) if "bias" not in name]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": few, "lr": 0.02}], lr=0.01)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def words(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    drawn = torch.randint(WORDS, (4, 6), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def loss_of(net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens), targets.flatten())


@smp.step
def train(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = loss_of(model, tokens, targets)
    model.backward(loss)
    return loss


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=ALL + 1)


def run(model: Any, optimizer: Any, scheduler: Any, indices: range) -> list[Tensor]:
    losses = []
    for index in indices:
        optimizer.zero_grad()
        losses.append(train(model, *words(index)).stack())
        optimizer.step()
        scheduler.step()
    return losses


def plain_run(net: nn.Module, optimizer: Any, scheduler: Any, indices: range) -> list[Tensor]:
    losses = []
    for index in indices:
        optimizer.zero_grad()
        found = []
        parts = zip(*(each.chunk(NUM_MICROBATCHES) for each in words(index)), strict=True)
        for tokens, targets in parts:
            loss = loss_of(net, tokens, targets)
            (loss / NUM_MICROBATCHES).backward()
            found.append(loss.detach())
        losses.append(torch.stack(found))
        optimizer.step()
        scheduler.step()
    return losses


def start(partitions: int, kind: Any, cut: str | None = None, seed: int = 8) -> tuple[Any, Any, Any]:
    """A new session; `cut` names the only block on the last stage, None: the library's choice."""
    smp.reset()
    in_memory(partitions, **({} if cut is None else {"auto_partition": False, "default_partition": 0}))
    net = build(seed)
    model = smp.DistributedModel(net)
    if cut is not None:
        place(lambda name: partitions - 1 if name.startswith(cut) else 0, net)
    optimizer = smp.DistributedOptimizer(kind(model.module))
    return model, optimizer, schedule(optimizer)


def save(path: Path, kind: Any) -> tuple[list[Tensor], Any]:
    """Trains on 2 partitions and saves on the way; the losses after that, and the state at the end."""
    model, optimizer, scheduler = start(2, kind, seed=7)
    run(model, optimizer, scheduler, range(SAVED))
    smp.save_checkpoint(
        path, "t", partial=False, model=model, optimizer=optimizer, user_content=scheduler.state_dict()
    )
    losses = run(model, optimizer, scheduler, range(SAVED, ALL))
    return losses, (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("steps_before", [0, 1], ids=["before partition", "after"])
@pytest.mark.parametrize(
    ("partitions", "cut"), [(1, None), (3, None), (2, "blocks.0"), (2, "blocks.2")], ids=str
)
@pytest.mark.parametrize("kind", [adam, sgd])
def test_training_goes_on_to_the_bit(
    tmp_path: Path, kind: Any, partitions: int, cut: str | None, steps_before: int
) -> None:
    losses, wanted = save(tmp_path, kind)
    model, optimizer, scheduler = start(partitions, kind, cut)
    run(model, optimizer, scheduler, range(steps_before))
    scheduler.load_state_dict(smp.resume_from_checkpoint(tmp_path, partial=False))
    assert same(run(model, optimizer, scheduler, range(SAVED, ALL)), losses)
    assert same((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()), wanted)


@pytest.mark.parametrize("kind", [adam, sgd])
def test_plain_pytorch_goes_on_to_the_bit(tmp_path: Path, kind: Any) -> None:
    losses, wanted = save(tmp_path, kind)
    net = build(seed=8)
    optimizer = kind(net)
    scheduler = schedule(optimizer)
    net.load_state_dict(torch.load(tmp_path / "t", weights_only=True))
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer_t", weights_only=True))
    scheduler.load_state_dict(torch.load(tmp_path / "user_content_t", weights_only=True))
    assert same(plain_run(net, optimizer, scheduler, range(SAVED, ALL)), losses)
    assert same((net.state_dict(), optimizer.state_dict(), scheduler.state_dict()), wanted)


def test_what_plain_pytorch_has_saved_is_resumed_with_its_optimizer(tmp_path: Path) -> None:
    net = build(seed=7)
    optimizer: Any = adam(net)
    scheduler = schedule(optimizer)
    plain_run(net, optimizer, scheduler, range(SAVED))
    for name, each in (("t", net), ("optimizer_t", optimizer), ("user_content_t", scheduler)):
        torch.save(each.state_dict(), tmp_path / name)
    losses = plain_run(net, optimizer, scheduler, range(SAVED, ALL))
    model, optimizer, scheduler = start(3, adam)
    scheduler.load_state_dict(smp.resume_from_checkpoint(tmp_path, tag="t", partial=False))
    assert same(run(model, optimizer, scheduler, range(SAVED, ALL)), losses)


def test_a_tied_weight_is_saved_once(tmp_path: Path) -> None:
    save(tmp_path, adam)
    state = torch.load(tmp_path / "t", weights_only=True)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    moments = torch.load(tmp_path / "optimizer_t", weights_only=True)["state"].values()
    assert sum(each["exp_avg"].shape == (WORDS, WIDTH) for each in moments) == 1


def test_an_optimizer_of_other_groups_is_refused(tmp_path: Path) -> None:
    save(tmp_path, adam)
    start(3, sgd)
    with pytest.raises(ValueError, match="2 parameter groups, but the optimizer has 1"):
        smp.resume_from_checkpoint(tmp_path, partial=False)


def test_a_full_checkpoint_before_the_first_step_resumes(tmp_path: Path) -> None:
    model, optimizer, scheduler = start(2, adam, seed=7)
    smp.save_checkpoint(tmp_path, "t", partial=False, model=model, optimizer=optimizer)
    losses = run(model, optimizer, scheduler, range(2))
    model, optimizer, scheduler = start(3, adam)
    assert smp.resume_from_checkpoint(tmp_path, partial=False) is None
    assert same(run(model, optimizer, scheduler, range(2)), losses)
