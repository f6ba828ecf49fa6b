"""What a script may do with a model in half precision, and what is an error that says why. One process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from tests.half import reference
from tests.half.cases import build, net
from tests.tensor.runtime_cases import batches


def session(mode: str = "fp16", *, optimizer: str = "AdamW", partitions: int = 1, **scaling: Any) -> Any:
    """(model, optimizer, step)."""
    smp.init_in_memory({"partitions": partitions, "microbatches": 2, mode: True})
    model = smp.DistributedModel(net())
    scaling = scaling or {"static_loss_scale": 64.0}
    wrapped = smp.DistributedOptimizer(build(model.parameters(), optimizer), **scaling)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    return model, wrapped, step


def refuses(text: str) -> Any:
    return pytest.raises(smp.SMPError, match=text)


# Inputs and outputs -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


class Result(dict[str, Any]):
    """As the output of a Hugging Face model."""


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.register_buffer("mean", torch.ones(4))

    def forward(self, pair: Pair, *, more: dict[str, Any]) -> Any:
        tensors = (pair.left, pair.right[0], more["x"], more["ids"], more["mask"], self.mean)
        self.seen = [tensor.dtype for tensor in tensors]
        y = self.linear(pair.left + more["x"])
        return Result(logits=y, parts=(y.sum(), [y]), ids=more["ids"], flag=more["flag"])


@pytest.mark.parametrize(("mode", "kind"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_floating_inputs_are_cast_wherever_they_are_and_outputs_come_back(
    mode: str, kind: torch.dtype
) -> None:
    smp.init_in_memory({"partitions": 1, mode: True})
    inner = Nested()
    model = smp.DistributedModel(inner)
    x = torch.ones(2, 4)
    ids, mask = torch.arange(2), torch.tensor([True, False])
    more = {"x": x.double(), "ids": ids, "mask": mask, "flag": "as it is"}
    found = model(Pair(x, [x]), more=more)
    assert inner.seen == [kind, kind, kind, torch.int64, torch.bool, kind]
    assert type(found) is Result and found["flag"] == "as it is" and found["ids"] is ids
    assert found["logits"].dtype == found["parts"][0].dtype == found["parts"][1][0].dtype == torch.float32
    assert more["x"].dtype == torch.float64  # the caller's own is as it was


def test_a_step_of_a_nest_over_two_stages_casts_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, *, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
            return {"y": (self.last(self.first(inputs["x"])),)}

    smp.init_in_memory({"partitions": 2, "microbatches": 2, "bf16": True})
    model = smp.DistributedModel(Two())

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(inputs={"x": x})["y"][0]

    with torch.no_grad():
        found = step(torch.ones(4, 4)).concat()
    assert found.dtype == torch.float32 and torch.equal(found, found.bfloat16().float())


# Masters ----------------------------------------------------------------------------------------------------


def train_one(model: Any, optimizer: Any, step: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    step(*batches(number + 1)[number])
    optimizer.step()


def test_groups_hold_the_models_parameters_and_the_optimizer_steps_masters() -> None:
    model, optimizer, step = session()
    stepped: list[torch.dtype] = []
    in_hooks: list[torch.dtype] = []
    inner = optimizer.optimizer
    init_group = inner._init_group

    def init(group: dict[str, Any], *args: Any) -> Any:
        stepped.extend(p.dtype for p in group["params"])
        return init_group(group, *args)

    inner._init_group = init
    for register in (inner.register_step_pre_hook, inner.register_step_post_hook):
        register(lambda inner, *_: in_hooks.extend(p.dtype for g in inner.param_groups for p in g["params"]))
    train_one(model, optimizer, step)
    assert set(stepped) == {torch.float32}
    assert set(in_hooks) == {torch.float16}  # as between steps
    for parameter in model.parameters():
        master = optimizer.stand_in_of(parameter)
        assert parameter.dtype == torch.float16 and master.dtype == torch.float32
        assert torch.equal(master.half(), parameter)
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in members} == {id(p) for p in model.parameters()}


def test_weights_that_a_script_changes_count() -> None:
    model, optimizer, step = session(optimizer="SGD")
    train_one(model, optimizer, step)
    weight = model.get_module().out.weight
    before = optimizer.stand_in_of(weight).detach().clone()
    other = optimizer.stand_in_of(model.get_module().head.weight).detach().clone()
    with torch.no_grad():
        weight.fill_(0.5)
    optimizer.zero_grad()
    optimizer.step()  # no gradients: nothing else changes
    assert torch.equal(weight, torch.full_like(weight, 0.5))
    assert not torch.equal(optimizer.stand_in_of(weight), before)
    assert torch.equal(optimizer.stand_in_of(model.get_module().head.weight), other)  # more than its rounding
    assert not torch.equal(other, other.half().float())
    optimizer.reload_model_params()
    head = model.get_module().head.weight
    assert torch.equal(optimizer.stand_in_of(head), head.float())


def test_masters_that_are_loaded_without_their_weights_are_an_error() -> None:
    model, optimizer, step = session()
    train_one(model, optimizer, step)
    saved = optimizer.state_dict()
    kept = {key: value.clone() for key, value in saved["fp32_from_fp16"].items()}
    saved["fp32_from_fp16"] = kept
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    train_one(model, optimizer, step, 1)
    optimizer.load_state_dict(saved)
    with refuses("master weights that optimizer.load_state_dict has loaded are not those of the model"):
        train_one(model, optimizer, step)
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)  # in either order
    train_one(model, optimizer, step)


def test_a_whole_state_loads_before_the_first_step_without_rounding() -> None:
    model, optimizer, step = session(partitions=2)
    train_one(model, optimizer, step)
    state, weights = optimizer.state_dict(), model.state_dict()
    smp.reset()
    model, optimizer, step = session(partitions=2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    with refuses("waits for the first step"):
        optimizer.state_dict()
    with torch.no_grad():

        @smp.step
        def evaluate(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        evaluate(batches(1)[0][0])
    again = optimizer.state_dict()
    for position, entry in state["state"].items():
        assert torch.equal(again["state"][position]["exp_avg_sq"], entry["exp_avg_sq"])
        assert torch.equal(again["fp32_from_fp16"][position], state["fp32_from_fp16"][position])


def test_states_of_other_precisions_are_named() -> None:
    model, optimizer, step = session("bf16")
    train_one(model, optimizer, step)
    of_bf16 = optimizer.state_dict()
    smp.reset()
    model, optimizer, step = session("fp16")
    with refuses("the state is of a job in bf16, and this one trains in fp16"):
        optimizer.load_state_dict(of_bf16)
    plain = build(net().parameters()).state_dict()
    with refuses("the state is of a job in fp32, and this one trains in fp16"):
        optimizer.load_state_dict(plain)
    smp.reset()
    smp.init_in_memory({"partitions": 1})
    model = smp.DistributedModel(net())
    with refuses("the state is of a job in bf16, and this one trains in fp32"):
        smp.DistributedOptimizer(build(model.parameters())).load_state_dict(of_bf16)


def test_loading_into_the_inner_optimizer_does_not_round_either() -> None:
    model, optimizer, step = session()
    train_one(model, optimizer, step)
    saved = optimizer.orig_state_dict()
    kept = {i: entry["exp_avg"].clone() for i, entry in saved["state"].items()}
    train_one(model, optimizer, step, 1)
    optimizer.optimizer.load_state_dict(
        {**saved, "state": {i: {**e, "exp_avg": kept[i]} for i, e in saved["state"].items()}}
    )
    for i, entry in optimizer.orig_state_dict()["state"].items():
        assert torch.equal(entry["exp_avg"], kept[i])


def test_a_parameter_of_another_type_is_refused() -> None:
    smp.init_in_memory({"partitions": 1, "fp16": True})
    model = smp.DistributedModel(net())
    model.get_module().out.double()
    with pytest.raises(TypeError, match=r"float64; masters are made of float16 and bfloat16"):
        smp.DistributedOptimizer(build(model.parameters()))


def test_a_wrapped_model_is_not_converted_to_another_type() -> None:
    smp.init_in_memory({"partitions": 1, "fp16": True})
    model = smp.DistributedModel(net())
    assert model.half() is model
    for convert in (model.float, model.double, model.bfloat16, lambda: model.to(torch.float32)):
        with refuses(r"trained in torch\.float16 \(fp16: True\)"):
            convert()


def test_a_partitioned_model_is_not_converted() -> None:
    smp.init_in_memory({"partitions": 1})
    model = smp.DistributedModel(net())
    assert model.float() is model
    with refuses(r"model\.half\(\) after partition"):
        model.half()


def test_a_float32_part_is_stepped_itself_with_unscaled_gradients() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.float() * self.scale).sum()

    smp.init_in_memory({"partitions": 1, "fp16": True})
    model = smp.DistributedModel(Kept())
    model.get_module().float()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), static_loss_scale=128.0)
    model.backward(model(torch.full((3,), 2.0)))
    optimizer.step()
    assert torch.equal(model.get_module().scale.detach(), torch.zeros(3))


# What would be wrong numbers --------------------------------------------------------------------------------


def test_a_backward_by_hand_is_refused_in_fp16_and_fine_in_bf16() -> None:
    x, y = batches(1)[0]
    model, optimizer, _ = session("fp16")
    with refuses(r"loss.backward\(\) in fp16: the loss was not multiplied"):
        F.cross_entropy(model(x), y).backward()
    with refuses(r"loss.backward\(\) in fp16"):  # around the wrapper
        F.cross_entropy(model.get_module()(x.half()).float(), y).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = F.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss, [model.get_module().out.weight], retain_graph=True)[0]
    model.backward(loss)
    assert torch.equal(model.get_module().out.weight.grad, gradient * 64)
    smp.reset()
    model, optimizer, _ = session("bf16")
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_backward_by_hand_in_a_step_is_refused_too() -> None:
    model, *_ = session("fp16")

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    with refuses(r"call model.backward\(loss\)"):
        step(*batches(1)[0])


def test_gradients_of_several_losses_start_from_what_is_given() -> None:
    x, _ = batches(1)[0]
    model, _, _ = session("fp16")
    out = model(x)
    model.backward([out[:, 0], out[:, 1].sum()], [torch.full((8,), 0.5), torch.tensor(2.0)])
    seed = torch.zeros(8, 5).index_fill(1, torch.tensor(0), 0.5).index_fill(1, torch.tensor(1), 2.0)
    plain = net().half()
    plain(x.half()).float().backward(seed * 64)
    assert torch.equal(model.get_module().out.weight.grad, plain.out.weight.grad)


def test_there_is_no_backward_without_an_optimizer() -> None:
    smp.init_in_memory({"partitions": 1, "fp16": True})
    model = smp.DistributedModel(net())
    with refuses("before there is an optimizer, which decides the loss scale"):
        model.backward(model(batches(1)[0][0]).sum())


def test_another_optimizer_may_not_step_the_half_parameters() -> None:
    for mode in ("fp16", "bf16"):
        smp.reset()
        model, _, step = session(mode)
        step(*batches(1)[0])
        with refuses(f"SGD.step.* steps the model's own parameters, and with {mode}"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_the_inner_step_is_refused_in_fp16_and_right_in_bf16() -> None:
    model, optimizer, step = session("fp16")
    step(*batches(1)[0])
    with refuses("call step\\(\\) of the smp.DistributedOptimizer"):
        optimizer.optimizer.step()
    found = []
    for inner in (False, True):
        smp.reset()
        model, optimizer, step = session("bf16")
        step(*batches(1)[0])
        (optimizer.optimizer if inner else optimizer).step()
        found.append([optimizer.stand_in_of(p).detach().clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_torchs_norms_of_scaled_gradients_are_refused() -> None:
    model, _, step = session("fp16")
    step(*batches(1)[0])
    for call in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    ):
        with refuses("in fp16, which are multiplied by the loss scale: call optimizer.clip_master_grads"):
            call()
    # Norms of weights are what they are.
    assert torch.nn.utils.get_total_norm(list(model.parameters())) > 0


def test_in_bf16_torchs_clipping_means_what_it_says() -> None:
    model, optimizer, step = session("bf16", optimizer="SGD")
    x, y = batches(1)[0]
    step(x, y)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    plain = net().bfloat16()
    reference.microbatch_gradients(plain, torch.bfloat16, x, y, 2, 1.0)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    masters = [parameter.detach().float() for parameter in plain.parameters()]
    optimizer.step()
    for parameter, master, twin in zip(model.parameters(), masters, plain.parameters(), strict=True):
        decay = 0.01 * 0.1 if parameter.dim() > 1 else 0.0
        expected = master * (1 - decay) - 0.01 * twin.grad.float()
        torch.testing.assert_close(optimizer.stand_in_of(parameter).detach(), expected, rtol=1e-6, atol=1e-7)


def test_a_grad_scaler_is_refused_in_fp16_and_works_in_bf16() -> None:
    model, optimizer, step = session("fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    step(*batches(1)[0])
    with refuses("a GradScaler with fp16: True"):
        scaler.step(optimizer)
    with refuses("a GradScaler with fp16: True"):
        scaler.unscale_(optimizer)
    smp.reset()
    model, optimizer, _ = session("bf16")
    x, y = batches(1)[0]
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[model.get_module().out.weight]["step"] == 1


def test_gradients_of_two_scales_do_not_add_up() -> None:
    model, optimizer, step = session("fp16")
    step(*batches(1)[0])
    optimizer.loss_scale = 8.0
    with refuses("made with a loss scale of 64, and this backward would add some of 8 to them"):
        step(*batches(1)[0])
    optimizer.step()  # what is there is unscaled by what it was made with
    masters = [optimizer.stand_in_of(p).detach().clone() for p in model.parameters()]
    smp.reset()
    model, optimizer, step = session("fp16")
    step(*batches(1)[0])
    optimizer.step()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(optimizer.stand_in_of(parameter), master)
    model.zero_grad()
    optimizer.loss_scale = 8.0
    step(*batches(1)[0])


def test_clipped_gradients_are_the_last() -> None:
    _, optimizer, step = session("fp16")
    step(*batches(1)[0])
    optimizer.clip_master_grads(1e-3)
    step(*batches(1)[0])
    with refuses("gradients were changed after optimizer.clip_master_grads"):
        optimizer.step()
    optimizer.zero_grad()
    step(*batches(1)[0])
    optimizer.step()


def test_clipping_twice_clips_what_was_clipped() -> None:
    _, optimizer, step = session("fp16")
    step(*batches(1)[0])
    optimizer.clip_master_grads(1e-2)
    assert optimizer.clip_master_grads(1e-3) == pytest.approx(1e-2, rel=1e-3)


def test_a_parameter_that_trains_later_is_refused() -> None:
    smp.init_in_memory({"partitions": 1, "bf16": True})
    module = net(frozen=True)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(build(model.parameters()))
    module.blocks[1].up.weight.requires_grad_(True)
    model.backward(model(batches(1)[0][0]).sum())
    with refuses("trains now that was frozen when master weights and shards were made"):
        optimizer.step()


def test_closures_are_refused() -> None:
    _, optimizer, _ = session("bf16")
    with refuses(r"optimizer.step\(closure\) with fp16, bf16 or shard_optimizer_state"):
        optimizer.step(lambda: 0.0)


def test_optimizers_with_parameters_of_their_own_are_refused() -> None:
    smp.init_in_memory({"partitions": 1, "fp16": True})
    model = smp.DistributedModel(net())
    with refuses("LBFGS with fp16: it keeps the parameters as '_params' beside its groups"):
        smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))

    class Around:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups
            self.step, self.zero_grad = optimizer.step, optimizer.zero_grad
            self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    with refuses("Around with fp16: it is an object around an optimizer"):
        smp.DistributedOptimizer(Around(build(model.parameters())))

    class Ahead(torch.optim.Optimizer):
        """As many are written: without torch's ``__init__``."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    with refuses(r"Ahead with fp16: it is an object .* put Ahead around that: Ahead\(smp\.Distributed"):
        smp.DistributedOptimizer(Ahead(build(model.parameters())))


# Loss scale -------------------------------------------------------------------------------------------------


def test_an_overflow_leaves_everything_as_it_was() -> None:
    model, optimizer, step = session("fp16", dynamic_loss_scale=True, init_scale=2.0**40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(*batches(1)[0])
    assert optimizer.clip_master_grads(1.0) == -1.0 and not optimizer.overflow
    assert optimizer.step() is None
    assert optimizer.overflow and optimizer.loss_scale == optimizer.loss_scaler.loss_scale == 2.0**39
    assert not optimizer.state_dict()["state"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_hundred_overflows_in_a_row_end_the_job() -> None:
    _, optimizer, step = session("fp16", dynamic_loss_scale=True, init_scale=1.0)
    x, y = batches(1)[0]
    with refuses("gradients were not finite in 100 steps in a row at the smallest loss scale, 1"):
        for _ in range(100):
            optimizer.zero_grad()
            step(x * torch.inf, y)
            optimizer.step()


def test_scaling_means_nothing_without_fp16() -> None:
    for mode in ("bf16", "ddp"):
        smp.reset()
        model, optimizer, step = session(
            mode, dynamic_loss_scale=True, init_scale=4.0, dynamic_loss_args={"x": 1}
        )
        assert not hasattr(optimizer, "loss_scale") and not hasattr(optimizer, "loss_scaler")
        with refuses("optimizer.loss_scale belongs to fp16: True in the parameters"):
            _ = optimizer.loss_scale
        train_one(model, optimizer, step)
        assert not optimizer.overflow and optimizer.clip_master_grads(torch.inf) > 0


def test_schedulers_step_the_inner_optimizers_groups() -> None:
    for of_inner in (True, False):
        smp.reset()
        model, optimizer, step = session("fp16")
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer if of_inner else optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_one(model, optimizer, step)
            schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]


def test_autocast_and_dropout_run_inside() -> None:
    smp.init_in_memory({"partitions": 2, "microbatches": 2, "bf16": True})
    model = smp.DistributedModel(net(dropout=0.5))
    optimizer = smp.DistributedOptimizer(build(model.parameters()))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    losses = []
    for _ in range(2):
        losses.append(step(*batches(1)[0]).reduce_mean().item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] != losses[1] and all(map(torch.isfinite, map(torch.tensor, losses)))


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_smp_lite_check_compares_scaled_gradients(mode: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHECKED.replace("MODE", mode))
    done = subprocess.run(
        [sys.executable, "-m", "smp_lite.cli", "check", str(script)], capture_output=True, text=True
    )
    assert "equal to the bit" in done.stdout, done.stdout + done.stderr


CHECKED = """
import torch, torch.nn.functional as F, smp_lite as smp
from tests.half.cases import net
from tests.tensor.runtime_cases import batches
smp.init({"partitions": 2, "microbatches": 2, "MODE": True})
model = smp.DistributedModel(net())
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()), static_loss_scale=64.0)
@smp.step
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss
for x, y in batches(3):
    optimizer.zero_grad()
    step(x, y)
    optimizer.clip_master_grads(1.0)
    optimizer.step()
"""


# What is not of the half type -------------------------------------------------------------------------------


def test_complex_buffers_stay_complex() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("turn", torch.polar(torch.ones(3), torch.tensor([0.3, 0.5, 0.7])))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real((x * self.scale).float() * self.turn)

    smp.init_in_memory({"partitions": 1, "bf16": True})
    model = smp.DistributedModel(Rotated())
    assert torch.equal(model(torch.ones(3)), torch.view_as_real(Rotated().turn))


def test_a_float32_part_is_clipped_with_the_masters() -> None:
    smp.init_in_memory({"partitions": 1, "bf16": True})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    model.get_module()[1].float()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    weight, start = model.get_module()[1].weight, torch.ones(2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight.grad = torch.tensor([3.0, 4.0])
    assert optimizer.clip_master_grads(1.0) == 5.0
    optimizer.step()
    assert torch.equal(weight.grad, torch.tensor([3.0, 4.0]))
    assert torch.allclose(start - weight.detach(), torch.tensor([0.6, 0.8]), atol=1e-5)


def test_saving_while_other_weights_stand_in_the_model_leaves_the_masters() -> None:
    def run(*, saves: bool) -> dict[str, torch.Tensor]:
        smp.reset()
        model, optimizer, step = session("bf16")
        for number in range(4):
            train_one(model, optimizer, step, number)
            if saves and number == 1:
                kept = {name: value.clone() for name, value in model.state_dict().items()}
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
                masters = optimizer.state_dict()["fp32_from_fp16"].values()
                halves = [p for lists in optimizer.param_groups for p in lists["params"]]
                assert all(torch.equal(m, p.float()) for m, p in zip(masters, halves, strict=True))
                model.load_state_dict(kept)
        return {name: value.clone() for name, value in model.state_dict().items()}

    plain, saved = run(saves=False), run(saves=True)
    assert all(torch.equal(value, saved[name]) for name, value in plain.items())


def test_an_accumulator_that_the_optimizer_begins_with_is_not_rounded() -> None:
    smp.init_in_memory({"partitions": 1, "bf16": True})
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    )
    sums = [state["sum"] for state in optimizer.state.values()]
    assert sums and all(torch.equal(value, torch.full_like(value, 0.1)) for value in sums)
    assert {value.dtype for value in sums} == {torch.float32}


def test_a_backward_by_hand_to_a_parameter_beside_the_model_is_refused_too() -> None:
    smp.init_in_memory({"partitions": 1, "fp16": True})
    model = smp.DistributedModel(net())
    own = nn.Parameter(torch.ones(1))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), own], lr=0.1), static_loss_scale=64.0
    )
    x, y = batches(1)[0]
    model.backward(F.cross_entropy(model(x) * own, y))
    with refuses("call model.backward"):
        own.square().sum().backward()
    optimizer.step()


def test_masters_of_a_scripts_own_are_refused_over_stages_and_right_in_one() -> None:
    for partitions in (1, 2):
        smp.init_in_memory({"partitions": partitions, "microbatches": 2})
        model = smp.DistributedModel(net().bfloat16())
        masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        optimizer = torch.optim.SGD(masters, lr=0.1)
        if partitions == 1:
            smp.DistributedOptimizer(optimizer)
        else:
            with refuses(r"copies of them \(master weights\?\).*let fp16: True or bf16: True keep"):
                smp.DistributedOptimizer(optimizer)
        smp.reset()
