"""What counts as a stage's memory, in sessions that plan and run nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from smp_lite.lifecycle.starting import planning
from smp_lite.plan.step.memory import StageMemory
from smp_lite.preview import memory_preview
from smp_lite.preview.action_memory import Played, play
from smp_lite.preview.memory_preview import CannotPlay, MemoryPreview, preview_memory
from smp_lite.preview.step_preview import PlanReady, stop_when_planned
from smp_lite.session import current

pytestmark = pytest.mark.filterwarnings("ignore:Stage . .*is the largest")

Loss = Callable[[Any, Tensor], Any]


def preview(
    build: Callable[[], nn.Module],
    x: Tensor,
    loss: Loss = lambda model, x: model(x).sum(),
    *,
    returned: Loss | None = None,
    make: Callable[..., torch.optim.Optimizer] | None = torch.optim.SGD,
    look: Callable[[], Any] = lambda: None,
    **parameters: Any,
) -> MemoryPreview:
    """Plans a step; `returned` computes what the step function returns from (loss, x).

    What `look` returns must be the same before and after.
    """
    with planning({"partitions": 2, "microbatches": 4} | parameters, stop_when_planned):
        smp.init()
        model = smp.DistributedModel(build())
        if make is not None:
            smp.DistributedOptimizer(make(model.parameters(), lr=0.1))

        @smp.step
        def step(model: Any, x: Tensor) -> Any:
            found = loss(model, x)
            model.backward(found)
            return returned(found, x) if returned else None

        with pytest.raises(PlanReady) as ready:
            step(model, x)
        before = look()
        found = preview_memory(current(), ready.value.batch, ready.value.recordings, ready.value.inputs)
        assert look() == before
    return found


def stages(*args: Any, **kwargs: Any) -> tuple[StageMemory, ...]:
    return preview(*args, **kwargs).stages


class Two(nn.Module):
    """A module for each stage."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def linears() -> nn.Module:
    return Two(nn.Linear(100, 100), nn.Linear(100, 100))


def language_model() -> nn.Module:
    return Two(nn.Embedding(60_000, 8), nn.Linear(8, 60_000, bias=False))


def test_what_the_loss_keeps_counts() -> None:
    """Cross entropy keeps log-probabilities as large as the logits, which themselves go."""
    tokens = torch.zeros(8, 32, dtype=torch.int64)

    def cross_entropy(model: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    logits_bytes = 2 * 32 * 60_000 * 4
    with_loss = stages(language_model, tokens, cross_entropy)[1]
    assert with_loss.when.startswith("B")
    assert with_loss.kept == pytest.approx(logits_bytes, rel=0.01)
    # Its backward makes a gradient of the log-probabilities and one of the logits.
    assert with_loss.running == pytest.approx(2 * logits_bytes, rel=0.01)
    all_forwards_first = stages(language_model, tokens, cross_entropy, pipeline="simple")[1]
    assert all_forwards_first.kept == pytest.approx(4 * logits_bytes, rel=0.01)


def test_received_values_count_until_their_backward() -> None:
    """Stage 1 keeps four inputs of 2 x 100 numbers; dropout's mask and the loss's share are its own."""
    x = torch.zeros(8, 100)
    found = stages(linears, x, pipeline="simple")[1]
    assert found.kept >= 4 * 2 * 100 * 4
    assert found.kept + found.running < 4 * 2 * 100 * 4 + 2 * 100 * 100 * 4


@pytest.mark.parametrize(
    ("make", "per_element"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2)], ids=["sgd", "adamw"]
)
def test_parameters_gradients_and_state(make: Any, per_element: int) -> None:
    size = 4 * (1000 * 1000 + 1000)
    found = stages(lambda: Two(nn.Linear(1000, 1000), nn.Linear(1000, 1000)), torch.zeros(8, 1000), make=make)
    for stage in found:
        assert stage.parameters == stage.gradients == size
        assert stage.optimizer == pytest.approx(per_element * size, abs=100)


def test_masters_and_their_gradients_count_in_half_precision() -> None:
    size = 2 * (1000 * 1000 + 1000)
    for stage in stages(
        lambda: Two(nn.Linear(1000, 1000), nn.Linear(1000, 1000)),
        torch.zeros(8, 1000),
        make=torch.optim.AdamW,
        bf16=True,
    ):
        assert stage.parameters == stage.gradients == size
        assert stage.optimizer == pytest.approx(3 * 2 * size, abs=100)
        assert stage.when == "optimizer.step()" and stage.running > 2 * size


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    def build() -> nn.Module:
        model = Two(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
        model.first.requires_grad_(False)
        return model

    frozen, trained = stages(build, torch.zeros(8, 1000), make=torch.optim.AdamW)
    assert (frozen.gradients, frozen.optimizer) == (0, 0)
    assert trained.gradients > 0


def test_every_rank_has_the_batch_and_all_buffers() -> None:
    def build() -> nn.Module:
        model = linears()
        model.second.register_buffer("table", torch.zeros(5000))
        return model

    x = torch.zeros(16, 100)
    parts = 4 * (100 * 100 + 100)
    for stage in stages(build, x):
        assert stage.batch == x.nbytes
        assert stage.parameters == parts + 5000 * 4


def test_a_batch_cut_out_of_a_data_set_is_not_the_data_set() -> None:
    data = torch.zeros(1000, 100)
    assert stages(linears, data[:16])[0].batch == 16 * 100 * 4


def test_what_the_step_returns_lies_on_every_rank() -> None:
    x = torch.zeros(16, 100)
    kept: dict[str, Tensor] = {}

    def loss(model: Any, x: Tensor) -> Tensor:
        kept["output"] = model(x)
        return kept["output"].sum()

    without = stages(linears, x)
    returning = stages(linears, x, loss, returned=lambda loss, x: kept.pop("output"))
    for before, after in zip(without, returning, strict=True):
        # What the last step returned, and where this one's is more, that too.
        assert after.batch - before.batch in (x.nbytes, 2 * x.nbytes)


def test_a_returned_loss_keeps_what_was_received_and_not_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its graph's leaves live as long as it does, until the step ends; what they got has been sent."""
    seen: list[Played] = []

    def listened(*args: Any, **kwargs: Any) -> Played:
        seen.append(play(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(memory_preview, "play", listened)
    x = torch.zeros(2, 100)
    stages(linears, x, returned=lambda loss, x: loss, microbatches=1)
    (played,) = seen
    left = sum(played.memory[0, True, action].kept for action in played.lists[0][1])
    assert left == x.nbytes + 4


def test_replicas_reduce_gradients_in_buckets() -> None:
    def build() -> nn.Module:
        return Two(nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)]), nn.Linear(100, 400))

    x = torch.zeros(8, 100)
    alone, replicas = preview(build, x), preview(build, x, ddp=True)
    one, many = alone.stages[0], replicas.stages[0]
    assert (many.when, many.gradients) == ("gradients reduced", 2 * one.gradients)
    assert one.gradients == one.parameters == 4 * 4 * (100 * 100 + 100)
    assert not any("replicas" in note for note in alone.notes)
    assert any("replicas" in note for note in replicas.notes)


def test_no_optimizer_is_taken_for_adamw_and_said() -> None:
    found = preview(linears, torch.zeros(8, 100), make=None)
    assert found.stages[0].optimizer == pytest.approx(2 * found.stages[0].parameters, abs=100)
    assert any("AdamW is counted" in note for note in found.notes)


class NumpySGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(torch.from_numpy(group["lr"] * parameter.grad.numpy()))


def test_an_optimizer_that_cannot_step_without_data_is_estimated_and_said() -> None:
    found = preview(linears, torch.zeros(8, 100), make=NumpySGD)
    assert any(note.startswith("NumpySGD cannot step") for note in found.notes)


class LooksAtData(nn.Module):
    """Runs for real while it is recorded: fake tensors have no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(x.abs().max() + 1)


def test_a_module_that_must_run_for_real_makes_a_lower_bound() -> None:
    found = preview(lambda: Two(nn.Linear(100, 100), LooksAtData()), torch.zeros(8, 100))
    known, unknown = found.stages
    assert known.not_counted == ()
    assert not known.total_text.startswith(">")
    assert unknown.not_counted == ("second",)
    assert unknown.total_text.startswith("> ")
    assert unknown.gradients == unknown.parameters  # they are known
    assert any(note.startswith("stage 1 needs more: second ") for note in found.notes)


def test_what_ran_while_recording_is_held_from_the_start_and_said() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        found = model(x).sum()
        found.item()
        return found

    found = preview(linears, torch.zeros(8, 100), loss)
    assert any("ran while it was recorded" in note for note in found.notes)
    # All but the last microbatch have run, forward and not backward; each keeps its input.
    assert found.stages[1].kept >= 4 * 2 * 100 * 4


def test_microbatches_of_different_graphs_are_played_each() -> None:
    """The second half takes a branch that keeps more."""

    def loss(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        if x[0, 0] > 0:
            output = output.exp().sin().exp()
        return output.sum()

    x = torch.zeros(8, 100)
    plain = stages(linears, x, loss, pipeline="simple")[1]
    x[4:] = 1
    mixed = stages(linears, x, loss, pipeline="simple")[1]
    x[:] = 1
    full = stages(linears, x, loss, pipeline="simple")[1]
    assert plain.kept < mixed.kept < full.kept


def test_the_model_is_left_as_it_was() -> None:
    calls: list[str] = []
    model = Two(nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100), nn.Dropout()), nn.Linear(100, 100))
    model.second.register_full_backward_hook(lambda *_: calls.append("backward"))

    def look() -> Any:
        tensors = [(id(tensor), tensor.tolist()) for tensor in (*model.parameters(), *model.buffers())]
        gradients = [parameter.grad for parameter in model.parameters()]
        return tensors, gradients, torch.get_rng_state().tolist(), gc.isenabled()

    preview(lambda: model, torch.zeros(8, 100), look=look)
    assert calls == []


def test_what_hooks_keep_counts() -> None:
    """The step plays what was recorded, hooks that ran around a module's call included."""

    def hooked() -> nn.Module:
        model = linears()
        model.second.register_forward_hook(lambda module, args, output: output.exp())
        return model

    x = torch.zeros(2, 100)
    plain, with_hook = (stages(build, x, microbatches=1)[1] for build in (linears, hooked))
    assert with_hook.kept == plain.kept + x.nbytes
    assert with_hook.not_counted == ()


class NumpyBackward(torch.autograd.Function):
    """A backward that fake tensors cannot run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(gradient.sum())


def test_a_backward_that_looks_at_data_is_an_error_and_no_figure() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        return NumpyBackward.apply(output).sum()

    with pytest.raises(CannotPlay, match="1B0 does not run on tensors without data"):
        preview(linears, torch.zeros(8, 100), loss)
