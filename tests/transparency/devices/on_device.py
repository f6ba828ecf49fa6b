"""What ranks on a pretended device run; called by name through `tests.harness`."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.record.values.placed import TensorMeta
from tests.models import CASES, split_batch
from tests.models.layers import WIDTH, Chain, regression_batch
from tests.transparency.comparison import (
    NUM_MICROBATCHES,
    differences_from_plain,
    make_optimizer,
    on,
    place,
    smp_run,
    too_large,
)

__all__ = [
    "default_device",
    "devices_of",
    "evaluate",
    "inputs",
    "named_device",
    "outside",
    "peak",
    "places",
    "states",
    "train_in_memory",
]


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except smp.SMPError as error:
        return str(error)
    return "nothing was raised"


def train_in_memory(name: str, config: dict[str, Any]) -> list[str]:
    """One process that plays all stages on its device, against plain torch there."""
    smp.init_in_memory({"microbatches": NUM_MICROBATCHES, **config})
    case = CASES[name]
    placement = None if config.get("auto_partition", True) else case.manual_stages(config["partitions"])
    return too_large(case, differences_from_plain(case, smp_run(case, stages=placement)))


def evaluate(name: str) -> tuple[list[str], str]:
    """What differs in the results of a step without backward, and this rank's device."""
    smp.init()
    ours = smp.state.device
    case = CASES[name]
    torch.manual_seed(0)
    model = smp.DistributedModel(case.build())
    place(model.module, case.manual_stages(2))

    @smp.step
    def step(model: Any, batch: Any) -> Any:
        return case.forward_loss(model, batch)

    torch.manual_seed(0)
    plain = case.build().to(ours)
    batch = case.batch(8)
    with torch.no_grad():
        found = step(model, batch).outputs
        parts = split_batch(on(ours, batch), NUM_MICROBATCHES)
        wanted = [case.forward_loss(plain, part) for part in parts]
    wrong = [f"microbatch {i}" for i, (a, b) in enumerate(zip(found, wanted)) if not torch.equal(a, b)]
    wrong += [f"device of {i}" for i, a in enumerate(found) if a.device != ours]
    return wrong, str(ours)


def form_of_another_rank() -> tuple[str, str]:
    """The device of a form that a rank with another device has sent, and this rank's."""
    smp.init()
    ours = smp.state.device
    theirs = TensorMeta((1,), (1,), torch.float32, torch.device(ours.type, 1 - ours.index), False)
    return str(pickle.loads(pickle.dumps(theirs)).device), str(ours)


def devices_of(variable: str | None = None) -> tuple[str, str, str]:
    """The session's device, torch's current one, and the error if there was one."""
    if variable is not None:
        os.environ["SMP_LITE_DEVICE"] = variable
    error = _error(smp.init)
    if error != "nothing was raised":
        return "", "", error
    return str(smp.state.device), str(torch.accelerator.current_device_index()), ""


def default_device(folder: str) -> list[str]:
    """A script that makes everything on the device by torch's default: what differs from plain torch."""
    torch.set_default_device(torch.accelerator.current_accelerator())
    try:
        return _with_default_device(folder)
    finally:
        torch.set_default_device(None)


def _with_default_device(folder: str) -> list[str]:
    smp.init()
    torch.manual_seed(0)
    module = Chain()
    plain = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train, wrong = _step(), []
    for number in range(3):
        x, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        optimizer.zero_grad()
        losses = train(model, x, target)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        other.zero_grad()
        expected = []
        for part, goal in zip(x.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True):
            loss = (plain(part) - goal).square().mean()
            (loss / NUM_MICROBATCHES).backward()
            expected.append(loss.detach())
        theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        other.step()
        if not torch.equal(losses.stack(), torch.stack(expected)) or not torch.equal(norm, theirs):
            wrong.append(f"step {number}")
    smp.save_checkpoint(folder, tag="end", model=model, optimizer=optimizer)
    smp.resume_from_checkpoint(folder, tag="end")
    known = dict(plain.named_parameters())
    wrong += [name for name, p in model.local_named_parameters() if not torch.equal(p, known[name])]
    return wrong


def _step() -> Any:
    @smp.step
    def train(model: Any, x: Tensor, target: Tensor) -> Tensor:
        loss = (model(x) - target).square().mean()
        model.backward(loss)
        return loss

    return train


def named_device(number: int) -> str:
    """A script names a device to torch: what the first step says."""
    smp.init()
    model = smp.DistributedModel(Chain())
    torch.accelerator.set_device_index(number)
    return _error(lambda: _step()(model, **regression_batch(8)))


class _Buffered(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(b, nn.BatchNorm1d(WIDTH)) for b in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def places(where: str) -> list[str]:
    """Builds the model on the CPU, on meta or on the device; what is not on the device after a step.

    The optimizer is made before the step, and holds the same objects after it.
    """
    smp.init()
    ours = smp.state.device
    torch.manual_seed(0)
    if where == "meta":
        with torch.device("meta"):
            module = _Buffered()
        for part in module.modules():  # what has no rule of its own
            if isinstance(part, _Buffered):
                part.scale = torch.ones(WIDTH)
    else:
        module = _Buffered().to(ours if where == "device" else "cpu")
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    before = {id(p) for p in module.parameters()}
    found = _step()(model, **regression_batch(8))
    optimizer.step()
    wrong = [name for name, p in model.local_named_parameters() if p.device != ours or id(p) not in before]
    wrong += [f"gradient of {name}" for name, p in model.local_named_parameters() if p.grad.device != ours]
    wrong += [name for name, b in model.local_named_buffers() if b.device != ours]
    wrong += [name for name, p in model.named_parameters() if p.device != ours]
    for state in optimizer.local_state_dict()["state"].values():
        wrong += [
            f"state {key}"
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() and value.device != ours
        ]
    wrong += ["result" for loss in found.outputs if loss.device != ours]
    return wrong


def inputs() -> dict[str, Any]:
    """Where a step function finds its inputs, however they are nested, and that one object stays one."""
    smp.init()
    model = smp.DistributedModel(Chain())
    ours = smp.state.device
    seen: dict[str, Any] = {}

    @smp.step(non_split_inputs=["whole"])
    def train(model: Any, batch: Any, whole: Tensor, there: Tensor) -> Tensor:
        seen["devices"] = {
            str(t.device) for t in (batch["x"], batch["more"][0], batch["more"][1][0], whole, there)
        }
        loss = (model(batch["x"]) - there).square().mean() * whole.sum()
        model.backward(loss)
        return loss

    x = torch.ones(8, WIDTH)
    train(
        model,
        {"x": x, "more": [x, (torch.zeros(8, dtype=torch.int64),)]},
        whole=torch.ones(3),
        there=torch.zeros(8, WIDTH, device=ours),
    )
    seen["expected"] = {str(ours)}
    seen["kept"] = str(x.device)
    return seen


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def peak(optimizer_made_before: bool) -> tuple[int, int, int]:
    """Most bytes on the device until the model is partitioned, of this rank's part, and of a layer."""
    smp.init()
    ours = smp.state.device
    module: Any = torch.get_device_module(ours)
    model = smp.DistributedModel(_Wide())
    if optimizer_made_before:
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    start = module.memory_allocated(ours)
    module.reset_peak_memory_stats(ours)
    most: list[int] = []
    model.register_post_partition_hook(lambda *_: most.append(module.max_memory_allocated(ours) - start))
    step = smp.step(lambda model, x: model(x).sum())
    step(model, torch.ones(4, 64))
    own = sum(p.numel() * 4 for p in model.local_parameters())
    return most[0], own, 64 * 64 * 4


def states(folder: str) -> list[bool]:
    """Whether a state goes out and comes back, in each way there is: training on is the same."""
    smp.init()
    ours = smp.state.device
    case = CASES["gpt_tied"]

    def start(seed: int) -> Any:
        torch.manual_seed(seed)
        model = smp.DistributedModel(case.build())
        optimizer = smp.DistributedOptimizer(make_optimizer(case, model.parameters()))

        @smp.step
        def train(model: Any, batch: Any) -> Any:
            output = case.forward_loss(model, batch)
            model.backward(case.loss_of(output))
            return output

        def run() -> list[Tensor]:
            optimizer.zero_grad()
            losses = train(model, case.batch(8)).outputs
            optimizer.step()
            return [loss.detach().clone() for loss in losses]

        return model, optimizer, run

    model, optimizer, run = start(1)
    run()
    path = os.path.join(folder, "part.pt")
    smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}, path)
    smp.save_checkpoint(folder, "partial", model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "full", partial=False, model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "portable", model=model, optimizer=optimizer, portable=True)
    whole = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    wanted = run()
    right = []
    for form in ("smp.load", "dicts", "partial", "full", "portable"):
        smp.reset()
        smp.init()
        model, optimizer, run = start(2)
        if form == "smp.load":
            loaded = smp.load(path)
            right.append(all(t.device == ours for t in loaded["model"].values() if isinstance(t, Tensor)))
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        elif form == "dicts":
            model.load_state_dict(whole[0])
            optimizer.load_state_dict(whole[1])
        else:
            smp.resume_from_checkpoint(folder, tag=form, partial=form != "full")
        found = run()
        right.append(len(found) == len(wanted) and all(map(torch.equal, found, wanted)))
    return right


def outside(name: str = "gpt") -> list[str]:
    """A plain loop over one partition, with data of the CPU."""
    smp.init()
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.build().to(smp.state.device)
    torch.manual_seed(0)
    model = smp.DistributedModel(case.build())
    batch = case.batch(4)
    case.loss_of(case.forward_loss(plain, on(smp.state.device, batch))).backward()
    case.loss_of(case.forward_loss(model, on(smp.state.device, batch))).backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    return [n for n, p in model.local_named_parameters() if not torch.equal(p.grad, wanted[n])]
